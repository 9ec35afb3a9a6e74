"""The rules on real runs, record by record: what each of them tells, and that healthy ones are left alone."""

import pytest

from tests.histories import RECORDED, find_all, watch_recorded

HEALTHY = ["quickstart_16", "quickstart_32", "brief", "learned", "digit", "iterations", "kl_held"]
TOLD = {
    "constant": {"no_signal"},
    "rate_of_1": {"too_high_learning_rate", "no_signal", "repeated_answers", "entropy_collapse"},
    "rate_of_0.06": {"too_high_learning_rate", "no_signal", "repeated_answers", "entropy_collapse"},
    "noise": {"too_high_learning_rate", "entropy_explosion", "flat_reward"},
    "kl": {"too_high_learning_rate", "kl_runaway", "all_solved"},
    "huge": {"too_high_learning_rate", "gradient_spike"},
    "clip": {"clip_share"},
    "grows": {"length_explosion"},
    "swamped": {"reward_swamped"},
    "apart": {"rewards_apart"},
    "gamed": {"held_out_gap"},
    "low_rate": {"no_signal", "too_low_learning_rate"},
    "slow": {"slow_reward"},
}
"""What was made to fail, and what is told of it; that 8 tokens are few is told of nearly all."""


def test_every_recorded_run_is_looked_at():
    assert {path.stem for path in RECORDED.glob("*.jsonl")} == {*HEALTHY, *TOLD}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_left_alone(name):
    history, told = watch_recorded(name)
    assert {symptom.rule for symptom in told} <= {"truncation"}
    assert all(symptom.level == "note" for symptom in find_all(history).values())


@pytest.mark.parametrize("name", ["quickstart_16", "quickstart_32", "brief"])
def test_of_healthy_runs_that_end_their_answers_nothing_is_told(name):
    history, told = watch_recorded(name)
    assert all(symptom.level == "note" for symptom in told)
    assert find_all(history) == {}


@pytest.mark.parametrize("name", TOLD)
def test_runs_made_to_fail_are_told_apart(name):
    _, told = watch_recorded(name)
    rules = [symptom.rule for symptom in told]
    assert set(rules) - {"truncation"} == TOLD[name]
    assert len(rules) == len(set(rules)), "each is told once"
