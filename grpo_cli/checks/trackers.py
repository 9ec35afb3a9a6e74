"""Checks of `logging.report_to`."""

import os
from collections.abc import Iterator
from pathlib import Path

from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.runs.trackers import (
    ALL,
    MODULES,
    expand,
    install_command,
    is_installed,
    lacks_wandb_login,
)


def check_trackers(context: CheckContext) -> Iterator[Issue]:
    """Find what is wrong with `logging.report_to`."""
    names = context.recipe.logging.report_to
    for index, name in enumerate(names):
        path = f"logging.report_to.{index}"
        if name == ALL and len(names) > 1:
            yield Issue("`all` stands alone", "write `report_to: all`, or remove it", path)
        elif name not in MODULES and name != ALL:
            close = nearest(name, [*MODULES, ALL])
            if "," in name:
                close = f"[{name}]"
            fix = f"write `{close}`" if close else f"write one of {', '.join(MODULES)}"
            yield Issue(f"there is no tracker `{name}`", fix, path)
        elif name != ALL and not is_installed(name):
            fix = f"{install_command(name)}, or remove `{name}`"
            yield Issue(f"{name} is not installed", fix, path, package=name)
    wandb = "wandb" in expand(names) and is_installed("wandb")
    if wandb and lacks_wandb_login(os.environ, Path.cwd()):
        index = names.index("wandb") if "wandb" in names else 0
        seen = (
            "Weights & Biases has no login here, and a training has no terminal to ask for one at"
        )
        fix = "run `wandb login`, set WANDB_API_KEY, or keep the run on this disk with WANDB_MODE=offline"
        yield Issue(seen, fix, f"logging.report_to.{index}")
