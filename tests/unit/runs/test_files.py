import json

import pytest

from grpo_cli.runs.files import write_json, write_text
from grpo_cli.runs.metrics import RecordTail, append_record


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "status.json"
    write_json(path, {"a": None})
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_records_are_json_even_where_a_metric_is_not_a_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_record(
        path, {"loss": float("nan"), "max": [float("inf"), 1.0], "x": {"y": -float("inf")}}
    )
    (record,) = RecordTail(path).read_new()
    assert (record["loss"], record["max"], record["x"]) == (None, [None, 1.0], {"y": None})
    assert record["schema_version"] == 1


def test_a_tail_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = RecordTail(path)
    assert list(tail.read_new()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(tail.read_new()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(tail.read_new()) == [{"step": 2}]
    assert list(tail.read_new()) == []
