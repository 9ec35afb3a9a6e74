import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_cli.rewards.contract import Batch, RewardContext
from grpo_cli.rewards.kinds.format import (
    AnswerFormatParams,
    LanguageParams,
    ReasoningStepsParams,
    TagCountParams,
)


def score(params, completion):
    return params.build(RewardContext(64))(Batch([""], [completion]))[0].value


GOOD = "<think>abcd</think>\n<answer>x</answer>"


@pytest.mark.parametrize(
    ("params", "text", "expected"),
    [
        ({}, GOOD, 1),
        ({}, f"\n{GOOD}\n", 1),
        ({}, f"{GOOD} bye", 0),
        ({}, f"hi {GOOD}", 0),
        ({}, GOOD + GOOD, 0),
        ({}, "<think>a</think>b<answer>x</answer>", 0),
        ({}, "<answer>x</answer><think>a</think>", 0),
        ({}, "<think><answer>x</think></answer>", 0),
        ({}, "<think></think><answer>x</answer>", 0),
        ({}, "<think> </think><answer> </answer>", 0),
        ({}, "", 0),
        ({"min_think_characters": 8}, GOOD, 0),
        ({"min_think_characters": 8, "strict": False}, GOOD, 0.75),
        ({"min_think_characters": 0, "strict": False}, GOOD, 1),
        ({"strict": False}, "<think></think><answer></answer>", 0),
        ({"strict": False}, "<think>a</think>", 0),
        ({"prefilled": True}, GOOD.removeprefix("<think>"), 1),
        ({"prefilled": True}, GOOD, 0),
    ],
)
def test_answer_format(params, text, expected):
    assert score(AnswerFormatParams(**params), text) == expected


@pytest.mark.parametrize(
    ("params", "text", "expected"),
    [
        ({}, GOOD, 1),
        ({}, "<think>a</think>", 0.5),
        ({}, GOOD + "<think>", 0.75),
        ({}, "", 0),
        ({"tags": ["[A]", "[B]"]}, "[A] [B] [B]", 0.5),
    ],
)
def test_tag_count(params, text, expected):
    assert score(TagCountParams(**params), text) == expected


def test_tags_are_needed():
    with pytest.raises(ValidationError):
        TagCountParams(tags=[])


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1. add\n2. halve\n3) check", 3),
        ("Step 1: add\n**Step 2:** halve\n### Step 3\nStep 4 check", 3),
        ("- add\n* halve\n• check", 3),
        ("First, add. Next, halve. Finally, check.", 3),
        ("1. First, add", 1),
        ("1. add\n2. add\n3. add", 1),
        ("First, a. First, b. First, c.", 1),
        ("1.\n2.\n3.", 0),
        ("3.5 is it\n-5 is not", 0),
        ("first we add", 0),
        ("", 0),
    ],
)
def test_reasoning_steps(text, steps):
    assert score(ReasoningStepsParams(), text) == pytest.approx(min(1, steps / 3))
    assert score(ReasoningStepsParams(target=20), text) == pytest.approx(steps / 20)


@pytest.mark.parametrize(
    ("script", "text", "expected"),
    [
        ("latin", "Grüße, 42!", 1),
        ("latin", "да yes", 0.6),
        ("cyrillic", "<think>да</think> \\frac 5", 1),
        ("han", "东京ab", 0.5),
        (["han", "hiragana", "katakana"], "東京でラーメン", 1),
        ("katakana", "ﾗｰﾒﾝ", 1),
        ("hangul", "한국", 1),
        ("arabic", "سلام", 1),
        ("hebrew", "שלום", 1),
        ("devanagari", "हिन्दी", 1),
        ("greek", "αβγ", 1),
        ("thai", "ไทย", 1),
        ("cyrillic", "да ```python\nx``` 𝑥", 1),
        ("latin", "", 0),
        ("latin", "42", 0),
        ("latin", "<think></think>", 0),
    ],
)
def test_language(script, text, expected):
    assert score(LanguageParams(script=script), text) == pytest.approx(expected)


def test_language_can_leave_out_the_thinking():
    text = "<think>hm</think>да"
    assert score(LanguageParams(script="cyrillic"), text) == 0.5
    assert score(LanguageParams(script="cyrillic", target="after_thinking"), text) == 1
    with pytest.raises(ValidationError):
        LanguageParams(script="klingon")


@given(st.text())
def test_scores_stay_in_their_range(text):
    kinds = (AnswerFormatParams(strict=False), TagCountParams(), ReasoningStepsParams())
    for params in (*kinds, LanguageParams(script="latin")):
        assert 0 <= score(params, text) <= 1


def test_hostile_completions_are_fast():
    hostile = [
        " " * 50000,
        "```" * 20001,
        "<think>" * 9000,
        "* " * 20000,
        "\n" * 50000,
        "\\a" * 9999,
    ]
    started = time.process_time()
    for text in hostile:
        for params in (
            ReasoningStepsParams(),
            LanguageParams(script="greek"),
            AnswerFormatParams(),
        ):
            assert score(params, text) < 1
    assert time.process_time() - started < 5
