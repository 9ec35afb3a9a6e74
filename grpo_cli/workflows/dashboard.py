"""`grpo train --dashboard`: Trackio added to a run's trackers, and its dashboard beside the training."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

from grpo_cli.errors import GrpoError, SetupError, UsageError
from grpo_cli.machine import pick_free_port
from grpo_cli.processes import child
from grpo_cli.recipe.loading import load_tree
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.trackers import ALL, install_command, is_installed
from grpo_cli.workflows.reporter import Reporter

_SHOW = """\
import sys, trackio
project, opens = sys.argv[1:]
trackio.show(project=project, open_browser=bool(opens), host="127.0.0.1", share=False)
"""
_GRACE_S = 5.0


def add_trackio(path: Path, overrides: list[str] | None, *, starts: bool) -> list[str]:
    """Return the `--set` texts with which a run reports to Trackio too.

    Args:
        path: The recipe.
        overrides: `--set` texts as given.
        starts: Whether a training is started here; only then is there a dashboard.

    Raises:
        UsageError: No training is started here.
        SetupError: Trackio is not installed.
    """
    if not starts:
        raise UsageError(
            "--dashboard needs a training that runs here, and --dry-run and --slurm start none. Fix: "
            "remove it, or put `report_to: [trackio]` into the recipe and use `trackio show`"
        )
    if not is_installed("trackio"):
        raise SetupError(f"trackio is not installed. Fix: {install_command('trackio')}")
    texts = list(overrides or [])
    try:
        recipe = load_tree(path, overrides).recipe
    except GrpoError:
        # The check reports what is wrong with the recipe.
        return texts
    named = recipe.logging.report_to if recipe else ()
    if {"trackio", ALL} & set(named):
        return texts
    return [*texts, f"logging.report_to=[{', '.join([*named, 'trackio'])}]"]


@contextlib.contextmanager
def shown(recipe: Recipe, reporter: Reporter) -> Iterator[None]:
    """Serve Trackio's dashboard of a recipe's runs on this machine. If it fails, the training continues."""
    project = str(recipe.logging.extras.get("project") or recipe.name)
    port = pick_free_port()
    variables = {"GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
    with contextlib.ExitStack() as opened:
        try:
            opened.enter_context(
                child(
                    [sys.executable, "-P", "-c", _SHOW, project, "1" if _has_display() else ""],
                    grace_s=_GRACE_S,
                    env={**os.environ, **variables},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # Ctrl-C asks the training to stop; the dashboard stays until it has.
                    start_new_session=True,
                )
            )
        except OSError as error:
            reporter.say(
                f"Trackio's dashboard cannot be started ({error.strerror}); training continues"
            )
        else:
            # Without the token that allows writing.
            address = f"http://127.0.0.1:{port}/?{urlencode({'project': project})}"
            later = f"trackio show --project {shlex.quote(project)}"
            reporter.say(f"dashboard: {address}, up in a few seconds; afterwards: {later}")
        yield


def _has_display() -> bool:
    if os.environ.get("SSH_CONNECTION"):
        return False
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(display) or sys.platform == "darwin"
