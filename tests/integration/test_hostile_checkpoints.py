"""Checkpoints whose pickles would run code: nothing of them runs unless the user trusts who wrote them."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from grpo_cli.errors import RunError
from grpo_cli.models.shards import merge_shards
from grpo_cli.models.source import FSDP_SHARDS
from grpo_cli.models.weights import weights_only
from grpo_cli.recipe.model import ModelConfig
from tests.integration.conftest import Workshop


class Command:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def shards(chat_model, tmp_path):
    """The weights of a model as `torch.distributed.checkpoint` writes them."""
    folder = tmp_path / "checkpoint-1"
    state = load_file(chat_model / "model.safetensors")
    dcp.save({"model": state}, checkpoint_id=folder / FSDP_SHARDS, no_dist=True)
    return folder


def write_metadata(folder, mark):
    (folder / FSDP_SHARDS / ".metadata").write_bytes(pickle.dumps(Command(mark)))


def write_metadata_with_a_part(folder, mark):
    file = folder / FSDP_SHARDS / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Command(mark)
    file.write_bytes(pickle.dumps(metadata))


def write_object(folder, mark, chat_model):
    """An entry that is not a tensor, which torch would unpickle from the file of the tensors."""
    shutil.rmtree(folder / FSDP_SHARDS)
    state = {**load_file(chat_model / "model.safetensors"), "extra": Command(mark)}
    dcp.save({"model": state}, checkpoint_id=folder / FSDP_SHARDS, no_dist=True)


@pytest.mark.parametrize("write", [write_metadata, write_metadata_with_a_part, write_object])
def test_shards_run_nothing(write, shards, chat_model, tmp_path):
    mark, target = tmp_path / "ran", tmp_path / "whole"
    target.mkdir()
    config = ModelConfig(path=str(chat_model), dtype="float32")
    merge_shards(shards, config, target)
    assert (
        load_file(target / "model.safetensors").keys()
        == load_file(chat_model / "model.safetensors").keys()
    )
    write(shards, mark, *([chat_model] if write is write_object else []))
    with pytest.raises(RunError, match=r"is not unpickled.*--trust-checkpoint"):
        merge_shards(shards, config, target)
    assert not mark.exists()
    with pytest.raises(Exception, match=r".+"):  # it is not a model's checkpoint either
        merge_shards(shards, config, target, trusted=True)
    assert mark.exists()


def test_no_library_unpickles_what_it_asks_for(tmp_path):
    """As DeepSpeed reads its shards."""
    file, mark = tmp_path / "states.pt", tmp_path / "ran"
    torch.save({"a": torch.ones(2), "b": Command(mark)}, file)
    with (
        pytest.raises(RunError, match="is not unpickled"),
        weights_only(tmp_path, trusted=False),
    ):
        torch.load(file, weights_only=False)
    assert not mark.exists()
    with weights_only(tmp_path, trusted=True):
        torch.load(file, weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "process_0.pt"])
def test_a_resume_runs_nothing(name, full_run, chat_model, tmp_path):
    workshop = Workshop.copy(full_run, tmp_path, chat_model)
    checkpoint, mark = workshop.run / "checkpoints" / "checkpoint-1", tmp_path / "ran"
    torch.save({"state": Command(mark)}, checkpoint / name)
    done = workshop.grpo("train", workshop.folder / "recipe.yaml", "--resume-from", checkpoint)
    assert done.returncode == 1, done.stderr
    assert "is not unpickled" in done.stderr
    assert "Traceback" not in done.stderr
    assert not mark.exists()
