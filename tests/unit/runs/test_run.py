"""A run read lazily: status, metrics that grow, measurements, and the groups that processes wrote."""

import json
import platform

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.runs.checkpoints import find_model
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import StatusFile
from grpo_cli.runs.metrics import Metrics, append_record, count_averaged
from grpo_cli.runs.run import Run
from tests.run_folders import make_finished_run, make_run, write_samples


def write_group(run, rank=0, **changes):
    run.completions.mkdir(exist_ok=True)
    group = {
        "step": 1, "split": "train", "row": 5, "prompt": "2 + 3?", "completions": ["5", "6"],
        "tokens": [1, 2], "clipped": [False, True], "rewards": {"math": [1.0, None]}, "reasons": {},
    }  # fmt: skip
    append_record(run.completions / f"rank_{rank}.jsonl", {**group, **changes})


def test_a_finished_run_is_read_from_its_path(tmp_path):
    folder = make_finished_run(tmp_path, seed=3, rewards=(0.1, 0.2))
    run = Run(str(folder.path))
    assert (run.name, run.recipe.seed, run.status.state) == ("sums/seed-3", 3, "completed")
    assert [(each["step"], each["reward"], each["loss"]) for each in run.steps] == [
        (1, 0.1, 0.0),
        (2, 0.2, 0.0),
    ]
    assert run.series["reward"] == [(1, 0.1), (2, 0.2)]
    assert (run.step, run.total_steps) == (2, 40)
    assert run.manifest["versions"]["trl"] == "1.16.0"
    assert (run.before, run.after["accuracy"]) == ({}, {"math": 0.8})
    assert (run.samples("after"), list(run.completions()), run.checkpoints) == ([], [], {})


def test_a_folder_that_is_no_run_says_so_when_its_recipe_is_asked_for(tmp_path):
    run = Run(tmp_path)
    assert (run.status.state, run.steps) == ("pending", [])
    with pytest.raises(UsageError, match="is not a run folder"):
        _ = run.recipe


def test_a_run_whose_processes_are_gone_is_interrupted(tmp_path):
    folder = make_finished_run(tmp_path, state="running")
    write_json(folder.manifest, {"hardware": {"host": platform.node()}})
    assert Run(folder).life.state == "interrupted"


def test_metrics_are_numbers_of_training_and_evaluation(tmp_path):
    folder = make_run(tmp_path, rewards=())
    for record in (
        {"event": "measure", "when": "before", "rewards": {"math": 0.1}},
        {"event": "train", "step": 1, "total_steps": 9, "reward": 1, "kl": None, "text": "x"},
        {"event": "eval", "step": 1, "eval_reward": 0.5, "loss": float("nan")},
        {"event": "train", "step": None, "reward": 5.0},
        {"event": "train", "step": 2, "reward": float("nan")},
    ):
        append_record(folder.metrics, record)
    metrics = Run(folder).metrics
    for step in metrics.steps:
        del step["time"]
    assert metrics.steps == [
        {"step": 1, "total_steps": 9, "reward": 1, "kl": None},
        {"step": 2, "reward": None},
    ]
    assert metrics.series["loss"] == [(1, None)]
    assert (metrics.step, metrics.total_steps) == (2, 9)
    assert metrics.measured["before"]["rewards"] == {"math": 0.1}


def test_windows_of_a_metric_hold_its_numbers():
    metrics = Metrics()
    for step in range(10, 100, 10):
        value = None if step == 30 else step / 10
        metrics.extend([{"event": "train", "step": step, "reward": value}])
    assert metrics.window("reward", 45, 2) == [(30, None), (40, 4)]
    assert metrics.values("kl") == []


def test_refresh_gives_what_is_new_and_the_status_of_now(tmp_path):
    folder = make_run(tmp_path)
    run = Run(folder)
    assert [each["step"] for each in run.refresh()] == [1, 2, 3]
    assert run.refresh() == []
    append_record(folder.metrics, {"event": "train", "step": 4, "reward": 0.4})
    StatusFile(folder.status).update(step=4)
    assert [each["step"] for each in run.refresh()] == [4]
    assert (len(run.steps), run.status.step) == (4, 4)


def test_what_has_been_read_already_is_not_new(tmp_path):
    run = Run(make_run(tmp_path))
    assert len(run.metrics.steps) == 3
    assert run.refresh() == []


def write_long(path, steps):
    """Records of a run that was resumed after two thirds; values differ at each step."""
    with path.open("w") as file:
        for step in range(1, steps + 1):
            event = (
                {"event": "resume", "step": step, "attempt": 2} if step == steps * 2 // 3 else {}
            )
            record = {"event": "train", "step": step, "reward": step % 997 / 7, "loss": None}
            file.write("".join(json.dumps(each) + "\n" for each in (event, record) if each))


def test_every_value_of_a_long_run_is_kept_and_some_of_its_steps(tmp_path):
    folder = make_run(tmp_path)
    write_long(folder.metrics, 30_000)
    run = Run(folder)
    expected = [(step, step % 997 / 7) for step in range(1, 30_001)]
    assert run.series["reward"] == expected
    assert run.series["loss"][-1] == (30_000, None)
    assert len(run.steps) == 30_000
    kept = [each["step"] for each in run.metrics.steps]
    assert len(kept) < 10_000
    assert (kept[0], kept[run.metrics.attempt], kept[-1000:]) == (
        1,
        20_000,
        [*range(29_001, 30_001)],
    )


def test_a_large_file_is_skimmed_and_then_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_cli.runs.metrics._SKIMMED_BYTES", 2**20)
    monkeypatch.setattr("grpo_cli.runs.metrics._END_BYTES", 2**17)
    folder = make_run(tmp_path)
    write_long(folder.metrics, 30_000)
    run = Run(folder).skim()
    steps = [each["step"] for each in run.refresh() if each["event"] == "train"]
    assert steps == sorted(set(steps))
    assert (steps[:1000], steps[-1000:]) == ([*range(1, 1001)], [*range(29_001, 30_001)])
    assert 3_000 < len(steps) < 6_000
    append_record(folder.metrics, {"event": "train", "step": 30_001, "reward": 0.4})
    assert [each["step"] for each in run.refresh()] == [30_001]
    assert run.step == 30_001


def test_metrics_that_were_cut_are_read_again_and_new_since_the_run_resumed(tmp_path):
    folder = make_run(tmp_path)
    run = Run(folder)
    earlier = run.metrics
    lines = folder.metrics.read_bytes().splitlines(True)
    folder.metrics.write_bytes(b"".join(lines[:2]))
    append_record(folder.metrics, {"event": "resume", "step": 2, "attempt": 2})
    append_record(folder.metrics, {"event": "train", "step": 3, "reward": 0.1})
    assert [each["event"] for each in run.refresh()] == ["resume", "train"]
    assert [each["step"] for each in run.steps] == [1, 2, 3]
    assert run.metrics is not earlier


def test_samples_are_those_that_can_be_read(tmp_path):
    folder = make_finished_run(tmp_path)
    write_samples(folder, {"a\u2028b": [0.0, 1.0]})
    with (folder.evaluations / "after.jsonl").open("a") as file:
        file.write('{"row": 2, "te')
    samples = Run(folder).samples("after")
    assert [each["rewards"] for each in samples] == [{"math": 0.0}, {"math": 1.0}]


def test_parts_of_a_group_that_processes_share_are_one_group(tmp_path):
    folder = make_finished_run(tmp_path)
    write_group(folder)
    later = {"completions": ["7"], "tokens": [3], "clipped": [False]}
    write_group(folder, rank=1, **later, rewards={"length": [-1.0]}, reasons={"length": ["long"]})
    write_group(folder, rank=1, split="eval")
    train, evaluated = Run(folder).completions()
    assert (train.split, train.texts, evaluated.split) == ("train", ["5", "6", "7"], "eval")
    assert train.rewards == {"math": [1.0, None, None], "length": [None, None, -1.0]}
    assert train.reasons == {"length": [None, None, "long"]}


def test_the_newest_group_of_all_processes_is_known(tmp_path):
    folder = make_finished_run(tmp_path)
    run = Run(folder)
    assert run.newest_group() is None
    for rank, time in ((0, 5.0), (1, 9.0), (2, 7.0)):
        write_group(folder, rank, time=time)
    assert run.newest_group()["time"] == 9.0
    write_group(folder, rank=2, time=11.0)
    assert run.newest_group()["time"] == 11.0


def test_torn_lines_are_passed_over(tmp_path):
    folder = make_finished_run(tmp_path)
    write_group(folder, completions=["half \ud83d", "6"])
    with (folder.completions / "rank_0.jsonl").open("a") as file:
        file.write('{"step": 2, "row"')
    (group,) = Run(folder).completions()
    assert group.texts[0].startswith("half ")


@pytest.mark.parametrize(
    ("records", "width"), [(1, 1), (3, 1), (6, 3), (12, 4), (40, 4), (200, 20)]
)
def test_a_few_records_are_averaged_if_there_are_so_many(records, width):
    assert count_averaged(records) == width


def test_the_best_checkpoint_is_the_one_that_the_newest_names(tmp_path):
    folder = make_finished_run(tmp_path)
    for step in (10, 20):
        checkpoint = folder.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        state = {"best_model_checkpoint": "x/checkpoint-10"}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    run = Run(folder)
    assert (list(run.checkpoints), run.best_checkpoint) == ([10, 20], 10)
    assert find_model(folder, "20") == ("checkpoint-20", folder.checkpoints / "checkpoint-20")
    with pytest.raises(UsageError, match=r"one model is taken at a time \(checkpoints: 10, 20\)"):
        find_model(folder, "all")


def test_records_in_blocks_are_as_records_one_by_one():
    records = [
        {"event": "train", "step": 1, "total_steps": 9, "reward": 0.1, "note": "text", "loss": 1},
        {"event": "eval", "step": 1, "eval_reward": 0.5, "reward": True},
        {"event": "train", "step": 2, "reward": None, "loss": 10**400, "late": "no"},
        {"event": "resume", "step": 2, "attempt": 2},
        {"event": "train", "step": 3, "total_steps": "9", "late": -2.5, "loss": float("nan")},
        {"event": "fast", "left_off": {}},
    ]
    whole, one_by_one = Metrics(), Metrics()
    whole.extend(records * 1500)
    for record in records * 1500:
        one_by_one.extend([record])
    assert whole == one_by_one
    assert whole.steps == one_by_one.steps
    assert whole.series.keys() == {"reward", "loss", "eval_reward", "late"}
    assert whole.series["reward"][:3] == [(1, 0.1), (2, None), (1, 0.1)]
    assert whole.series["loss"][:3] == [(1, 1.0), (2, None), (3, None)]
    assert whole.series["late"][:2] == [(3, -2.5), (3, -2.5)]
    assert (whole.step, whole.total_steps) == (3, 9)
