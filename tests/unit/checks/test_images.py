"""Recipes with images: the model, the columns, and what does not work with them."""

import json

import pytest
from PIL import Image

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from tests.recipe_texts import write_recipe

TEXT = """\
name: good
model:
  path: ./model
dataset:
  kind: inline
  prompt: {images: picture, user: "{{ image }} what?"}
  rows:
    - {picture: a.png, answer: "1"}
    - {picture: a.png, answer: "2"}
rewards:
  - {kind: contains, answer: answer}
generation:
  num_generations: 2
  backend: transformers
training:
  per_device_train_batch_size: 4
  max_steps: 2
"""
LLAVA = {"model_type": "llava", "vision_config": {}, "text_config": {}}


def problems_of(
    folder,
    text=TEXT,
    config=LLAVA,
    level="error",
    template="{{ messages }}",
    processor="{}",
    part="seen",
):
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "model" / "chat_template.jinja").write_text(template)
    (folder / "model" / "processor_config.json").write_text(processor)
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    found = check_recipe(write_recipe(folder, text), hardware=Hardware(gpus=1, cpus=2)).problems
    return {problem.path: getattr(problem, part) for problem in found if problem.level == level}


def test_paths_of_rows_in_the_recipe_are_relative_to_it(tmp_path):
    assert problems_of(tmp_path) == {}


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {**LLAVA, "model_type": "bert"}])
def test_a_model_that_reads_no_images_is_refused(tmp_path, config):
    assert "the model reads none" in problems_of(tmp_path, config=config)["model.path"]


def test_a_model_needs_a_processor_and_a_chat_template(tmp_path):
    assert "no JSON object" in problems_of(tmp_path, processor="{")["model.path"]
    assert "need a chat template" in problems_of(tmp_path, template="")["model.path"]


def test_a_model_that_reads_an_image_otherwise_beside_others_takes_none_in_episodes(tmp_path):
    (tmp_path / "tools.py").write_text('def see():\n    """See."""\n    return "red"\n')
    text = f"{TEXT}tools: [{{kind: function, path: ./tools.py:see}}]\nepisode: {{images: true}}\n"
    assert problems_of(tmp_path, text) == {}
    found = problems_of(tmp_path, text, {**LLAVA, "model_type": "llava_onevision"})
    assert "once a later turn brings another" in found["model.path"]


@pytest.mark.parametrize(
    ("old", "new", "path", "seen"),
    [
        ("images: picture", "images: picure", "dataset.prompt.images", "there is no column `picure`"),
        ("picture: a.png, answer: \"2\"", "picture: b.png, answer: \"2\"", "dataset.prompt.images", "b.png"),
        ("{{ image }}", "{{ image }}{{ image }}", "dataset.prompt.user", "has 1 image in"),
        ("user:", "system: '{{ image }}', user:", "dataset.prompt.system", "the column `image`"),
        ("user:", "style: text, user:", "dataset.prompt.images", "images need a chat template"),
        ("backend: ", "backend: transformers_continuous_batching #", "generation.backend", "does not sample"),
        ("max_steps: 2", "mode: async", "training.mode", "does not work with images yet"),
        ("training:", "warmup: {answer: x}\ntraining:", "warmup", "does not work with images yet"),
        ("training:", "launch: {strategy: fsdp2}\ntraining:", "launch.strategy", "fsdp2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_images_is_refused(tmp_path, old, new, path, seen):
    assert seen in problems_of(tmp_path, TEXT.replace(old, new))[path]


def test_settings_of_a_processor_without_images_are_warned_of(tmp_path):
    text = TEXT.replace("images: picture, ", "").replace("{{ image }} ", "")
    text = text.replace("./model", "./model\n  processor: {max_pixels: 100}")
    assert "no images" in problems_of(tmp_path, text, level="warning")["model.processor"]


def test_columns_with_images_that_no_prompt_names_are_noted(tmp_path):
    text = TEXT.replace("images: picture, ", "").replace("{{ image }} ", "")
    assert "`picture` holds images" in problems_of(tmp_path, text, level="note")["dataset.prompt"]
    text_only = {"model_type": "llama"}
    assert "dataset.prompt" not in problems_of(tmp_path, text, text_only, level="note")
    assert "dataset.prompt" not in problems_of(tmp_path, level="note")


@pytest.mark.parametrize(
    ("argument", "prompt", "fix"),
    [
        ("image", "images: picture, ", "name the argument `images`"),
        ("images", "", "name the columns with images in `dataset.prompt.images`"),
        ("image", "", "name the columns with images in `dataset.prompt.images`"),
    ],
)
def test_a_reward_gets_images_by_the_name_of_trl(tmp_path, argument, prompt, fix):
    (tmp_path / "r.py").write_text(f"def f(completions, {argument}, **kwargs):\n    return []\n")
    text = TEXT.replace("kind: contains, answer: answer", "kind: python, path: './r.py:f'")
    if not prompt:
        # A column of that name does not reach rewards.
        text = text.replace("images: picture, ", "").replace("{{ image }} ", "")
        text = text.replace("picture: a", "image: a")
    assert problems_of(tmp_path, text, part="fix")["rewards.0"].startswith(fix)


def test_judges_say_whether_they_see_images(tmp_path):
    judge = "rewards:\n  - {kind: judge, model: m, rubric: r, base_url: 'http://localhost:1/v1'"
    blind, seeing = (TEXT.replace("rewards:", f"{judge}{end}") for end in ("}", ", images: true}"))
    assert "does not see" in problems_of(tmp_path, blind, level="note")["rewards.0"]
    assert "rewards.0" not in problems_of(tmp_path, seeing, level="note")
    text = seeing.replace("images: picture, ", "").replace("{{ image }} ", "")
    assert (
        "no prompt has images" in problems_of(tmp_path, text, level="warning")["rewards.0.images"]
    )
