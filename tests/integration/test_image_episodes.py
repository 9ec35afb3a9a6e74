"""Episodes with images: of the prompt, of an environment, and of a tool."""

import json
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import trl
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from trl import GRPOConfig

from grpo_cli.data.build import build_datasets
from grpo_cli.environments.player import open_player
from grpo_cli.models.loading import load_model
from grpo_cli.models.processor import load_processor
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.report.wording import list_turns
from grpo_cli.training.trainer import RunTrainer
from tests.integration.conftest import Workshop
from tests.integration.test_resuming import completions_of, steps_of
from tests.plain_rewards import scored_by

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
MARK = "<|image_pad|>"
WORDS = [
    "<|pad|>",
    "<|im_end|>",
    "other",
    MARK,
    CALL,
    "<|im_start|>assistant\n",
    "red",
    "blue",
    "1",
]
# A room shows a picture first, and a step brings none, or one with a text. The tool draws one that follows from
# nothing but the number of calls, and a text that looks like an image.
ROOM = """\
from PIL import Image

COLOURS = ["red", "lime", "blue", "white"]

def draw(number):
    return Image.new("RGBA", (20, 12), COLOURS[number % 4])

def look():
    '''Look at the wall.'''
    return [{"type": "image", "image": draw(2)}, {"type": "text", "text": "red <|image_pad|>"}]

class Room:
    def reset(self, seed):
        self.turns, self.seed = 0, seed
        return draw(seed) if seed % 2 else "red"

    def step(self, text):
        self.turns += 1
        view = [draw(self.seed + self.turns), "blue"] if self.turns == 1 else "blue"
        return view, self.turns == 3

    def reward(self):
        return self.turns

    def gold(self):
        return ["red"] * 3
"""
REWARD = """\
def seen(completions, images, **_):
    assert all(image.mode == "RGB" for own in images for image in own)
    shown = [sum("image" in str(message["content"]) for message in each) for each in completions]
    assert all(len(own) >= count for own, count in zip(images, shown))
    return [len(own) + 0.01 * len(str(each)) for each, own in zip(completions, images)]
"""
RECIPE = """\
name: looking
seed: 1
model: {{path: {model}}}
dataset: {{kind: environment, size: 40, eval_size: 4}}
environment: {{kind: python, path: ./room.py:Room}}
tools: [{{kind: function, path: ./room.py:look}}]
episode: {{max_turns: 4, max_turn_tokens: 10, images: true}}
rewards: [{{kind: environment}}, {{kind: python, path: ./reward.py:seen}}]
generation: {{num_generations: 4, max_completion_length: 90}}
training:
  per_device_train_batch_size: 8
  gradient_accumulation_steps: 2
  max_steps: 4
  save_steps: 3
  learning_rate: 1e-2
evaluation: {{temperature: 1.0}}
launch: {{use_cpu: true}}
"""
ASKED_BY = {
    "environment": RECIPE,
    "rows": RECIPE.replace(
        "{{kind: environment, size: 40, eval_size: 4}}", "{{kind: files, train: rows.jsonl}}"
    )
    .replace("rows.jsonl", "rows.jsonl, prompt: {{images: pictures, user: red}}")
    .replace("environment: {{kind: python, path: ./room.py:Room}}\n", "")
    .replace("{{kind: environment}}, ", ""),
}


def make_model(folder: Path) -> Path:
    """A Llava of one layer that looks and one that writes, with the chat template of Qwen3-VL."""
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "other"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([*WORDS[:2], MARK])
    backend.add_tokens(WORDS[4:6])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=WORDS[0], eos_token=WORDS[1], unk_token="other"
    )
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_vl.jinja"
    size, sides = {"height": 16, "width": 16}, {"hidden_size": 32, "intermediate_size": 64}
    shape = {**sides, "num_hidden_layers": 1, "num_attention_heads": 2}
    processor = LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size=size),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=MARK,
        chat_template=template.read_text(),
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **shape,
    )
    vision = CLIPVisionConfig(
        image_size=16, patch_size=8, projection_dim=32, initializer_range=0.3, **shape
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=WORDS.index(MARK),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def looker(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("looker"))


def write(folder: Path, model: Path, recipe: str = RECIPE):
    (folder / "room.py").write_text(ROOM)
    (folder / "reward.py").write_text(REWARD)
    for colour in ("red", "blue"):
        Image.new("RGB", (20, 12), colour).save(folder / f"{colour}.png")
    pictures = [[], ["red.png"], ["red.png", "blue.png"]]
    rows = [json.dumps({"pictures": pictures[n % 3]}) + "\n" for n in range(9)]
    (folder / "rows.jsonl").write_text("".join(rows))
    workshop = Workshop(folder, model)
    return workshop, workshop.write(recipe)


def count_messages(completions, **_):
    return [float(len(each)) for each in completions]


def keep_rollouts(trainer) -> list:
    """The rollouts of the batches that a trainer makes from now on."""
    kept, log = [], trainer.rollouts.log
    trainer.rollouts.log = lambda rollout: kept.append(rollout) or (log or (lambda x: x))(rollout)
    return kept


def open_trainer(folder: Path, recipe, model: Path):
    """A trainer of the recipe, with the player of its episodes."""
    config = GRPOConfig(
        output_dir=str(folder / "trained"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=90,
        beta=0.1,
        gradient_checkpointing=False,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    processor = load_processor(recipe.model)
    with ExitStack() as stack:
        player = None
        if recipe.has_episodes:
            player = stack.enter_context(open_player(recipe, processor))
        data = build_datasets(recipe, has_chat_template=True, count_tokens=None).train
        trainer = RunTrainer(
            model=load_model(recipe.model, device_is_cuda=False),
            args=config,
            processing_class=processor,
            train_dataset=data,
            **scored_by(RunTrainer, count_messages, player=player),
        )
        yield trainer, data


@pytest.mark.parametrize("asks", ["environment", "rows"])
def test_log_probabilities_and_gradient_are_those_of_whole_episodes(tmp_path, looker, asks):
    _, path = write(tmp_path, looker, ASKED_BY[asks])
    recipe = load_recipe(path)
    trainer, data = next(open_trainer(tmp_path, recipe, looker))
    torch.manual_seed(5)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    rollouts = keep_rollouts(trainer)
    batch = trainer.make_batch([dict(data[n // 4]) for n in range(16)])
    (rollout,) = rollouts
    assert len(Counter(map(len, rollout.images))) > 1
    expected, ids = [], []
    parts = rollout.prompt_ids, rollout.completion_ids, rollout.mask, rollout.images
    for prompt_ids, token_ids, mask, pictures in zip(*parts, strict=True):
        whole = torch.tensor([prompt_ids + token_ids])
        assert (whole == WORDS.index(MARK)).sum() == 4 * len(pictures)
        pixels = {}
        if pictures:
            images = trainer.processing_class.image_processor
            pixels = images(images=pictures, return_tensors="pt")
        logits = trainer.model(input_ids=whole, **pixels).logits[0, len(prompt_ids) - 1 : -1]
        answer = torch.tensor(token_ids)
        expected.append(logits.log_softmax(-1)[range(len(answer)), answer])
        ids.append(torch.tensor(mask))
    reference = batch["ref_per_token_logps"]
    for row, own in enumerate(expected):
        torch.testing.assert_close(reference[row, : len(own)], own, atol=1e-5, rtol=0)
    # At the first step all ratios are 1, and the policy is the reference.
    total = batch["num_items_in_batch"]
    losses = [
        (-advantage * (own - own.detach()).exp() * mask).sum() / total
        for own, mask, advantage in zip(expected, ids, batch["advantages"], strict=True)
    ]
    torch.stack(losses).sum().backward()
    wanted = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(torch.stack(losses).sum().item(), abs=1e-5)
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name], atol=1e-5, rtol=1e-4)
    assert wanted["model.multi_modal_projector.linear_1.weight"].abs().max() > 1e-6


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_is_measured_exported_and_reported(tmp_path, looker):
    workshop, recipe = write(tmp_path, looker)
    done = workshop.grpo("train", recipe)
    assert done.returncode == 0, done.stderr
    run, before = workshop.run, (steps_of(workshop), completions_of(workshop))
    weights = (run / "model" / "model.safetensors").read_bytes()
    log = (run / "completions" / "rank_0.jsonl").read_text()
    assert '{"type": "image"}' in log
    assert "PIL" not in log
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    done = workshop.grpo("train", recipe, "--resume-from", run / "checkpoints" / "checkpoint-3")
    assert done.returncode == 0, done.stderr
    assert (steps_of(workshop), completions_of(workshop)) == before
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    done = workshop.grpo("eval", run, "--json")
    assert done.returncode == 0, done.stderr
    done = workshop.grpo("export", run, "--to", tmp_path / "shipped", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verification"]["difference"]["largest"] < 1e-5
    assert (tmp_path / "shipped" / "processor_config.json").is_file()
    messages = json.loads(log.splitlines()[0])["messages"]
    assert any("[image]" in turn.text for each in messages for turn in list_turns(each))


def test_env_test_shows_images_and_names_those_that_cannot_be_read(tmp_path, looker):
    workshop, recipe = write(tmp_path, looker)
    done = workshop.grpo("env", "test", recipe, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1, "all agents look as often"
    assert result["images"] == {"20x12": sum(result["images"].values())}
    assert result["images"]["20x12"] > 4
    printed = " ".join(workshop.grpo("env", "test", recipe).stdout.split())
    count = result["images"]["20x12"]
    assert f"tried by itself, before agents played: {count} of 20x12 pixels" in printed
    assert {agent["name"] for agent in result["agents"]} >= {"gold", "repeating"}
    seen = {}
    for name, value in {
        "numbers": "[[0, 0], [0, 0]]",
        "texts": "['red', 'blue']",
        "nested": "[[draw(1)], 'red']",
        "bytes": "b'PNG'",
        "url": "[{'type': 'image_url', 'image_url': {'url': 'a.png'}}]",
        "image": "[draw(1), 3]",
        "part": "{'type': 'image', 'image': [0, 0]}",
        "empty": "Image.new('RGB', (0, 3))",
        "missing": "{'type': 'image', 'image': 'gone.png'}",
    }.items():
        (tmp_path / "room.py").write_text(
            ROOM.replace("view = [", f"return {value}, False\n        view = [")
        )
        problems = json.loads(workshop.grpo("env", "test", recipe, "--json").stdout)["problems"]
        seen[name] = [each["seen"] for each in problems if each["level"] == "error"]
    assert seen["numbers"] == seen["texts"]
    assert not any("was returned" in each for each in seen["numbers"])
    for name in ("nested", "bytes", "url"):
        assert "was returned where an image or text is read" in seen[name][0], seen
    assert "3 was returned where an image or text is read" in seen["image"][0]
    assert "step() returned an image that holds [0, 0], which is not an image" in seen["part"][0]
    assert "has no pixels: 0x3" in seen["empty"][0]
    assert "which does not exist" in seen["missing"][0]


def test_an_image_in_a_recipe_without_images_is_refused(tmp_path, looker):
    text = RECIPE.replace(", images: true", "").replace(
        ", {{kind: python, path: ./reward.py:seen}}", ""
    )
    workshop, recipe = write(tmp_path, looker, text)
    done = workshop.grpo("train", recipe)
    assert done.returncode == 1
    assert (
        "() returned an image, and the recipe has none. Fix: set `episode.images: true`"
        in done.stderr
    )
