"""What `grpo eval` samples with, on machines of all kinds."""

import importlib.util
import json

import pytest

from grpo_cli.checks import generation as checks
from grpo_cli.checks import recipe as recipe_checks
from grpo_cli.errors import UsageError
from grpo_cli.eval import request
from grpo_cli.eval.request import EvalOptions, make_request
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.runs.files import SCHEMA_VERSION
from grpo_cli.runs.folder import RunFolder
from tests.recipe_texts import GOOD, write_recipe

GPUS, CPU = Hardware(gpus=2, cpus=8), Hardware(gpus=0, cpus=8)


def set_machine(monkeypatch, hardware, vllm):
    for module in (recipe_checks, request):
        monkeypatch.setattr(module, "read_hardware", lambda: hardware)
    for module in (checks, request):
        monkeypatch.setattr(module, "read_vllm_version", lambda: vllm)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: vllm if name == "vllm" else find(name)
    )


def pick(tmp_path, monkeypatch, hardware, vllm, trained_with, **options):
    set_machine(monkeypatch, hardware, vllm)
    text = GOOD.replace("generation:\n", f"generation:\n  backend: {trained_with}\n")
    return make_request(write_recipe(tmp_path, text), None, EvalOptions(**options)).backend


@pytest.mark.parametrize(
    ("hardware", "vllm", "trained_with", "backend"),
    [
        (GPUS, "0.31.0", "auto", "vllm"),
        (GPUS, "0.31.0", "vllm", "vllm"),
        (GPUS, "0.31.0", "transformers", "transformers"),
        (GPUS, "0.1.0", "auto", "transformers"),
        (GPUS, None, "auto", "transformers"),
        (CPU, "0.31.0", "auto", "transformers"),
        (CPU, "0.31.0", "vllm", "transformers"),
    ],
)
def test_an_evaluation_samples_as_training_does_if_the_machine_can(
    tmp_path, monkeypatch, hardware, vllm, trained_with, backend
):
    assert pick(tmp_path, monkeypatch, hardware, vllm, trained_with) == backend


@pytest.mark.parametrize(("vllm", "backend"), [(None, "transformers"), ("0.31.0", "vllm")])
def test_a_run_that_sampled_from_a_server_is_measured_without_it(
    tmp_path, monkeypatch, vllm, backend
):
    set_machine(monkeypatch, GPUS, vllm)
    run = RunFolder(tmp_path)
    run.model.mkdir()
    (run.model / "adapter_config.json").write_text("{}")
    edits = ["generation.backend=vllm", "generation.vllm.mode=server"]
    recipe = load_recipe(write_recipe(tmp_path), edits)
    resolved = {"schema_version": SCHEMA_VERSION, "recipe": recipe.model_dump(mode="json")}
    run.resolved.write_text(json.dumps(resolved))
    assert make_request(tmp_path, None, EvalOptions()).backend == backend


def test_a_named_backend_is_taken(tmp_path, monkeypatch):
    for backend in ("transformers", "vllm"):
        assert pick(tmp_path, monkeypatch, GPUS, "0.31.0", "auto", backend=backend) == backend
    with pytest.raises(UsageError, match="there is no --backend tgi"):
        pick(tmp_path, monkeypatch, GPUS, "0.31.0", "auto", backend="tgi")


def test_an_exported_model_is_measured_with_a_recipe(tmp_path):
    for name in ("config.json", "recipe.yaml"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        UsageError, match=f"Fix: grpo eval {tmp_path}/recipe.yaml --model {tmp_path}"
    ):
        make_request(tmp_path, None, EvalOptions())
