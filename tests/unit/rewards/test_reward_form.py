import pytest
from pydantic import ValidationError

from grpo_cli.rewards.contract import Batch, RewardContext
from grpo_cli.rewards.kinds.format import RegexParams, ThinkFormatParams
from grpo_cli.rewards.kinds.length import LengthParams
from grpo_cli.rewards.scoring import Reward

CONTEXT = RewardContext(max_completion_length=64)


def score(params, completion, ids=None):
    batch = Batch([""], [completion], completion_ids=None if ids is None else [ids])
    return Reward("r", 1.0, params.kind, params, params.build(CONTEXT)).score(batch)[0].value


@pytest.mark.parametrize(
    ("params", "text", "expected"),
    [
        ({"pattern": r"#### \d+"}, "so #### 5", 1.0),
        ({"pattern": r"#### \d+"}, "so 5", 0.0),
        ({"pattern": r"\d+", "full_match": True}, "55", 1.0),
        ({"pattern": r"\d+", "full_match": True}, "55 ", 0.0),
        ({"pattern": "YES", "flags": ["ignorecase"]}, "yes", 1.0),
        ({"pattern": "a.b"}, "a\nb", 0.0),
        ({"pattern": "a.b", "flags": ["dotall"]}, "a\nb", 1.0),
        ({"pattern": "^b", "flags": ["multiline"]}, "a\nb", 1.0),
        ({"pattern": "yes", "target": "after_thinking"}, "<think>yes</think>no", 0.0),
        ({"pattern": "yes", "target": "after_thinking"}, "<think>no</think>yes", 1.0),
    ],
)
def test_regex(params, text, expected):
    assert score(RegexParams(**params), text) == expected


def test_bad_pattern_is_refused_with_its_position():
    [issue] = RegexParams(pattern="abc[").problems()
    assert issue.path == "pattern"
    assert "unterminated character set at position 3" in issue.seen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", 1.0),
        ("<think>\na\n</think>\nb", 1.0),
        ("<think></think>", 1.0),
        ("a<think>b</think>c", 0.0),
        ("\n<think>b</think>c", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think>b<think>", 0.0),
        ("<think>a", 0.0),
        ("</think><think>", 0.0),
        ("a</think>b", 0.0),
        ("", 0.0),
    ],
)
def test_think_format_means_what_trls_does(text, expected):
    import re

    trl = re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", text, re.DOTALL | re.MULTILINE)
    assert (1.0 if trl else 0.0) == expected
    assert score(ThinkFormatParams(), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("a</think>b", 1.0), ("a", 0.0), ("<think>a</think>b", 0.0)]
)
def test_prefilled_thinking(text, expected):
    assert score(ThinkFormatParams(prefilled=True), text) == expected


@pytest.mark.parametrize("length", [0, 5, 20, 300])
def test_length_gives_trls_example(length):
    text = "x" * length
    assert score(LengthParams(target=20), text) == -abs(20 - len(text))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"target": 3, "unit": "words"}, -1.0),
        ({"target": 3, "unit": "tokens"}, -2.0),
        ({"target": 3, "unit": "tokens", "scale": 0.25}, -0.5),
        ({"target": 100, "scale": 0.1, "max_penalty": 2}, -2.0),
        ({"target": 7}, 0.0),
    ],
)
def test_length(params, expected):
    assert score(LengthParams(**params), "one two", ids=[1, 2, 3, 4, 5]) == expected


def test_length_in_tokens_needs_token_ids():
    with pytest.raises(Exception, match="needs token ids"):
        score(LengthParams(target=3, unit="tokens"), "a b")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"target": -1},
        {"target": 5, "scale": 0},
        {"target": 5, "unit": "lines"},
        {"target": 5, "x": 1},
    ],
)
def test_length_parameters_are_checked(params):
    with pytest.raises(ValidationError):
        LengthParams(**params)
