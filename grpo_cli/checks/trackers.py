"""The trackers of a recipe: whether each is known, installed, and able to log in without a terminal.

All of it would otherwise end a training only when its model is loaded.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from grpo_cli.errors import Problem, nearest
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.trackers.catalogue import ALL, MODULES, expand, install_command, is_installed
from grpo_cli.runs.trackers.login import lacks_wandb_login


def check_trackers(recipe: Recipe) -> Iterator[Problem]:
    """Finds what is wrong with `logging.report_to`."""
    named = recipe.logging.report_to
    for index, name in enumerate(named):
        path = f"logging.report_to.{index}"
        if name == ALL and len(named) > 1:
            yield Problem("`all` stands alone", "write `report_to: all`, or remove it", path)
        elif name not in MODULES and name != ALL:
            close = nearest(name, [*MODULES, ALL])
            listed = f"write one of {', '.join(MODULES)}"
            yield Problem(
                f"there is no tracker `{name}`", f"write `{close}`" if close else listed, path
            )
        elif name != ALL and not is_installed(name):
            command = install_command(name)
            yield Problem(f"{name} is not installed", f"{command}, or remove `{name}`", path)
    used = expand(named)
    if "wandb" in used and is_installed("wandb") and lacks_wandb_login(os.environ, Path.cwd()):
        index = named.index("wandb") if "wandb" in named else 0
        yield Problem(
            "Weights & Biases has no login here, and a training has no terminal to ask for one at",
            "run `wandb login`, set WANDB_API_KEY, or keep the run on this disk with WANDB_MODE=offline",
            path=f"logging.report_to.{index}",
        )
