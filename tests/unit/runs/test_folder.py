import json

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.runs.folder import RunFolder, check_writable, create_run
from grpo_cli.runs.manifest import describe_origin
from grpo_cli.runs.status import Status, StatusFile
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


def test_checking_a_root_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        check_writable(tmp_path / "file" / "runs")


def test_a_new_phase_starts_afresh_and_keys_of_later_versions_are_ignored(tmp_path):
    file = StatusFile(tmp_path / "status.json")
    assert file.read().state == "pending"
    file.update(state="running", phase="training", detail="3/4")
    status = file.update(phase="saving")
    assert (status.state, status.detail) == ("running", "")
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


def test_files_of_the_workers_are_found_again_by_rank(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.worker_pids() == folder.failures() == {}
    for path in (folder.worker_pid(2), folder.worker_pid(10), folder.failure(2)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    folder.stop_request.touch()
    assert folder.worker_pids() == {rank: folder.worker_pid(rank) for rank in (2, 10)}
    assert folder.failures() == {2: folder.failure(2)}
