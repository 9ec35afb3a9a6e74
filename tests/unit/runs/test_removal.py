"""What is removed of runs, and what never is."""

import json
import shutil

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.removal import plan_removal, remove
from grpo_cli.runs.selection import find_run
from tests.run_folders import make_finished_run


def make_checkpoints(run, best=None):
    for step in (10, 20, 30):
        path = run.checkpoints / f"checkpoint-{step}"
        path.mkdir(parents=True)
        named = None if best is None else f"anywhere/checkpoint-{best}"
        state = {"best_model_checkpoint": named}
        (path / "trainer_state.json").write_text(json.dumps(state))
        (path / "weights").write_bytes(b"x" * 1000)
    (run.checkpoints / ".saving").mkdir()
    return run


def names(paths):
    return [path.name for path in paths]


def test_a_run_is_removed_with_the_folder_it_leaves_empty(tmp_path):
    first, second = (make_finished_run(tmp_path / "runs", seed=seed) for seed in (1, 2))
    planned = plan_removal(first)
    assert planned.bytes > 1000
    assert remove([planned]) == planned.bytes
    assert not first.path.exists()
    assert second.path.is_dir()
    remove([plan_removal(second)])
    assert list((tmp_path / "runs").iterdir()) == []


def test_checkpoints_are_removed_but_for_the_newest_and_the_best(tmp_path):
    run = make_checkpoints(make_finished_run(tmp_path), best=10)
    planned = plan_removal(run, checkpoints=True)
    assert names(planned.kept) == ["checkpoint-10", "checkpoint-30"]
    assert names(planned.paths) == [".saving", "checkpoint-20"]
    remove([planned])
    assert sorted(names(run.checkpoints.iterdir())) == ["checkpoint-10", "checkpoint-30"]
    assert run.resolved.is_file()


def test_a_torn_checkpoint_is_not_the_one_that_stays(tmp_path):
    run = make_checkpoints(make_finished_run(tmp_path))
    (run.checkpoints / "checkpoint-30" / "trainer_state.json").write_text("{")
    assert names(plan_removal(run, checkpoints=True).kept) == ["checkpoint-20"]


def test_nothing_behind_a_link_is_removed(tmp_path):
    run = make_finished_run(tmp_path / "runs")
    elsewhere = make_checkpoints(RunFolder(tmp_path / "disk")).checkpoints
    run.checkpoints.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="is a link to"):
        plan_removal(run, checkpoints=True)
    planned = plan_removal(run)
    assert planned.bytes < 100_000
    remove([planned])
    assert (elsewhere / "checkpoint-10" / "weights").is_file()


def _run_it(run):
    run.status.write_text('{"state": "running"}')


def _link_it(run):
    aside = run.path.with_name("aside")
    run.path.rename(aside)
    run.path.symlink_to(aside)


def _empty_it(run):
    run.resolved.unlink()


def _share_it(run):
    run.checkpoints.symlink_to("../../checkpoints")


def _work_in_it(run):
    (run.path / "machines" / "1").mkdir(parents=True)
    (run.path / "machines" / "1" / "status.json").write_text('{"state": "running"}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_run_it, "is running"),
        (_link_it, "is a link"),
        (_empty_it, "is not a run folder"),
        (_share_it, "is one machine's part of"),
        (_work_in_it, "is running"),
    ],
)
def test_what_must_not_go_is_refused(tmp_path, change, said):
    run = make_finished_run(tmp_path)
    change(run)
    with pytest.raises(UsageError, match=said):
        plan_removal(run)


def test_nothing_is_removed_where_one_of_them_was_taken_up_meanwhile(tmp_path):
    runs = [make_finished_run(tmp_path, seed=seed) for seed in (1, 2)]
    planned = [plan_removal(run) for run in runs]
    runs[1].launch.mkdir()
    with runs[1].lock(), pytest.raises(UsageError, match="another command"):
        remove(planned)
    assert all(run.path.is_dir() for run in runs)


def test_a_run_that_ended_without_a_word_may_go(tmp_path):
    run = make_finished_run(tmp_path, state="running")
    run.status.write_text('{"state": "running", "updated_at": 0}')
    run.metrics.unlink()
    remove([plan_removal(run)])
    assert not run.path.exists()


def test_nothing_behind_a_link_to_a_run_or_to_its_name_is_removed(tmp_path):
    run = make_finished_run(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(run.path.parent)
    (tmp_path / "runs" / "one").mkdir()
    (tmp_path / "runs" / "one" / "linked").symlink_to(run.path)
    for given in ("linked/seed-42", "one/linked", "one/linked/checkpoints/.."):
        with pytest.raises(UsageError, match=r"lies behind one|no run"):
            plan_removal(find_run(tmp_path / "runs", str(tmp_path / "runs" / given)))
    assert run.resolved.is_file()
    # All runs may lie on another disk.
    (tmp_path / "all").symlink_to(tmp_path / "elsewhere")
    remove([plan_removal(find_run(tmp_path / "all", "sums"))])
    assert not run.path.exists()


def test_what_cannot_be_removed_is_told(tmp_path, monkeypatch):
    run = make_finished_run(tmp_path)

    def refuse(path):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(UsageError, match=r"Permission denied.*what is left is"):
        remove([plan_removal(run)])
