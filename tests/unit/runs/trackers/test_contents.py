"""What a run has for its trackers."""

import json

from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.trackers.contents import flatten, read_contents
from grpo_cli.runs.trackers.ledger import Ledger
from grpo_cli.runs.trackers.uploads import hand_over
from tests.run_folders import make_finished_run


def write_groups(folder, count):
    folder.completions.mkdir(exist_ok=True)
    path = folder.completions / "rank_0.jsonl"
    path.unlink(missing_ok=True)
    for step in range(1, count + 1):
        group = {
            "step": step,
            "prompt": [{"role": "user", "content": f"question {step}"}],
            "completions": ["a", "b"],
            "rewards": {"math": [0.0, 1.0]},
        }
        append_record(path, group)
    return path


def test_samples_are_spread_over_the_run(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    write_groups(folder, 91)
    samples = read_contents(folder).samples
    assert [each.step for each in samples[::2]] == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91]
    assert samples[1].prompt == "user: question 1"
    assert (samples[1].completion, samples[1].rewards) == ("b", {"math": 1.0})


def test_few_groups_are_all_shown_once_and_a_torn_line_is_left_out(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    with write_groups(folder, 3).open("a") as file:
        file.write('{"step": 4, "prom')
    assert [each.step for each in read_contents(folder).samples[::2]] == [1, 2, 3]


def test_measurements_stand_at_their_steps(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    folder.metrics.unlink()
    measured = {"event": "measure", "reward": 0.25, "accuracy": {"math": 0.5}, "clipped": None}
    append_record(folder.metrics, {**measured, "when": "before"})
    append_record(folder.metrics, {"event": "train", "step": 7, "loss": 0.0})
    append_record(folder.metrics, {**measured, "when": "after", "reward": 0.75})
    assert read_contents(folder).measurements == [
        (0, {"held_out/reward": 0.25, "held_out/accuracy/math": 0.5}),
        (7, {"held_out/reward": 0.75, "held_out/accuracy/math": 0.5}),
    ]


def test_files_are_named_by_their_place_in_the_run(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    write_groups(folder, 1)
    files = read_contents(folder).files
    assert {"resolved.json", "metrics.jsonl", "completions/rank_0.jsonl"} <= files.keys()
    assert "report.html" not in files
    assert json.loads(files["completions/rank_0.jsonl"].read_text())["step"] == 1


def test_a_recipe_is_flattened_for_parameters():
    values = {"name": "x", "model": {"lora": {"r": 8}}, "rewards": [{"kind": "math"}]}
    assert flatten(values) == {
        "recipe.name": "x",
        "recipe.model.lora.r": 8,
        "recipe.rewards": [{"kind": "math"}],
    }


def test_a_tracker_whose_run_is_gone_is_told_and_fails_nothing(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    folder.attempt(1).mkdir(parents=True, exist_ok=True)
    Ledger({"wandb": {}}).write(folder)
    (told,) = hand_over(folder)
    assert told.startswith("wandb: took no files (")
