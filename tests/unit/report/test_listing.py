"""Runs in a line each, sorted and filtered, damaged ones among them."""

import platform

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.report.listing import list_runs
from grpo_cli.report.overview import read_overview
from grpo_cli.report.summary import read_summary
from grpo_cli.runs.files import write_json
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.status import StatusFile
from tests.run_folders import make_finished_run


@pytest.fixture
def root(tmp_path):
    """Four runs: the better the newer, but for one that died and one that is damaged."""
    for seed, accuracy in ((1, 0.2), (2, 0.5)):
        run = make_finished_run(tmp_path, seed, [0.0] * 20 + [accuracy] * 20, accuracy)
        StatusFile(run.status).update(started_at=seed * 1000.0)
        write_json(run.evaluations / "before.json", {"accuracy": {"math": 0.1}})
    died = make_finished_run(tmp_path, 3, state="running", accuracy=None)
    write_json(died.manifest, {"hardware": {"host": platform.node()}})
    StatusFile(died.status).update(started_at=3000.0)
    broken = make_finished_run(tmp_path, 4)
    broken.status.write_text("{")
    return tmp_path


def ids(runs):
    return [run.id for run in runs]


def test_the_newest_run_comes_first_and_the_damaged_is_told(root):
    found = {run.id: run for run in list_runs(root)}
    assert list(found) == ["seed-4", "seed-3", "seed-2", "seed-1"]
    assert found["seed-4"].state == "damaged"
    assert "is damaged" in found["seed-4"].reason
    assert found["seed-3"].state == "interrupted"
    best = found["seed-2"]
    assert (best.reward_first, best.reward_last) == (0.0, 0.5)
    assert (best.held_out, best.before, best.after) == ("accuracy/math", 0.1, 0.5)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"states": ["completed"]}, ["seed-2", "seed-1"]),
        ({"sort": "accuracy", "limit": 2}, ["seed-2", "seed-1"]),
        ({"sort": "reward"}, ["seed-3", "seed-2", "seed-1", "seed-4"]),
        ({"sort": "name"}, ["seed-1", "seed-2", "seed-3", "seed-4"]),
        ({"name": "sums/seed-[12]"}, ["seed-2", "seed-1"]),
        ({"name": "su*", "limit": 1}, ["seed-4"]),
        ({"name": "words"}, []),
    ],
)
def test_lists_are_filtered_and_sorted(root, settings, found):
    assert ids(list_runs(root, **settings)) == found


@pytest.mark.parametrize("settings", [{"sort": "rewards"}, {"states": ["runing"]}])
def test_an_unknown_order_or_state_is_refused_with_the_nearest(root, settings):
    with pytest.raises(UsageError, match=r"Fix: --(sort reward|state running)$"):
        list_runs(root, **settings)


def test_a_root_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        list_runs(tmp_path / "elsewhere")


def test_a_list_says_of_rewards_what_the_summary_says(tmp_path):
    rewards = [step / 100 for step in range(60)]
    run = make_finished_run(tmp_path, rewards=rewards)
    append_record(run.metrics, {"event": "eval", "step": 60, "eval_reward": 9.0})
    (listed,) = list_runs(tmp_path)
    change = read_summary(run).reward_change()
    assert (listed.reward_first, listed.reward_last) == pytest.approx((change.first, change.last))
    assert listed.reward_within_noise is change.is_noise is False


def test_the_ends_of_long_metrics_are_enough(tmp_path):
    rewards = [0.25] * 500 + [0.5] * 1000 + [0.75] * 500
    run = make_finished_run(tmp_path, rewards=rewards)
    (listed,) = list_runs(tmp_path)
    assert run.metrics.stat().st_size > 2 * 2**16
    assert (listed.reward_first, listed.reward_last) == (0.25, 0.75)


def test_an_overview_tells_sizes_and_checkpoints(tmp_path):
    run = make_finished_run(tmp_path)
    checkpoint = run.checkpoints / "checkpoint-20"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"best_model_checkpoint": "x/checkpoint-20"}')
    (checkpoint / "weights").write_bytes(b"x" * 5000)
    overview = read_overview(run)
    assert (list(overview.checkpoints), overview.best) == ([20], 20)
    assert overview.sizes["checkpoints"] > 5000
    assert overview.as_json()["bytes"] == overview.sizes
