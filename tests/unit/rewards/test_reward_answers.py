import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_cli.rewards.answers import find_answer
from grpo_cli.rewards.contract import Batch, RewardContext
from grpo_cli.rewards.kinds.choice import ChoiceParams
from grpo_cli.rewards.kinds.exact import ContainsParams, ExactParams

QUESTION = (
    "Which city is it, I think? A. Rome B. Paris\nSay: The answer is (B) or (A). Paris counts."
)
DEGENERATE = ["", " \n", "<answer></answer>", "<think></think>", r"\boxed{}", "####", QUESTION, "."]


def score(params, gold, completion, prompt=""):
    batch = Batch([prompt], [completion], columns={"answer": [gold]})
    return params.build(RewardContext(64))(batch)[0].value


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        ("Paris", "paris.", 1),
        ("Paris", "<answer> Paris </answer>", 1),
        ("Paris", "<think>Rome</think>**Paris**", 1),
        ("Paris", "It is Paris", 0),
        ("Paris", "<think>Paris</think>Rome", 0),
        ("New  York", "new\nyork", 1),
        ("1,000", "1000", 1),
        ("0.5", "1/2", 1),
        ("3.5", "35", 0),
        ("-5", "5", 0),
        ("12 apples", "12", 1),
        ("12 apples", "12 pears", 0),
        ("C#", "C", 0),
        ("?", "!", 0),
        ("ﬁne", "fine", 1),
        ("Paris", "Paris\u200b", 1),
        ("\ufeffParis", "Paris", 1),
        ("1000", "１０００", 1),
        ("1000", "1_000", 0),
        ("1000", "1*000", 0),
        ("1000", "_1000_", 1),
        ("1000", "**1,000**", 1),
        ("5 m", "5 s", 0),
        ("½", "1/2", 1),
        (["UK", "Britain"], "britain", 1),
        (["UK", None, ""], "us", 0),
        (72, "#### 72", 1),
        (None, "x", None),
        ("", "", None),
        ([], "x", None),
    ],
)
def test_exact(gold, completion, expected):
    assert score(ExactParams(), gold, completion) == expected


@pytest.mark.parametrize(
    ("params", "gold", "completion", "expected"),
    [
        ({"case_sensitive": True}, "Paris", "paris", 0),
        ({"ignore_punctuation": False}, "Paris", "Paris.", 0),
        ({"numbers": False}, "1000", "1,000", 0),
        ({"numbers": False}, "3.5", "35", 0),
        ({"extract": "last_number"}, "7", "so 3 and 7 it is", 1),
        ({"extract": ["boxed"]}, "7", "7", 0),
    ],
)
def test_exact_options(params, gold, completion, expected):
    assert score(ExactParams(**params), gold, completion) == expected


@pytest.mark.parametrize(
    ("params", "gold", "completion", "expected"),
    [
        ({}, "Paris", "The city of paris, France", 1),
        ({}, "art", "a party", 0),
        ({"whole_words": False}, "art", "a party", 1),
        ({"case_sensitive": True}, "Paris", "paris", 0),
        ({}, "5", "15", 0),
        ({}, "5", "5.2", 0),
        ({}, "5", "it is -5", 0),
        ({}, "5", "It is 5.", 1),
        ({}, "1", "1,000", 0),
        ({}, "a.c", "abc", 0),
        ({}, "New York", "new\n york!", 1),
        ({}, ["Rome", "Paris"], "Paris", 1),
        ({"match": "all"}, ["Rome", "Paris"], "Paris", 0),
        ({"match": "all"}, ["Rome", "Paris"], "Paris and Rome", 1),
        ({}, "Paris", "<think>Paris</think>Rome", 0),
        ({}, "", "anything", None),
        ({}, None, "anything", None),
        ({"whole_words": False}, "", "", None),
    ],
)
def test_contains(params, gold, completion, expected):
    assert score(ContainsParams(**params), gold, completion) == expected


CHOSEN = [
    "B",
    "b",
    "B.",
    "(B)",
    "(b)",
    "**B**",
    "B) Paris",
    "B. Paris\nsince it is on the Seine",
    "The answer is (B)",
    "The answer is B.",
    "The answer is b.",
    "the ANSWER is: **B**",
    "Answer: B",
    "Final answer: B because A is wrong",
    "The correct option is B",
    "The correct answer is option (B).",
    "The answer to the question is B",
    "I choose B",
    "I would go with option B.",
    "B is correct",
    "(B) is the right answer",
    r"\boxed{B}",
    r"$\boxed{\text{B}}$",
    r"\boxed{(B)}",
    "<answer>B</answer>",
    "<answer>\nB. Paris\n</answer>",
    r"<answer>\boxed{B}</answer>",
    "<answer>The answer is B</answer>",
    "<think>The answer is A</think>The answer is B",
    "The answer is A. No: the answer is B.",
    "Let me think.\n\nB",
    "The answer is B. (A) is wrong.",
    "The answer is B, A is wrong",
    "The answer is definitely B",
    "The correct option is most likely (B).",
    "the answer: b)",
    "the answer is b) Paris",
]
NOT_CHOSEN = [
    "A",
    "The answer is a city, Paris: a big city",
    "The answer is A",
    "The answer is A or B",
    "The answer is B or A",
    "The answer is B, A",
    "The answer is (B) (A)",
    "B and A",
    "A. Rome\nB. Paris",
    "<answer>A B C D</answer>",
    "<answer>A, B</answer>",
    "<answer>B\nA</answer>",
    r"\boxed{A, B}",
    r"\boxed{A} and the answer is B",
    "<think>B</think>",
    "<think>B</think>A",
    "The answer is not B",
    "The answer is definitely not B",
    "The answer is unlikely B",
    "The answer is probably A or B",
    "the answer is b) or a)",
    "B is not correct",
    "B is incorrect",
    "Both are nice",
    "Because",
    "The answer is Bologna",
    "ABCD",
]


@pytest.mark.parametrize("completion", CHOSEN)
def test_choice_finds_the_letter(completion):
    assert score(ChoiceParams(), "B", completion) == 1.0


@pytest.mark.parametrize("completion", NOT_CHOSEN)
def test_choice_finds_no_wrong_letter(completion):
    assert score(ChoiceParams(), "B", completion) == 0.0


@pytest.mark.parametrize(
    ("params", "gold", "expected"),
    [
        ({}, 1, 1),
        ({}, "1", 1),
        ({}, 1.0, 1),
        ({}, 0, 0),
        ({"first_index": 1}, 2, 1),
        ({"first_index": 1}, 0, None),
        ({}, "(b)", 1),
        ({}, "B. Paris", 1),
        ({}, "C", 0),
        ({}, 4, None),
        ({}, "E", None),
        ({"choices": "ABCDE"}, "E", 0),
        ({}, True, None),
        ({}, None, None),
        ({}, "Paris", None),
        ({}, -1, None),
    ],
)
def test_choice_golds(params, gold, expected):
    assert score(ChoiceParams(**params), gold, "The answer is B") == expected


@pytest.mark.parametrize("choices", ["", "A", "abcd", "A B"])
def test_choices_are_checked(choices):
    with pytest.raises(ValidationError):
        ChoiceParams(choices=choices)


@pytest.mark.parametrize("completion", DEGENERATE)
@pytest.mark.parametrize(
    ("params", "gold"),
    [
        (ExactParams(), "Paris"),
        (ExactParams(extract="last_number"), "7"),
        (ContainsParams(), "Paris"),
        (ContainsParams(match="all"), ["Rome", "Paris"]),
        (ContainsParams(whole_words=False), "B"),
        (ContainsParams(), ["answer", "think", "boxed"]),
        (ChoiceParams(), "A"),
        (ChoiceParams(), "B"),
    ],
)
def test_degenerate_completions_never_score(params, gold, completion):
    messages = [{"role": "system", "content": "Be brief, please."}]
    messages.append({"role": "user", "content": QUESTION})
    assert score(params, gold, completion, QUESTION) == 0.0
    assert score(params, gold, completion, messages) == 0.0


def test_an_answer_may_repeat_one_that_the_prompt_shows():
    asked, said = {"role": "user", "content": QUESTION}, "The answer is (B)."
    shown = [asked, {"role": "assistant", "content": said}, asked]
    assert score(ChoiceParams(), "B", said, prompt=shown) == 1
    assert score(ChoiceParams(), "B", QUESTION, prompt=shown) == 0


def test_an_answer_after_the_repeated_prompt_counts():
    assert score(ContainsParams(), "Oslo", QUESTION + " Oslo", QUESTION) == 1.0
    assert score(ChoiceParams(), "A", QUESTION + "\nThe answer is A", QUESTION) == 1.0


@given(st.text(), st.text())
def test_any_text_gets_a_score(gold, completion):
    for params in (ExactParams(), ContainsParams(), ChoiceParams()):
        assert score(params, gold, completion) in (0.0, 1.0, None)


@given(st.from_regex(r"[A-Za-z]{1,12}( [A-Za-z]{1,12}){0,3}", fullmatch=True))
def test_a_gold_meets_itself(gold):
    assert score(ExactParams(), gold, gold) == 1.0
    assert score(ContainsParams(), gold, f"So: {gold}!") == 1.0


def test_hostile_completions_are_fast():
    hostile = [
        "the answer to " * 5000,
        "(" * 50000,
        " " * 50000,
        "A, " * 20000,
        "answer is " * 9000,
        r"\boxed{" * 100_000,
    ]
    started = time.process_time()
    for text in hostile:
        for params in (ExactParams(), ContainsParams(), ChoiceParams()):
            assert score(params, "B", text) == 0.0
    assert time.process_time() - started < 5


def test_a_missing_column_is_an_error():
    for params in (ExactParams(answer="x"), ContainsParams(answer="x"), ChoiceParams(answer="x")):
        assert params.columns().required == ("x",)
        [result] = params.build(RewardContext(64))(Batch([""], ["B"], columns={"answer": ["B"]}))
        assert "no column 'x'" in str(result)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The area is 72 m^2.", "72"),
        ("72 m^{2}", "72"),
        ("It is 72 cm²", "72"),
        ("It is 2½", r"2\frac{1}{2}"),
        (r"It is 0.\overline{3}", r"\frac{3}{9}"),
    ],
)
def test_the_last_number_is_whole_and_no_exponent(text, expected):
    assert find_answer(text, ["last_number"]).text == expected
