"""What `generation.backend: auto` is, on machines of all kinds."""

import tomllib
from pathlib import Path

import pytest

from grpo_cli.checks.generation import ASSUMED, SUPPORTED_VLLM, choose_backend
from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import load_recipe
from tests.recipe_texts import GOOD, write_recipe

GPUS, CPU = Hardware(gpus=2, cpus=8), Hardware(gpus=0, cpus=8)
AUTO = GOOD.replace("generation:\n", "generation:\n  backend: auto\n")


@pytest.mark.parametrize(
    ("hardware", "vllm", "more", "backend", "reason"),
    [
        (GPUS, "0.31.0", [], "vllm", "vLLM 0.31.0 is installed"),
        (GPUS, "0.22.1+cu128", [], "vllm", "2 GPUs"),
        (GPUS, "0.31.0rc1", [], "vllm", "0.31.0rc1"),
        (GPUS, None, [], "transformers", "not installed"),
        (GPUS, "0.32.0", [], "transformers", "vLLM 0.32.0 is not in >=0.22,<0.32"),
        (GPUS, "dev", [], "transformers", "vLLM dev is not in"),
        (GPUS, "0.31.0", ["launch.use_cpu=true"], "transformers", "on a CPU"),
        (GPUS, "0.31.0", ["model.quantization=4bit"], "transformers", "4-bit"),
        (CPU, "0.31.0", [], "transformers", "on a CPU"),
        (CPU, None, ["generation.vllm.mode=server"], "vllm", "asks a server"),
        (GPUS, ASSUMED, [], "vllm", "assumed to have vLLM"),
        (CPU, ASSUMED, [], "transformers", "on a CPU"),
    ],
)
def test_auto_is_what_the_machine_can_do_best(tmp_path, hardware, vllm, more, backend, reason):
    choice = choose_backend(load_recipe(write_recipe(tmp_path, AUTO), more), hardware, vllm)
    assert choice.backend == backend
    assert reason in choice.reason


def test_checked_recipes_never_say_auto_and_a_note_tells_what_it_is(tmp_path):
    checked = check_recipe(write_recipe(tmp_path, AUTO), hardware=CPU)
    assert checked.loaded.recipe.generation.backend == "transformers"
    (note,) = checked.notes_of("generation.backend")
    assert note.seen == "`auto` is transformers here: the training is on a CPU"
    assert note.location.line == AUTO[: AUTO.index("auto")].count("\n") + 1


def test_other_backends_stay_and_nothing_is_noted(tmp_path):
    for backend in ("transformers", "vllm", "transformers_continuous_batching"):
        path = write_recipe(tmp_path, AUTO.replace("auto", backend))
        checked = check_recipe(path, hardware=GPUS)
        assert checked.loaded.recipe.generation.backend == backend
        assert not checked.notes_of("generation.backend")


def test_vllm_is_assumed_on_another_machine_and_not_missed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    checked = check_recipe(write_recipe(tmp_path, AUTO), hardware=GPUS, environment=False)
    (note,) = checked.notes_of("generation.backend")
    assert note.seen == "`auto` is vllm there: a machine with GPUs is assumed to have vLLM"
    path = write_recipe(tmp_path, AUTO.replace("auto", "vllm"))
    (note,) = check_recipe(path, hardware=GPUS, environment=False).notes_of("generation.backend")
    assert note.seen == "vllm is not installed here"


def test_a_server_that_auto_asks_is_managed_on_every_machine(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, AUTO), ["generation.vllm.mode=server"])
    assert recipe.generation.has_managed_server
    assert recipe.generation.managed_gpus == 1


def test_the_versions_are_those_that_the_package_asks_for():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm{SUPPORTED_VLLM}"]
