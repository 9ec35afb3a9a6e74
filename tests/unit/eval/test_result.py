"""What a result says in words, and which floors it reaches."""

import json

import pytest

from grpo_cli.analysis.metrics import Metric, primary_metric, say_difference
from grpo_cli.cli import output
from grpo_cli.cli.eval import _progress, print_result
from grpo_cli.errors import UsageError
from grpo_cli.eval.folder import EvalFolder
from grpo_cli.eval.result import falls_short, read_result
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import right_scores
from grpo_cli.runs.files import SCHEMA_VERSION
from tests.run_folders import make_finished_run


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            Metric(0.31, 0.22, 0.4, 200),
            "better: +0.310 in m (95 % interval +0.220 to +0.400) over base on the same 200 prompts",
        ),
        (
            Metric(-0.1, -0.2, -0.05, 50),
            "worse: −0.100 in m (95 % interval −0.200 to −0.050) against base on the same 50 prompts",
        ),
        (
            Metric(0.02, -0.03, 0.07, 50),
            "no clear difference: +0.020 in m (95 % interval −0.030 to +0.070) from base on the same 50 prompts",
        ),
        (
            Metric(0.5, None, None, 2, "2 prompts are too few"),
            "+0.500 in m over base on the same 2 prompts; no interval, since 2 prompts are too few",
        ),
        (
            Metric(1.0, None, None, 12, "it is the same for all prompts"),
            "better: +1.000 in m against base on each of the same 12 prompts",
        ),
        (
            Metric(0.0, None, None, 20, "it is the same for all prompts"),
            "no difference: m is the same for final and base on the same 20 prompts",
        ),
        (
            Metric(0.0, None, None, 7, "7 prompts are too few"),
            "no difference: m is the same on average for final and base on the same 7 prompts; "
            "no interval, since 7 prompts are too few",
        ),
        (
            Metric(3429.4, -999.6, 7000.0, 50),
            "no clear difference: +3,429 in m (95 % interval −999.6 to +7,000) from base on the same 50 prompts",
        ),
        (
            Metric(None, None, None, 0, "none"),
            "final and base have no prompt with a score of m in common",
        ),
    ],
)
def test_a_difference_is_a_sentence(found, sentence):
    assert say_difference("m", found, "final", "base") == sentence


def result(**metrics):
    table = {name: {"value": value} for name, value in metrics.items()}
    return {
        "baseline": "base",
        "subjects": {"final": {"metrics": table}, "base": {"metrics": {}}},
        "differences": {"final": {"reward": {"value": 0.1}}},
    }


def test_floors_are_kept_or_not():
    found = result(**{"accuracy/math": 0.5, "reward": 0.7, "clipped": None})
    assert falls_short(found, ["accuracy=0.5", "reward=0.7", "gain/reward=0.1"]) == []
    (short,) = falls_short(found, ["accuracy/math=0.51"])
    assert short == "accuracy/math of final is 0.5, below 0.51"
    assert "has no value" in falls_short(found, ["clipped=0"])[0]
    assert "gain/reward of final is 0.1" in falls_short(found, ["gain/reward=0.2"])[0]


@pytest.mark.parametrize(
    ("floor", "message"),
    [
        ("accuracy", "METRIC=VALUE"),
        ("reward=much", "METRIC=VALUE"),
        ("reward=nan", "METRIC=VALUE"),
        ("speed=1", "no metric `speed`"),
    ],
)
def test_a_floor_that_cannot_be_read_is_refused(floor, message):
    with pytest.raises(UsageError, match=message):
        falls_short(result(reward=1.0), [floor])


def test_a_floor_is_reached_by_what_only_rounding_keeps_below_it():
    found = result(**{"accuracy/math": 0.1 + 0.1 + 0.1 - 1e-12})
    assert falls_short(found, ["accuracy=0.3"]) == []


def test_a_name_for_several_metrics_is_refused_but_accuracy_is_the_first():
    with pytest.raises(UsageError, match="no metric `rewards`"):
        falls_short(result(**{"rewards/a": 1.0, "rewards/b": 1.0}), ["rewards=0"])
    found = result(**{"accuracy/a": 0.2, "accuracy/b": 1.0})
    assert falls_short(found, ["accuracy=0.5"]) == ["accuracy of final is 0.2, below 0.5"]


def test_a_gain_needs_a_baseline():
    with pytest.raises(UsageError, match="needs a baseline"):
        falls_short({**result(reward=1.0), "differences": {}}, ["gain/reward=0"])


def test_a_right_answer_is_what_clip_lets_it_be():
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "model": {"path": "a/b"},
            "dataset": {"kind": "inline", "rows": [{"prompt": "?"}]},
            "rewards": [{"kind": "length", "target": 3}, {"kind": "math", "clip": [0, 0.5]}],
        }
    )
    assert right_scores(recipe.rewards) == {"math": 0.5}
    merged = recipe.rewards[1].model_copy(update={"clip": (1.0, 2.0)})
    assert right_scores((merged,)) == {}
    assert primary_metric(right_scores(recipe.rewards)) == "accuracy/math"
    assert primary_metric({}) == "reward"


def test_a_reward_says_that_it_judges_answers():
    rewards = [
        {"kind": "python", "path": "a.py:own"},
        {"kind": "python", "path": "a.py:form", "accuracy": False},
        {"kind": "python", "path": "a.py:graded", "accuracy": True},
        {"kind": "regex", "pattern": "^a", "accuracy": True},
        {"kind": "exact", "accuracy": False},
    ]
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "model": {"path": "a/b"},
            "dataset": {"kind": "inline", "rows": [{"prompt": "?", "answer": "!"}]},
            "rewards": rewards,
        }
    )
    assert right_scores(recipe.rewards) == {"graded": 1.0, "regex": 1.0}


def test_a_run_shows_its_newest_finished_evaluation(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    with pytest.raises(UsageError, match=f"Fix: grpo eval {run.path}.*grpo runs compare"):
        read_result(run.path)
    recipe = run.read_recipe().model_dump(mode="json")
    about = {"baseline": None, "data": {}, "recipe": recipe, "primary": "reward", "verdicts": {}}
    for time, speed in (("1", 1.0), ("2", 234.0), ("3", None)):
        folder = EvalFolder(run.evaluations / time)
        folder.path.mkdir()
        subject = {
            **{"prompts": 2, "completions": 2, "metrics": {}},
            **{"tokens_per_s": speed, "warm_up_included": True},
        }
        settings = {"samples": 1, "temperature": 0.0, "split": "eval"}
        told = {**about, "subjects": {"final": subject}, "differences": {}, "settings": settings}
        # The third was interrupted.
        if speed is not None:
            told |= {"kind": "grpo-eval", "schema_version": SCHEMA_VERSION}
            folder.result.write_text(json.dumps(told), encoding="utf-8")
    newest, result = read_result(run.path)
    assert newest.path == run.evaluations / "2"
    print_result(result, newest.path)
    assert "234" in capsys.readouterr().out


def test_progress_in_a_file_says_the_time_left(monkeypatch, tmp_path, capsys):
    clock = iter(range(0, 10**6, 30))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr(output, "_QUIET_S", 0)
    with _progress(tmp_path) as tell:
        for done, total in ((0, 0), (32, 256), (64, 256)):
            tell("base", done, total)
    _, loading, first, second = capsys.readouterr().err.splitlines()
    assert loading.endswith("base: loading the model")
    assert first.endswith("base: 32/256 completions")
    assert second.endswith("base: 64/256 completions  left 6m00s")
