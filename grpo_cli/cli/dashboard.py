"""`grpo train --dashboard`: Trackio added to a run's trackers, and its dashboard beside the training."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from grpo_cli.cli.output import progress, stderr
from grpo_cli.errors import GrpoError, UsageError
from grpo_cli.recipe.loading import load_tree
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.trackers.catalogue import ALL
from grpo_cli.runs.trackers.dashboard import check_dashboard, dashboard


def add_trackio(path: Path, overrides: list[str] | None, *, starts: bool) -> list[str]:
    """The `--set` texts with which a run reports to Trackio too.

    Args:
        path: The recipe.
        overrides: `--set` texts as given.
        starts: Whether a training is started here; no other command has a dashboard.

    Raises:
        UsageError: None is.
        SetupError: Trackio is not installed.
    """
    if not starts:
        raise UsageError(
            "--dashboard shows a training that runs here, and --dry-run and --slurm start none. Fix: "
            "remove it, or put `report_to: [trackio]` into the recipe and look with `trackio show`"
        )
    check_dashboard()
    given = list(overrides or [])
    try:
        recipe = load_tree(path, overrides).recipe
    except GrpoError:
        # What is wrong with the recipe is told by the check.
        return given
    named = recipe.logging.report_to if recipe else ()
    if {"trackio", ALL} & set(named):
        return given
    return [*given, f"logging.report_to=[{', '.join([*named, 'trackio'])}]"]


@contextlib.contextmanager
def shown(recipe: Recipe) -> Iterator[None]:
    """Shows a recipe's runs in Trackio's dashboard meanwhile; whatever fails there, the training goes on."""
    project = str(recipe.logging.extras.get("project") or recipe.name)
    with contextlib.ExitStack() as opened:
        try:
            with progress("starting Trackio's dashboard"):
                said = opened.enter_context(dashboard(project))
        except OSError as error:
            said = f"Trackio's dashboard cannot be started ({error.strerror}); training goes on"
        stderr().print(said, markup=False, soft_wrap=True)
        yield
