"""Where an export may go, and what it may take the place of."""

import json
from pathlib import Path

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.exporting.exporting import KIND, RECORD, check_free, give_name, resolve_target


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "name" / "stamp"
    (folder / "model").mkdir(parents=True)
    return folder


def exported(folder, text="old"):
    folder.mkdir()
    (folder / RECORD).write_text(json.dumps({"kind": KIND}))
    (folder / "weights").write_text(text)
    return folder


def test_a_folder_of_its_own_is_taken(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_target(Path("out"), run) == tmp_path / "out"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert resolve_target(Path("link"), run) == tmp_path / "real"


@pytest.mark.parametrize("place", [".", "..", "/", "~", "work", "work/deeper"])
def test_where_other_things_live_is_refused(run, tmp_path, monkeypatch, place):
    (tmp_path / "work" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "deeper")
    to = tmp_path / place if place.startswith("work") else Path(place)
    with pytest.raises(UsageError, match=r"holds other files|part of the run"):
        resolve_target(to, run)


def test_the_run_itself_is_never_a_target(run, tmp_path):
    for to in (run, run / "model", run / "new", run.parent, tmp_path / "runs"):
        with pytest.raises(UsageError, match="part of the run, or holds it"):
            resolve_target(to, run)


def test_what_is_no_folder_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in (
        ("file", "is a file"),
        ("loop", "cannot be a folder"),
        ("a\udcff", "cannot be a folder"),
    ):
        with pytest.raises(UsageError, match=said):
            resolve_target(tmp_path / name, run)


@pytest.mark.parametrize("force", [False, True])
def test_only_exports_are_replaced_and_only_when_forced(tmp_path, force):
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", force=force)
    check_free(tmp_path / "new", force=force)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("a")
    with pytest.raises(UsageError, match="no export of grpo's"):
        check_free(tmp_path / "mine", force=force)
    old = exported(tmp_path / "old")
    if force:
        check_free(old, force=True)
    else:
        with pytest.raises(UsageError, match="or --force"):
            check_free(old, force=False)


def test_a_finished_export_takes_the_place_of_the_old_one(tmp_path):
    old, new = exported(tmp_path / "old"), exported(tmp_path / "new", "new")
    give_name(new, old, force=True)
    assert (old / "weights").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


def test_what_came_to_be_there_in_the_meantime_stays(tmp_path):
    new = exported(tmp_path / "new", "new")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "thesis.txt").write_text("a")
    for force in (False, True):
        with pytest.raises(UsageError):
            give_name(new, tmp_path / "target", force=force)
    assert (tmp_path / "target" / "thesis.txt").read_text() == "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "target"]
