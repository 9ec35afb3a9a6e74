"""Which run is meant: paths, names, the newest; what is a run at all."""

import shutil

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.selection import find_run, list_folders
from tests.run_folders import make_finished_run


def make_runs(root):
    """Two runs of `sums`, the first one started last, and one of `words`."""
    first, second = (make_finished_run(root, seed=seed) for seed in (1, 2))
    shutil.copytree(second.path, root / "words" / "only")
    for run, started in ((first, 300.0), (second, 200.0), (RunFolder(root / "words/only"), 100.0)):
        write_json(run.status, {"state": "completed", "started_at": started})
    return first, second


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("latest", "sums/seed-1"),
        ("sums", "sums/seed-1"),
        ("sums/latest", "sums/seed-1"),
        ("sums/", "sums/seed-1"),
        ("words", "words/only"),
        ("sums/seed-2", "sums/seed-2"),
        ("runs/sums/seed-2", "sums/seed-2"),
        ("runs/sums/seed-2/", "sums/seed-2"),
    ],
)
def test_a_run_is_found_by_path_by_name_and_by_age(tmp_path, monkeypatch, given, found):
    make_runs(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert find_run(tmp_path / "runs", given).path == tmp_path / "runs" / found


def test_a_dry_run_is_the_newest_only_where_there_is_no_other(tmp_path):
    first, second = make_runs(tmp_path)
    write_json(first.status, {"state": "pending", "started_at": 900.0})
    assert find_run(tmp_path).path == second.path
    shutil.rmtree(second.path)
    assert find_run(tmp_path, "sums").path == first.path


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("summs", "did you mean sums?"),
        ("sums/seed-3", "did you mean sums/seed-"),
        ("nothing-like-it", "no run `nothing-like-it` is in"),
    ],
)
def test_an_unknown_run_is_refused_with_the_nearest(tmp_path, given, said):
    make_runs(tmp_path)
    with pytest.raises(UsageError, match="no run") as caught:
        find_run(tmp_path, given)
    assert said in str(caught.value)


def test_an_empty_root_says_how_to_make_a_run(tmp_path):
    with pytest.raises(UsageError, match="grpo train RECIPE"):
        find_run(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        find_run(tmp_path / "runs", str(tmp_path))


def test_parts_of_runs_and_other_folders_are_no_runs(tmp_path):
    first, second = make_runs(tmp_path)
    write_json(first.path / "resolved.json.bak", {})
    (first.path / "machines" / "1").mkdir(parents=True)
    shutil.copy(first.resolved, first.path / "machines" / "1")
    (tmp_path / "notes" / "today").mkdir(parents=True)
    (tmp_path / "notes" / "today" / "recipe.yaml").write_text("")
    (tmp_path / "a file").write_text("")
    found = [run.path for run in list_folders(tmp_path)]
    assert found == [first.path, second.path, tmp_path / "words" / "only"]


def test_a_half_made_run_is_still_one(tmp_path):
    run = make_finished_run(tmp_path)
    run.resolved.unlink()
    assert list_folders(tmp_path) == []
    run.launch.mkdir()
    run.attempt(1).mkdir(parents=True)
    assert [each.path for each in list_folders(tmp_path)] == [run.path]
