"""`grpo train` from recipe to summary: probe, launch, watch. `preparing.py` makes the run folder in between."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from grpo_cli.checks.recipe_checks import check_recipe
from grpo_cli.cli.dashboard import shown
from grpo_cli.cli.finishing import finish
from grpo_cli.cli.output import progress, stderr
from grpo_cli.cli.preparing import PreparedRun
from grpo_cli.cli.probe_view import print_findings
from grpo_cli.cli.views import count_noun
from grpo_cli.errors import ExitCode
from grpo_cli.issues import Finding
from grpo_cli.launch.resume import begin_anew, begin_attempt
from grpo_cli.launch.supervisor import Outcome, supervise
from grpo_cli.processes import run_module, start_child
from grpo_cli.report.live.following import Follower
from grpo_cli.report.live.progress import ProgressView, SilentView, choose_view
from grpo_cli.report.summary import RunSummary, read_summary
from grpo_cli.runs.folder import check_writable
from grpo_cli.units import format_duration


def probe_first(path: Path, overrides: list[str] | None, root: Path, *, quiet: bool) -> None:
    """Runs the cheap part of the probe, prints what it found, with `quiet` errors alone, and stops at an error.

    In a process of its own: what rewards and libraries load there must not stay beside the training.

    Raises:
        typer.Exit: A training would fail or learn nothing, or the recipe cannot be used.
    """
    # What only `check` can find is said at once, not after seconds of imports.
    _ = check_recipe(path, overrides).recipe
    check_writable(root)
    flags = [part for text in overrides or [] for part in ("--set", text)]
    command = [*run_module("grpo_cli"), "probe", str(path), *flags]
    started = time.monotonic()
    with progress("probing the recipe (--no-probe leaves it out)"):
        code, told, said = _run_apart([*command, "--quick", "--json", "--runs", str(root)])
    found = _read_findings(told)
    if found is None or code not in (ExitCode.OK, ExitCode.FAILED):
        sys.stderr.write(said)
        if code in (ExitCode.OK, ExitCode.FAILED) or not said:
            stderr().print(f"the probe ended without a result (exit code {code})", style="red")
        raise typer.Exit(code or ExitCode.FAILED)
    shown = {"error"} if quiet else {"error", "warning"}
    print_findings(stderr(), [each for each in found if each.level in shown])
    warnings = sum(each.level == "warning" for each in found)
    if code:
        stderr().print("nothing was started; --no-probe trains all the same", style="red")
        raise typer.Exit(ExitCode.FAILED)
    if quiet:
        return
    took = format_duration(time.monotonic() - started)
    others = f", {count_noun(warnings, 'warning')}" if warnings else " found"
    stderr().print(f"probed in {took}: no error{others}", style="dim")


def _run_apart(command: list[str]) -> tuple[int, str, str]:
    """Runs a command to its end: exit code, stdout, stderr. It ends with this process."""
    pipe = subprocess.PIPE
    with start_child(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            told, said = process.communicate()
        except BaseException:
            process.kill()
            raise
    return process.returncode, told, said


def _read_findings(text: str) -> list[Finding] | None:
    """What a probe found; None where it did not come to its end."""
    try:
        return [Finding.from_json(entry) for entry in json.loads(text)["findings"]]
    except (ValueError, KeyError):
        return None


def run(prepared: PreparedRun, *, quiet: bool, dashboard: bool = False) -> tuple[RunSummary, int]:
    """Launches a prepared run and shows it until it ends; gives its summary and the exit code.

    Args:
        prepared: The run.
        quiet: Whether nothing is shown meanwhile.
        dashboard: Whether Trackio's dashboard is served meanwhile.

    Raises:
        UsageError: Another command works in the run folder, or it cannot be written.
    """
    folder = prepared.folder
    if prepared.finished:
        return read_summary(folder), ExitCode.OK
    with folder.lock():
        if prepared.resumption:
            begin_attempt(prepared.resumption, prepared.recipe, prepared.plan, prepared.origin)
        if prepared.anew:
            begin_anew(folder, prepared.recipe, prepared.plan, prepared.origin)
        with shown(prepared.recipe) if dashboard else contextlib.nullcontext():
            outcome = _watch(prepared, quiet=quiet)
            finish(folder)
    return read_summary(folder), _exit_code(outcome)


def _watch(prepared: PreparedRun, *, quiet: bool) -> Outcome:
    folder = prepared.folder
    view = _choose_view(prepared, quiet=quiet)
    failures: list[Exception] = []

    def refresh() -> None:
        # A display that breaks is said once and left out: the training goes on.
        if not failures:
            try:
                view.refresh()
            except Exception as error:
                failures.append(error)
                say(f"the display failed and is off ({error!r}); training goes on")

    def say(text: str) -> None:
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            stderr().print(text, markup=False)

    def reaped(show: Callable[..., None]) -> Callable[..., None]:
        def shown(*args: Any) -> None:
            with contextlib.suppress(OSError):
                show(*args)

        return shown

    try:
        return supervise(prepared.plan, folder, refresh, reaped(view.stopping), reaped(view.tell))
    finally:
        reaped(view.close)()


def _choose_view(prepared: PreparedRun, *, quiet: bool) -> ProgressView:
    console, folder = stderr(), prepared.folder
    if quiet:
        return SilentView()
    console.print(f"run folder: {folder.path}", markup=False)
    return choose_view(Follower(folder, from_now=prepared.resumption is not None), console)


def _exit_code(outcome: Outcome) -> int:
    if outcome.status.state == "completed":
        return ExitCode.OK
    if outcome.status.state == "failed" or outcome.status.stopped_by:
        return ExitCode.FAILED
    return 128 + (outcome.signal or signal.SIGINT)
