"""A chat template in Jinja, taken apart into the turns that Ollama's template language can put."""

import jinja2
import pytest

from grpo_cli.exporting.formats import find_turns

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
FOLDED = (
    "{% for m in messages %}{% if m.role == 'system' %}{% else %}[{{ m.role }}]"
    "{% if loop.index0 == 1 %}{{ messages[0].content }} {% endif %}{{ m.content }}{% endif %}{% endfor %}>"
)


def renderer(source):
    template = jinja2.Environment().from_string(source)
    return lambda messages, opened: template.render(messages=messages, opened=opened)


@pytest.mark.parametrize("source", [CHATML, DEFAULT, LLAMA])
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


def test_a_template_that_is_more_than_turns_is_left_alone():
    assert find_turns(renderer(FOLDED)) is None
