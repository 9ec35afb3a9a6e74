"""A chat template in Jinja, taken apart into the turns that Ollama's template language can put; adapters."""

from types import SimpleNamespace

import jinja2
import pytest

from grpo_cli.exporting import formats
from grpo_cli.exporting.formats import find_turns, without_bos, write_adapter, write_modelfile
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import read_object, write_json
from tests.run_folders import PLAIN

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if opened %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)
LLAMA = (
    "<|begin|>{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if opened %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
ALWAYS = (
    "<|begin|><|h|>system<|/h|>\n\nToday\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|eot|>"
    + LLAMA.removeprefix("<|begin|>").replace("in messages", "in messages if m.role != 'system'")
)
"""Writes a system message also if there is none."""
FOLDED = (
    "{% for m in messages %}{% if m.role == 'system' %}{% else %}[{{ m.role }}]"
    "{% if loop.index0 == 1 %}{{ messages[0].content }} {% endif %}{{ m.content }}{% endif %}{% endfor %}>"
)


def renderer(source):
    template = jinja2.Environment().from_string(source)
    return lambda messages, opened: template.render(messages=messages, opened=opened)


@pytest.mark.parametrize("source", [CHATML, DEFAULT, LLAMA, ALWAYS])
def test_turns_give_back_what_the_template_gives(source):
    turns = find_turns(renderer(source))
    conversation = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    assert turns.render(conversation) == renderer(source)(conversation, True)
    assert turns.render(conversation[1:]) == renderer(source)(conversation[1:], True)


def test_the_go_template_holds_each_turn():
    turns = find_turns(renderer(DEFAULT))
    assert turns.default_system == "Be kind."
    assert turns.as_go() == (
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n"
    )


class Beginning:
    """A tokenizer that begins texts with a token, or does not."""

    bos_token, bos_token_id = "<|begin|>", 1

    def __init__(self, begins):
        self.begins = begins

    def __call__(self, text):
        return {"input_ids": [1, 2] if self.begins else [2]}


@pytest.mark.parametrize("source", [LLAMA, ALWAYS])
def test_the_token_that_begins_a_text_is_left_to_ollama_if_it_adds_it(source):
    turns = find_turns(renderer(source))
    assert "<|begin|>" not in without_bos(turns, Beginning(True)).as_go()
    assert without_bos(turns, Beginning(False)) == turns


def test_a_template_that_is_more_than_turns_is_left_alone():
    assert find_turns(renderer(FOLDED)) is None


def test_a_model_of_plain_text_is_given_it_whatever_its_template(tmp_path, monkeypatch):
    ends = SimpleNamespace(chat_template="x", eos_token_id=0, convert_ids_to_tokens=lambda _: ["e"])
    monkeypatch.setattr(formats, "load_tokenizer", lambda _: ends)
    monkeypatch.setattr(formats, "load_generation_config", lambda _: ends)
    recipe = Recipe.model_validate(PLAIN)
    (tmp_path / "m.gguf").touch()
    write_modelfile(SimpleNamespace(recipe=recipe, tokenizer=None, is_text=True), tmp_path)
    assert 'TEMPLATE "{{ .Prompt }}"' in (tmp_path / "Modelfile").read_text()


def test_an_adapter_names_the_revision_of_its_base(tmp_path, monkeypatch):
    processing = SimpleNamespace(save_pretrained=lambda _: None)
    monkeypatch.setattr(formats, "load_processing", lambda _: processing)
    trained, target = tmp_path / "trained", tmp_path / "out"
    trained.mkdir()
    target.mkdir()
    write_json(trained / "adapter_config.json", {"r": 4, "revision": None})
    (trained / "adapter_model.safetensors").touch()
    model = {"path": "org/model", "revision": "v1", "lora": {}}
    recipe = Recipe.model_validate({**PLAIN, "model": model})
    write_adapter(SimpleNamespace(trained=trained, recipe=recipe), target)
    assert read_object(target / "adapter_config.json") == {"r": 4, "revision": "v1"}
