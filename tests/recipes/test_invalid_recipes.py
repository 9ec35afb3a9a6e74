"""Every mistake in `invalid/` gets exactly the message that stands beside it."""

from pathlib import Path

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import RecipeError
from grpo_cli.machine import Hardware

FOLDER = Path(__file__).parent / "invalid"
ROOT = FOLDER.parents[2]
RECIPES = sorted(FOLDER.glob("*.yaml"))


def read_messages(path: Path) -> str:
    try:
        problems = check_recipe(path, hardware=Hardware(gpus=0, cpus=2)).errors
    except RecipeError as error:
        problems = error.problems
    text = "\n".join(str(problem) for problem in problems)
    return (
        text.replace(f"{FOLDER}/", "").replace(str(FOLDER), "FOLDER").replace(str(ROOT), "CHECKOUT")
        + "\n"
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_mistake_gets_its_message(path):
    assert read_messages(path) == path.with_suffix(".expected").read_text(encoding="utf-8")


def test_every_mistake_has_a_message_beside_it():
    assert len(RECIPES) >= 30
    assert {path.stem for path in RECIPES} == {path.stem for path in FOLDER.glob("*.expected")}


def test_settings_without_effect_are_warned_of():
    found = check_recipe(FOLDER / "no_effect.yaml", hardware=Hardware(gpus=0, cpus=2)).problems
    warned = {problem.path for problem in found if problem.level == "warning"}
    assert warned == {
        "generation.num_generations",
        "generation.vllm",
        "training.warmup_steps",
        "training.eval_steps",
        "training.greater_is_better",
    }
