"""Makes what the recipes beside it need: three tiny random models and two small data files. No network.

    python recipes/offline/make.py

Writes `tiny-qwen2/`, `tiny-gpt2/`, `tiny-guesser/`, `zen.jsonl` and `scored.jsonl` into its own folder, or into
the one named.
The models know nothing: they show that everything works, in seconds.
"""

import json
import random
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

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


def make_word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 14 words, for guessing numbers."""
    words = ["<|im_start|>", "<|im_end|>", "guess", "higher", "lower", *"123456789"]
    backend = Tokenizer(
        models.WordLevel(
            {word: place for place, word in enumerate(words)}, unk_token="<|im_start|>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(words[:2])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_start|>",
        unk_token="<|im_start|>",
    )
    tokenizer.chat_template = GUESSER_TEMPLATE
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


def main(folder: Path) -> None:
    """Writes everything into `folder`; the same files every time."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    prompts, scored = make_prompts(), make_scored(random.Random(0))
    for name, rows in (("zen.jsonl", prompts), ("scored.jsonl", scored)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / name).write_text("".join(lines), encoding="utf-8")
    texts = [row["prompt"] for row in prompts] + [
        f"{row['prompt']}{row['response']}" for row in scored
    ]
    torch.manual_seed(0)
    qwen, gpt2 = make_tokenizer(texts, chat=True), make_tokenizer(texts, chat=False)
    guesser = make_word_tokenizer()
    for name, tokenizer, model in (
        ("tiny-qwen2", qwen, make_qwen2(qwen)),
        ("tiny-gpt2", gpt2, make_gpt2(gpt2)),
        ("tiny-guesser", guesser, make_llama(guesser)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    print(f"wrote three models, zen.jsonl and scored.jsonl into {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
