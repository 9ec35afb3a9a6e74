"""Messages as tokens, and the model's answers as messages."""

import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.dialogue import Dialogue
from tests.tiny_models import make_tiny_tokenizer
from tests.unit.environments.scripted import tokenizer_of

USER, TOOL = (
    [{"role": "user", "content": "3"}],
    [
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "b", "content": "4"},
    ],
)


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_replies_follow_the_end_of_an_answer_also_if_a_template_renders_it_anew(
    template, has_tools
):
    tokenizer = tokenizer_of(template)
    dialogue = Dialogue(tokenizer, has_tools=has_tools)
    text = "\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(dialogue.encode_replies(USER)) == text
    if has_tools:
        results = "".join(f"\n<tool_response>\n{n}\n</tool_response>" for n in (3, 4))
        expected = f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(dialogue.encode_replies(TOOL)) == expected


def test_a_stop_token_that_begins_the_next_message_is_not_written_twice():
    tokenizer = tokenizer_of("glm4moe")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|observation|>"]})
    stops = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    dialogue = Dialogue(tokenizer, has_tools=True, stops=[tokenizer.eos_token_id, *stops])
    assert tokenizer.decode(dialogue.encode_replies(USER)) == "\n3<|assistant|>"
    assert tokenizer.decode(dialogue.encode_replies(TOOL)).startswith("\n<tool_response>\n3\n")


def test_templates_that_will_not_do_are_refused():
    tokenizer = make_tiny_tokenizer()
    with pytest.raises(EpisodeError, match="leaves out tools, calls or their results"):
        Dialogue(tokenizer, has_tools=True)
    Dialogue(tokenizer, has_tools=False)
    tokenizer.chat_template = None
    with pytest.raises(EpisodeError, match="has no chat template"):
        Dialogue(tokenizer, has_tools=False)
    with pytest.raises(EpisodeError, match="how the model writes calls is not known"):
        Dialogue(tokenizer_of("deepseekv3"), has_tools=True)
