"""Optimizers that need a package of their own."""

import importlib.util

import pytest
from transformers import trainer_optimizer
from transformers.training_args import OptimizerNames

from grpo_cli.checks.launch import find_package
from grpo_cli.checks.recipe import check_recipe
from tests.recipe_texts import GOOD, write_recipe

BUILT_IN = {
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
}


def test_every_optimizer_of_transformers_is_known():
    listed = {
        "bitsandbytes": trainer_optimizer._BITSANDBYTES_OPTIMIZERS,
        "galore_torch": trainer_optimizer._GALORE_OPTIMIZERS,
        "apollo_torch": trainer_optimizer._APOLLO_OPTIMIZERS,
        "torchao": trainer_optimizer._TORCHAO_OPTIMIZERS,
        "schedulefree": trainer_optimizer._SCHEDULE_FREE_OPTIMIZERS,
        "lomo_optim": [OptimizerNames.LOMO, OptimizerNames.ADALOMO],
        "grokadamw": [OptimizerNames.GROKADAMW],
        "optimi": [OptimizerNames.STABLE_ADAMW],
        "torchdistx": [OptimizerNames.ADAMW_ANYPRECISION],
    }
    expected = {name.value: module for module, names in listed.items() for name in names}
    for optimizer in OptimizerNames:
        needed = find_package(optimizer.value)
        assert (needed[0] if needed else None) == expected.get(optimizer.value)
        assert (needed is None) == (optimizer.value in BUILT_IN)


@pytest.mark.parametrize(
    ("there", "told"),
    [(True, []), (False, [("training.optim", "adamw_8bit needs bitsandbytes")])],
)
def test_a_missing_package_is_told_before_anything_is_loaded(tmp_path, monkeypatch, there, told):
    find = importlib.util.find_spec

    def seen(name, *more):
        return (object() if there else None) if name == "bitsandbytes" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", seen)
    recipe = write_recipe(tmp_path, GOOD + "  optim: adamw_8bit\n")
    found = [problem for problem in check_recipe(recipe).problems if "optim" in problem.path]
    assert [problem.path for problem in found] == [path for path, _ in told]
    assert all(text in problem.seen for problem, (_, text) in zip(found, told, strict=True))
    assert all("[quantization]" in problem.fix for problem in found)
