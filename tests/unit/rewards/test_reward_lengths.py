import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_cli.errors import RewardError
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams
from grpo_cli.rewards.kinds.length import (
    ANSWER_KINDS,
    CosineLengthParams,
    RepetitionParams,
    SoftOverlongParams,
    cosine,
    repeated_share,
)
from grpo_cli.rewards.registry import BUILT_IN, find_kind

CONTEXT = RewardContext(max_completion_length=100)
MATH = {"kind": "math", "answer": "answer"}


def score(params, completion="", tokens=None, gold="7"):
    ids = None if tokens is None else [list(range(tokens))]
    batch = Batch([""], [completion], completion_ids=ids, columns={"answer": [gold]})
    return params.build(CONTEXT)(batch)[0].value


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (130, -1)]
)
def test_soft_overlong_is_dapos(length, expected):
    assert score(SoftOverlongParams(cache=20), tokens=length) == pytest.approx(expected)


def test_soft_overlong_checks_its_cache():
    [issue] = SoftOverlongParams(cache=9, max_length=9).problems(CONTEXT)
    assert issue.seen == "should be less than `max_length` (9), not 9"
    [issue] = SoftOverlongParams(cache=100).problems(CONTEXT)
    path, message, fix = issue.path, issue.seen, issue.fix
    assert path == "cache"
    assert "`generation.max_completion_length` (100)" in message
    assert fix == "write `cache: 25`"
    with pytest.raises(RewardError, match="cache: should be less"):
        build_rewards([RewardConfig(kind="soft_overlong", cache=100)], CONTEXT)
    assert score(SoftOverlongParams(cache=150, max_length=200), tokens=125) == -0.5
    [result] = SoftOverlongParams(cache=5).build(CONTEXT)(Batch([""], ["text"]))
    assert "needs token ids" in str(result)


@pytest.mark.parametrize(
    ("completion", "tokens", "expected"),
    [
        ("7", 0, 1.0),
        ("7", 50, 0.75),
        ("7", 100, 0.5),
        ("7", 900, 0.5),
        ("8", 0, -1.0),
        ("8", 50, -0.75),
        ("8", 100, -0.5),
        ("7" + " " * 49, None, 0.75),
    ],
)
def test_cosine_length(completion, tokens, expected):
    assert score(CosineLengthParams(of=MATH), completion, tokens) == pytest.approx(expected)


def test_cosine_length_with_the_papers_values():
    params = CosineLengthParams(
        of=MATH,
        correct_shortest=2,
        correct_longest=1,
        wrong_shortest=-10,
        wrong_longest=0,
        exceeded=-10,
    )
    assert [score(params, "7", n) for n in (0, 100)] == [2, -10]
    assert [score(params, "8", n) for n in (0, 50, 100)] == pytest.approx([-10, -5, -10])


@pytest.mark.parametrize(
    ("of", "gold", "completion"),
    [
        ({"kind": "exact"}, "Rome", "rome"),
        ({"kind": "choice", "choices": "ABC"}, "B", "The answer is B"),
        ({"kind": "contains"}, "Rome", "It is Rome"),
        (MATH, "1/2", "0.5"),
    ],
)
def test_cosine_length_nests_answer_kinds(of, gold, completion):
    params = CosineLengthParams(of=of)
    assert params.of.kind == of["kind"]
    assert params.columns().required == ("answer",)
    assert score(params, completion, 0, gold) == 1
    assert score(params, "", 0, gold) == -1
    assert score(params, completion, 0, None) is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "of"),
        ({"of": {"answer": "x"}}, "should be an answer reward"),
        ({"of": {"kind": "length", "target": 1}}, "should be an answer reward"),
        ({"of": "math"}, "should be an answer reward"),
        ({"of": {"kind": "math", "anwser": "x"}}, "anwser"),
        ({"of": MATH, "correct_longest": -0.5}, "a wrong answer could score"),
    ],
)
def test_cosine_length_parameters_are_checked(params, message):
    with pytest.raises(ValidationError, match=message):
        CosineLengthParams(**params)


def test_the_schema_of_the_nested_reward_knows_its_kind():
    schema = CosineLengthParams.model_json_schema()
    jsonschema.validate({"of": {"kind": "choice", "choices": "AB"}}, schema)
    for wrong in ({"choices": "AB"}, {"kind": "math", "choices": "AB"}, {"kind": "length"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"of": wrong}, schema)


@given(st.integers(0, 500), st.integers(1, 400), st.floats(-5, 5), st.floats(-5, 5))
def test_cosine_stays_between_its_ends(length, longest, first, last):
    value = cosine(length, longest, first, last)
    assert min(first, last) - 1e-9 <= value <= max(first, last) + 1e-9


@pytest.mark.parametrize(
    ("params", "text", "expected"),
    [
        ({}, "a b c d e", 0),
        ({}, "a b c a b c", -0.25),
        ({}, "A b", 0),
        ({}, "", 0),
        ({"ngram_size": 1}, "a A a a", -0.75),
        ({"ngram_size": 1, "max_penalty": -2}, "a a", -1),
        ({"max_penalty": 0}, "a a a a a", 0),
        ({"ngram_size": 1, "unit": "characters"}, "哈哈", -0.5),
        ({"ngram_size": 1, "unit": "tokens"}, "a a", 0),
    ],
)
def test_repetition(params, text, expected):
    assert score(RepetitionParams(**params), text, 5) == pytest.approx(expected)


def test_repetition_parameters_are_checked():
    for params in ({"max_penalty": 1}, {"ngram_size": 0}, {"unit": "lines"}):
        with pytest.raises(ValidationError):
            RepetitionParams(**params)
    [result] = RepetitionParams(unit="tokens").build(CONTEXT)(Batch([""], ["a"]))
    assert "token ids" in str(result)


@given(st.lists(st.integers(0, 3)), st.integers(1, 5))
def test_a_share_is_a_share(units, size):
    assert 0 <= repeated_share(units, size) < 1


def test_kinds_that_judge_one_completion_can_be_nested():
    kinds = [find_kind(name) for name in BUILT_IN]
    judging = {each for each in kinds if each.meta.right_answer is not None}
    assert set(ANSWER_KINDS) == {each for each in judging if each.score is not RewardParams.score}
