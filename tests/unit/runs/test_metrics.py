"""Following records while they are written, cut and replaced."""

import os

import pytest

from grpo_cli.runs.metrics import (
    Metrics,
    RecordTail,
    append_record,
    count_averaged,
    read_reward_ends,
)


def steps(records):
    return [each["step"] for each in records]


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 5):
        append_record(path, {"event": "train", "step": step})
    return path


def test_a_line_that_is_still_being_written_waits(metrics):
    tail = RecordTail(metrics)
    assert steps(tail.read_new()) == [1, 2, 3, 4]
    whole = metrics.read_bytes()
    with metrics.open("ab") as file:
        file.write(b'{"step": 5')
    assert list(tail.read_new()) == []
    metrics.write_bytes(whole + b'{"step": 5}\n')
    assert steps(tail.read_new()) == [5]
    assert tail.rewinds == 0


def test_a_file_that_was_cut_is_read_from_its_beginning(metrics):
    tail = RecordTail(metrics)
    list(tail.read_new())
    os.truncate(metrics, sum(map(len, metrics.read_bytes().splitlines(True)[:2])))
    append_record(metrics, {"event": "resume", "step": 2})
    assert steps(tail.read_new()) == [1, 2, 2]
    assert tail.rewinds == 1


def test_a_file_that_was_cut_and_is_longer_again_is_known_to_be_another(metrics):
    tail = RecordTail(metrics)
    list(tail.read_new())
    os.truncate(metrics, len(metrics.read_bytes().splitlines(True)[0]))
    for step in range(12, 22):
        append_record(metrics, {"event": "train", "step": step})
    assert steps(tail.read_new()) == [1, *range(12, 22)]
    assert tail.rewinds == 1


def test_a_file_that_is_gone_and_back_is_read_anew(metrics):
    tail = RecordTail(metrics)
    list(tail.read_new())
    metrics.unlink()
    assert list(tail.read_new()) == []
    append_record(metrics, {"event": "train", "step": 1})
    assert steps(tail.read_new()) == [1]


def test_the_end_of_a_large_file_is_enough_where_only_the_newest_counts(metrics):
    size = len(metrics.read_bytes().splitlines(True)[-1])
    tail = RecordTail(metrics, last_bytes=size + 3)
    assert steps(tail.read_new()) == [4]
    append_record(metrics, {"event": "train", "step": 5})
    assert steps(tail.read_new()) == [5]


def test_the_ends_of_a_file_are_those_that_a_summary_averages(tmp_path):
    path, metrics = tmp_path / "metrics.jsonl", Metrics()
    for step in range(300):
        # Records grow, so their number does not follow from the size of the first ones.
        values = {"reward": step / 300, "x": "x" * 10 * step} if step % 50 else {"reward": None}
        append_record(path, {"event": "train", "step": step, **values})
        append_record(path, {"event": "eval", "step": step, "eval_reward": 1.0})
    for record in RecordTail(path).read_new():
        metrics.extend([record])
    rewards = metrics.values("reward")
    width = count_averaged(len(rewards))
    assert read_reward_ends(path) == (rewards[:width], rewards[-width:], False)


@pytest.mark.parametrize(
    ("shares", "failed"), [([0.0, 0, None], False), ([0.0, 0.25], True), ([1], True)]
)
def test_a_reward_that_fails_in_any_record_is_noticed(tmp_path, shares, failed):
    for share in shares:
        append_record(tmp_path / "m", {"event": "train", "step": 1, "rewards/f/error_share": share})
    assert read_reward_ends(tmp_path / "m")[2] is failed


def test_there_is_nothing_at_the_ends_of_nothing(tmp_path):
    assert read_reward_ends(tmp_path / "metrics.jsonl") == ([], [], False)
