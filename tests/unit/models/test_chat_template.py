"""What `grpo check` says of a chat template by its text agrees with what its tokens show when episodes begin."""

from pathlib import Path

import pytest
import trl

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.dialogue import Dialogue
from grpo_cli.errors import RecipeError
from grpo_cli.models.chat_template import find_dialogue_fault, find_tool_fault
from tests.tiny_models import make_tiny_tokenizer

FOLDER = Path(trl.__file__).parent / "chat_templates"
PICTURES = ("idefics3", "smolvlm", "llava_next")
"""Templates that take contents only as lists."""
TEMPLATES = sorted(
    path.stem for path in FOLDER.glob("*.jinja") if not path.stem.startswith(PICTURES)
)


def is_refused(tokenizer, *, has_tools):
    role = "tool" if has_tools else "user"
    try:
        dialogue = Dialogue(tokenizer, has_tools=has_tools)
        dialogue.encode_replies([{"role": role, "name": "add", "content": "3"}])
    except (EpisodeError, RecipeError):
        return True
    return False


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_fault_of_the_text_is_one_of_the_tokens(name):
    text = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = text
    variables = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    assert not find_dialogue_fault(text, variables)
    assert not is_refused(tokenizer, has_tools=False)
    # How calls are written, which `grpo check` leaves to the worker, may be refused too.
    if find_tool_fault(text, variables):
        assert is_refused(tokenizer, has_tools=True)


def test_templates_that_can_and_cannot_call_tools():
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert find_tool_fault((FOLDER / "qwen2_5.jinja").read_text(), tokens) == ""
    assert find_tool_fault((FOLDER / "qwen3.jinja").read_text(), tokens) == ""
    assert find_tool_fault((FOLDER / "llama3.jinja").read_text(), tokens) == "leaves out the tools"


def test_a_template_without_answers_is_no_dialogue():
    questions = "{% for each in messages if each.role == 'user' %}{{ each.content }}{% endfor %}"
    assert find_dialogue_fault(questions, {}) == "leaves out the model's answers"
