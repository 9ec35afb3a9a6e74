"""Makes what the recipes beside it need: four tiny random models and three small data files. No network.

    python recipes/offline/make.py

Writes `tiny-qwen2/`, `tiny-gpt2/`, `tiny-guesser/`, `tiny-llava/`, `zen.jsonl`, `scored.jsonl`, and `shapes.jsonl`
with pictures in `shapes/`, into its own folder, or into the one named.
The models know nothing: they show that everything works, in seconds.
"""

import json
import random
import sys
from pathlib import Path

import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

STARTS = ("A plan that", "Code that", "A test that", "An error that", "A name that")
MIDDLES = ("nobody reads", "says what it does", "hides", "fails early", "is shorter")
KIND = ("Thank you for asking.", "Gladly, here it is.", "Of course, let me help.")
COLD = ("No.", "Look it up yourself.", "That is not my problem.", "Why would I?")
REQUESTS = ("the way to the station", "a glass of water", "the time", "a good book", "some help")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


GUESSER_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


COLOURS = {"red": "#dc2828", "green": "#28a03c", "blue": "#2846dc", "yellow": "#e6c828"}
SHAPES = ("circle", "square", "triangle")
PICTURE = 32
"""Width and height of the pictures, in pixels."""
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def make_prompts() -> list[dict[str, str]]:
    """Openings of sentences in a column `prompt`, as `trl-internal-testing/zen` has them."""
    return [{"prompt": f"{start} {middle}"} for start in STARTS for middle in MIDDLES]


def make_scored(rng: random.Random) -> list[dict[str, object]]:
    """Requests with two to five answers each, scored by a made-up person who likes kind ones."""
    rows = []
    for number in range(60):
        request = f"Customer {number + 1} asks for {rng.choice(REQUESTS)}.\nAnswer:"
        for _ in range(rng.randint(2, 5)):
            kind = rng.random() < 0.5
            answer = rng.choice(KIND if kind else COLD)
            reward = round(rng.gauss(0.8 if kind else 0.2, 0.1), 2)
            rows.append({"prompt": request, "response": f" {answer}", "reward": reward})
    rng.shuffle(rows)
    return rows


def draw_shape(rng: random.Random, shape: str, colour: str) -> Image.Image:
    """A shape of some size somewhere on white."""
    picture = Image.new("RGB", (PICTURE, PICTURE), "white")
    size = rng.randint(12, 22)
    left, top = (rng.randint(0, PICTURE - 1 - size) for _ in range(2))
    right, bottom, draw = left + size, top + size, ImageDraw.Draw(picture)
    if shape == "triangle":
        corners = [(left, bottom), (right, bottom), ((left + right) // 2, top)]
        draw.polygon(corners, fill=COLOURS[colour])
    else:
        outline = draw.ellipse if shape == "circle" else draw.rectangle
        outline((left, top, right, bottom), fill=COLOURS[colour])
    return picture


def make_shapes(rng: random.Random, folder: Path) -> list[dict[str, str]]:
    """Draw 300 pictures of one shape each into `folder`; the rows name picture, shape and colour."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number in range(300):
        shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        name = f"{number:03}.png"
        draw_shape(rng, shape, colour).save(folder / name)
        rows.append({"picture": f"{folder.name}/{name}", "shape": shape, "colour": colour})
    return rows


def make_tokenizer(texts: list[str], *, chat: bool) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that has learned its words from `texts`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>" if chat else "<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def make_word_tokenizer(words: list[str], template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a few words, after those that begin and end an answer."""
    words = ["<|im_start|>", "<|im_end|>", *words]
    backend = Tokenizer(
        models.WordLevel(
            {word: place for place, word in enumerate(words)}, unk_token="<|im_start|>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([word for word in words if word.startswith("<")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_start|>",
        unk_token="<|im_start|>",
    )
    tokenizer.chat_template = template
    return tokenizer


def make_qwen2(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Two layers of a Qwen2, with random weights."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers of a Llama, with random weights; transformers loads any tokenizer as it is beside one."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_gpt2(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Two layers of a GPT-2, with random weights; it reads at most 256 tokens."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=256,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_llava(
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[LlavaProcessor, LlavaForConditionalGeneration]:
    """A Llava of two layers that look and two that write; Pillow alone prepares its images."""
    size, patch = {"height": PICTURE, "width": PICTURE}, 8
    image = tokenizer.convert_tokens_to_ids("<image>")
    patches = {"patch_size": patch, "vision_feature_select_strategy": "default"}
    images = LlavaImageProcessorPil(size={"shortest_edge": PICTURE}, crop_size=size)
    processor = LlavaProcessor(images, tokenizer, num_additional_image_tokens=1, **patches)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=PICTURE,
        patch_size=patch,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=make_llama(tokenizer).config,
        image_token_index=image,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_seq_length=(PICTURE // patch) ** 2,
    )
    return processor, LlavaForConditionalGeneration(config)


def main(folder: Path) -> None:
    """Writes everything into `folder`; the same files every time."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    prompts, scored = make_prompts(), make_scored(random.Random(0))
    shapes = make_shapes(random.Random(0), folder / "shapes")
    for name, rows in (("zen", prompts), ("scored", scored), ("shapes", shapes)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    texts = [row["prompt"] for row in prompts] + [
        f"{row['prompt']}{row['response']}" for row in scored
    ]
    torch.manual_seed(0)
    qwen, gpt2 = make_tokenizer(texts, chat=True), make_tokenizer(texts, chat=False)
    guesser = make_word_tokenizer(["guess", "higher", "lower", *"123456789"], GUESSER_TEMPLATE)
    looker = make_word_tokenizer(["<image>", "colour", "?", *COLOURS], LLAVA_TEMPLATE)
    processor, llava = make_llava(looker)
    for name, tokenizer, model in (
        ("tiny-qwen2", qwen, make_qwen2(qwen)),
        ("tiny-gpt2", gpt2, make_gpt2(gpt2)),
        ("tiny-guesser", guesser, make_llama(guesser)),
        ("tiny-llava", processor, llava),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    print(f"wrote four models, zen.jsonl, scored.jsonl and shapes.jsonl into {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
