import json
import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.analysis.diagnosis.history import PEAK_WIDTH
from grpo_cli.analysis.diagnosis.history import read_history as read_run_history
from grpo_cli.errors import UsageError
from grpo_cli.runs.folder import RunFolder, StatusFile
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.run import Run
from tests.histories import make_history, make_recipe
from tests.run_folders import make_finished_run, play, write_samples


def read_history(folder):
    return read_run_history(Run(folder))


def test_a_run_in_its_folder_is_read_whole(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.1, 0.2], accuracy=0.8)
    for when in ("before", "after"):
        append_record(run.metrics, {"event": "measure", "when": when, "reward": 0.3, "prompts": 7})
    append_record(run.metrics, {"event": "train", "step": 3, "total_steps": 40, "reward": math.nan})
    with run.metrics.open("a") as file:
        file.write('{"event": "tra')
    history = read_history(run)
    assert history.metrics.series["reward"] == [(1, 0.1), (2, 0.2), (3, None)]
    assert history.last("reward", 2) == [0.2]
    assert (history.metrics.step, history.metrics.total_steps) == (3, 40)
    assert history.metrics.measured["before"]["reward"] == 0.3
    assert history.checkpoints == ()
    assert history.lost_at is None
    assert (history.source, history.run) == (str(run.resolved), str(run.path))
    assert history.answers_after is None
    write_samples(run, {"1": [1.0]})
    assert read_history(run).answers_after.values["rewards/math"] == {0: 1.0}


def test_answers_are_counted_by_text_and_scored_by_row(tmp_path):
    run = make_finished_run(tmp_path)
    write_samples(run, {"1": [1.0, 0.0], "2": [0.5]})
    found = read_history(run).answers_after
    assert (found.prompts, found.share) == (2, 1 / 3)
    assert found.values["rewards/math"] == found.values["reward"] == {0: 0.5, 1: 0.5}
    lines = (run.evaluations / "after.jsonl").read_text().replace("it is 1.0", " it is 0.0\\u2028")
    (run.evaluations / "after.jsonl").write_text(lines + '{"row": 2, "text": "torn", "rew')
    found = read_history(run).answers_after
    assert (found.commonest, found.share) == ("it is 0.0", 2 / 3)


def test_episodes_that_only_end_alike_are_different_answers(tmp_path):
    run = make_finished_run(tmp_path)
    write_samples(run, {"1": [1.0, 1.0], "2": [1.0]})
    path = run.evaluations / "after.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    for sample, (messages, episode) in zip(samples, (play(2), play(2), play(3)), strict=True):
        sample |= {"messages": messages, "episode": episode}
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    found = read_history(run).answers_after
    assert found.share == 2 / 3
    assert found.commonest.startswith("let me see (1)\n[{")


def test_a_loss_that_ended_a_run_is_known_by_the_batch_it_left(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.1], state="failed", accuracy=None)
    (run.path / "bad_batch_0.pt").touch()
    assert read_history(run).lost_at == 2
    StatusFile(run.status).update(state="running")
    assert read_history(run).lost_at is None


def test_a_folder_that_is_no_run_says_so(tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        read_history(RunFolder(tmp_path))


def test_rewards_have_the_places_of_the_recipe():
    two = [{"kind": "math", "answer": "q"}, {"kind": "math", "answer": "q", "weight": 0.5}]
    series = {"rewards/math/mean": [0.1], "rewards/math_2/mean": [0.2]}
    found = list(make_history(series, make_recipe(rewards=two)).rewards())
    assert [(place, name, entry.weight) for place, name, entry in found] == [
        (0, "math", 1.0),
        (1, "math_2", 0.5),
    ]
    assert list(make_history(series).rewards()) == [], "another recipe's"


def test_values_up_to_a_step_are_those_logged_by_then():
    history = make_history({"reward": [0.1, 0.2, math.inf, 0.4]})
    assert history.up_to("reward", 3, 2) == [0.2]
    assert history.up_to("reward", 99, 2) == [0.4]
    assert history.up_to("reward", 0, 2) == []
    assert history.up_to("no such", 3, 2) == []


@settings(deadline=None)
@given(st.lists(st.none() | st.integers(-10, 10), max_size=40))
def test_a_peak_is_the_first_of_the_best_means(values):
    history = make_history({"reward": [0.0]})
    history.metrics.series["reward"] = []
    for step, value in enumerate(values):
        history.metrics.series["reward"].append((step, value))
    known = [(step, value) for step, value in enumerate(values) if value is not None]
    windows = [known[end - PEAK_WIDTH : end] for end in range(PEAK_WIDTH, len(known) + 1)]
    means = [fmean(value for _, value in window) for window in windows]
    peak = history.peak("reward")
    assert (peak is None) == (not means)
    if peak is not None:
        assert fmean(peak.values) == max(means)
        assert peak.step == windows[means.index(max(means))][-1][0]
