"""Following records while they are written, cut and replaced."""

import os

import pytest

from grpo_cli.runs.metrics import RecordTail, append_record, read_reward_ends


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


@pytest.mark.parametrize("block", [100_000, 500])
def test_the_ends_of_a_file_are_those_of_the_whole(tmp_path, block):
    path = tmp_path / "metrics.jsonl"
    for step in range(1000, 1400):
        append_record(path, {"event": "train", "step": step, "time": 0.25, "reward": step})
    first, last = read_reward_ends(path, block)
    # A tenth of 400; with a small block fewer are in it.
    width = 40 if block == 100_000 else len(first)
    assert width > 1
    assert first == list(range(1000, 1000 + width))
    assert last == list(range(1399, 1399 - len(last), -1))
    assert len(last) == pytest.approx(width, abs=1)


def test_there_is_nothing_at_the_ends_of_nothing(tmp_path):
    assert read_reward_ends(tmp_path / "metrics.jsonl") == ([], [])
