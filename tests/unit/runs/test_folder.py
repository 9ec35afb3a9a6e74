import json
import subprocess

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.runs.checkpoints import STAGING, STATE, restore, rewind, whole_checkpoints
from grpo_cli.runs.folder import (
    RunFolder,
    Status,
    StatusFile,
    create_named_run,
    create_run,
    locate_run,
)
from grpo_cli.runs.manifest import describe_origin
from grpo_cli.runs.selection import find_started
from tests.recipe_texts import GOOD, write_recipe


def test_a_run_folder_gives_back_the_recipe_it_was_made_from(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    folder = create_run(tmp_path / "runs", recipe, GOOD)
    assert folder.read_recipe() == recipe
    assert folder.recipe.read_text() == GOOD
    assert folder.path.parent == tmp_path / "runs" / "good"


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    folders = {create_run(tmp_path / "runs", recipe, GOOD).path for _ in range(5)}
    assert len(folders) == 5


def test_another_folder_is_no_run(tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        RunFolder(tmp_path).read_recipe()


def test_a_new_phase_starts_afresh_and_keys_of_later_versions_are_ignored(tmp_path):
    file = StatusFile(tmp_path / "status.json")
    assert file.read().state == "pending"
    file.update(state="running", phase="training", done=3, planned=4, detail="prompts")
    status = file.update(phase="saving")
    assert (status.state, status.done, status.phase_progress) == ("running", None, "")
    values = json.loads(file.path.read_text()) | {"from_the_future": 1}
    file.path.write_text(json.dumps(values))
    assert isinstance(file.read(), Status)


def test_a_manifest_says_what_a_run_was_made_of(tmp_path):
    manifest = describe_origin(["grpo", "train", "x"], tmp_path / "x.yaml", seed=7)
    assert manifest["versions"]["trl"]
    assert manifest["git"] is None
    assert manifest["seed"] == 7
    assert manifest["hardware"]["cpus"] >= 1
    json.dumps(manifest)


def test_a_manifest_names_the_checkout_and_whether_it_was_changed(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.touch()
    person = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    for command in (["init", "-q"], ["add", "."], [*person, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    clean = describe_origin(["grpo"], recipe, seed=7)["git"]
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    recipe.write_text("name: changed")
    assert describe_origin(["grpo"], recipe, seed=7)["git"] == {**clean, "dirty": True}


def test_a_failure_has_its_fix_apart_or_in_the_reason_as_earlier_versions_wrote_it(tmp_path):
    file = StatusFile(tmp_path / "status.json")
    status = file.update(state="failed", reason="it hangs\nFor long", fix="wait,\n  or do not")
    assert str(file.read().error) == "it hangs\nFor long. Fix: wait,\n  or do not"
    assert status.reason_line == "it hangs. Fix: wait, or do not"
    earlier = {**json.loads(file.path.read_text()), "reason": "it hangs. Fix: wait"}
    del earlier["fix"]
    file.path.write_text(json.dumps(earlier))
    assert str(file.read().error) == file.read().reason_line == "it hangs. Fix: wait"


def test_files_of_the_workers_are_found_again_by_rank(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.worker_pids() == folder.failures() == {}
    for path in (folder.worker_pid(2), folder.worker_pid(10), folder.failure(2)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    folder.stop_request.touch()
    assert folder.worker_pids() == {rank: folder.worker_pid(rank) for rank in (2, 10)}
    assert folder.failures() == {2: folder.failure(2)}


def machines(tmp_path):
    """The folders of two machines of one run; the second comes first."""
    path = write_recipe(tmp_path)
    found = []
    for rank in (1, 0):
        recipe = load_recipe(path, [f"launch.machine_rank={rank}", "launch.num_machines=2"])
        folder = locate_run(tmp_path / "runs", recipe, "mine")
        create_named_run(folder, recipe, GOOD)
        found.insert(0, folder)
    return found


def test_machines_share_the_checkpoints_of_one_run_and_nothing_else(tmp_path):
    first, second = machines(tmp_path)
    assert first.path == tmp_path / "runs" / "good" / "mine"
    assert second.path == first.path / "machines" / "1"
    assert (first.shares_checkpoints, second.shares_checkpoints) == (False, True)
    assert (first.main, second.main) == (first, first)
    (first.checkpoints / "checkpoint-1").mkdir()
    assert (second.checkpoints / "checkpoint-1").is_dir()
    assert second.read_recipe().launch.machine_rank == 1
    # The folder may be moved to another disk.
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = RunFolder(tmp_path / "moved" / "good" / "mine" / "machines" / "1")
    assert (moved.checkpoints / "checkpoint-1").is_dir()


def test_another_machine_s_part_is_no_run_of_its_own(tmp_path):
    first, _ = machines(tmp_path)
    StatusFile(first.status).update(state="stopped")
    assert find_started(tmp_path / "runs", "good") == first


def test_a_folder_that_a_dry_run_left_is_not_the_newest_run(tmp_path):
    first, _ = machines(tmp_path)
    StatusFile(first.status).update(state="stopped")
    dry = RunFolder(tmp_path / "runs" / "good" / "newer")
    dry.path.mkdir()
    dry.write_recipe(first.read_recipe())
    assert find_started(tmp_path / "runs", "good") == first
    StatusFile(dry.status).update(state="running")
    assert find_started(tmp_path / "runs", "good") == dry


def test_checkpoints_on_another_disk_are_still_ones_own(tmp_path):
    first, _ = machines(tmp_path)
    (tmp_path / "large").mkdir()
    first.checkpoints.rmdir()
    first.checkpoints.symlink_to(tmp_path / "large")
    assert not first.shares_checkpoints
    assert first.main == first


def test_machine_0_alone_moves_checkpoints(tmp_path):
    first, second = machines(tmp_path)
    for step in (1, 2):
        checkpoint = first.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / STATE).write_text("{}")
    (first.checkpoints / STAGING).mkdir()
    rewind(second, 1)
    rewind(second, 0)
    assert (first.checkpoints / STAGING).is_dir()
    assert list(whole_checkpoints(second)) == [1, 2]
    rewind(first, 1)
    assert not (first.checkpoints / STAGING).is_dir()
    assert list(whole_checkpoints(second)) == [1]
    assert (first.attempt(1) / "undone" / "checkpoints" / "checkpoint-2").is_dir()


def test_a_resume_without_a_step_can_be_undone(tmp_path):
    run, _ = machines(tmp_path)
    files = {run.status: "old", run.model / "config.json": "{}", run.report: "page"}
    files |= {
        run.metrics: '{"step": 1}\n{"step": 2}\n',
        run.checkpoints / "checkpoint-2" / STATE: "{}",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rewind(run, 1)
    run.attempt(2).mkdir(parents=True)
    assert run.metrics.read_text() == '{"step": 1}\n'
    assert not run.model.exists()
    for path in (run.status, run.resumption):
        path.write_text("of the next attempt")
    with run.metrics.open("a") as log:
        log.write('{"event": "resume"}\n')
    restore(run)
    assert {path: path.read_text() for path in files} == files
    assert not run.resumption.exists()
    assert not (run.attempt(1) / "undone").exists()


def test_the_next_attempt_does_not_inherit_a_report(tmp_path):
    run, _ = machines(tmp_path)
    for step in (1, 0):
        run.report.write_text("page")
        rewind(run, step)
        assert not run.report.exists()
        assert (run.attempt(1) / "undone" / "report.html").read_text() == "page"


@pytest.mark.parametrize("run_id", ["", "..", ".hidden", "a/b", "a b", "-x", "a\n", "x" * 101])
def test_a_run_is_named_like_a_folder(tmp_path, run_id):
    recipe = load_recipe(write_recipe(tmp_path))
    with pytest.raises(UsageError, match="cannot name a run"):
        locate_run(tmp_path, recipe, run_id)
