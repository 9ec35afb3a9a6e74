"""Run a sweep: every cell with every seed as an ordinary `grpo train`, side by side as devices allow."""

import contextlib
import importlib.util
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_cli.checks.recipe import CheckedRecipe, check_recipe
from grpo_cli.errors import ExitCode, GrpoError, UsageError
from grpo_cli.machine import read_hardware
from grpo_cli.processes import child, run_module
from grpo_cli.report.summary import RunReport
from grpo_cli.reporter import Reporter
from grpo_cli.runs.files import SCHEMA_VERSION, lock_folder
from grpo_cli.runs.folder import RunFolder, live_workers
from grpo_cli.runs.selection import read_status
from grpo_cli.sweep.comparison import TRAINING, CellsComparison, compare_cells
from grpo_cli.sweep.page import write_sweep_page
from grpo_cli.sweep.plan import (
    Cell,
    CellRun,
    Sweep,
    SweepRequest,
    as_flags,
    check_points,
    check_unchanged,
    create_sweep,
    plan_slots,
)
from grpo_cli.units import count_noun, format_duration

_TICK_S = 0.5
_LAST_BYTES = 4000
_RESUMED = ("waiting", "running", "skipped", "stopped", "interrupted", "failed")
"""States of runs that a resumed sweep continues; one that a rule has stopped is a result."""


@dataclass(frozen=True)
class SweepResult:
    """A sweep, and what its finished runs came to."""

    sweep: Sweep
    comparison: CellsComparison
    sampling: str = ""
    """How held-out prompts were answered; empty if none was."""
    page: Path | None = None

    @property
    def exit_code(self) -> ExitCode:
        """A failed run is a result; a sweep fails if nothing was finished, and nothing will be."""
        return ExitCode.OK if self.comparison.cells or self.is_under_way else ExitCode.FAILED

    @property
    def is_under_way(self) -> bool:
        """True if runs are waiting or running, as those of a job array."""
        return any(run.state in ("waiting", "running") for _, run in self.sweep.in_order())

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values, for `--json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "grpo-sweep",
            "sweep": str(self.sweep.folder),
            "job": self.sweep.job,
            "recipe": self.sweep.request.recipe,
            "command": self.sweep.request.command,
            "page": str(self.page) if self.page else None,
            "metric": self.comparison.metric or None,
            "sampling": self.sampling or None,
            "best": self.comparison.best,
            "cells": [self._cell_json(cell) for cell in self.sweep.cells],
        }

    def _cell_json(self, cell: Cell) -> dict[str, Any]:
        result = self.comparison.cells.get(cell.number)
        plain = asdict(result) if result else {}
        numbers = "before warmup mean collapsed failures difference seeds_needed verdict".split()
        return {
            "cell": cell.number,
            "label": cell.label,
            "settings": cell.settings,
            "runs": [
                {
                    "seed": run.seed,
                    "run": str(self.sweep.run_folder(run).path),
                    "state": run.state,
                    "reason": run.reason,
                    "value": result.seeds.get(run.seed) if result else None,
                }
                for run in cell.runs
            ],
            **{name: plain.get(name) for name in numbers},
            "fault": result.fault if result else "",
        }


def check_sweep(
    request: SweepRequest, parallel: int | None
) -> tuple[CheckedRecipe, list[dict[str, str]]]:
    """Check every value before the first run; return the first cell, and the variables of runs side by side."""
    points, hardware = request.points(), read_hardware()
    seen, slots = plan_slots(request, points[0], hardware, parallel)
    return check_points(request, points, partial(check_recipe, hardware=seen)), slots


def prepare_sweep(
    request: SweepRequest,
    root: Path,
    parallel: int | None,
    reporter: Reporter,
    old: Sweep | None = None,
) -> tuple[Sweep, list[dict[str, str]]]:
    """Check a sweep, and make its folder or go on with an old one; return the variables of each slot, too."""
    checked, slots = check_sweep(request, parallel)
    reporter.issues(checked.problems)
    if old is None:
        return create_sweep(root, request, checked.recipe), slots
    check_unchanged(old, checked.recipe)
    for run in list_unfinished(old):
        run.state, run.reason = "waiting", None
    return old, slots


def list_unfinished(sweep: Sweep) -> list[CellRun]:
    """Return the runs that a resumed sweep continues; one that a rule has stopped is a result."""
    runs = [run for cell in sweep.cells for run in cell.runs]
    statuses = [read_status(sweep.run_folder(run)) for run in runs]
    return [
        run
        for run, status in zip(runs, statuses, strict=True)
        if run.state in _RESUMED and not (status and status.stopped_by)
    ]


def run_sweep(sweep: Sweep, slots: list[dict[str, str]], reporter: Reporter) -> SweepResult:
    """Run what is left of a sweep, and compare its cells.

    The first Ctrl-C or SIGTERM asks the trainings to finish their step and save, and is then raised; a second one
    ends them at once.
    """
    with lock_folder(sweep.folder, "running the sweep"):
        _Runner(sweep, slots, reporter).run()
        return finish_sweep(sweep, reporter)


def finish_sweep(sweep: Sweep, reporter: Reporter) -> SweepResult:
    """Compare the cells, and write the page if plotly is installed."""
    result = read_result(sweep)
    if importlib.util.find_spec("plotly") is None:
        return result
    with reporter.progress("writing the page"):
        page = write_sweep_page(sweep.folder / "sweep.html", result.as_json(), _read_reports(sweep))
    return replace(result, page=page)


def read_result(sweep: Sweep) -> SweepResult:
    """Compare the cells by the runs that are finished."""
    runs = {
        cell.number: {
            run.seed: RunReport(sweep.run_folder(run))
            for run in cell.runs
            if run.state == "completed"
        }
        for cell in sweep.cells
    }
    labels = {cell.number: cell.label for cell in sweep.cells}
    compared = compare_cells(runs, labels)
    sampling = next((run.sampling for each in runs.values() for run in each.values()), "")
    return SweepResult(sweep, compared, "" if compared.metric == TRAINING else sampling)


def _read_reports(sweep: Sweep) -> dict[int, list[RunReport]]:
    """Return the runs of each cell, finished or not, but for those that nothing was logged of."""
    reports = {
        cell.number: [RunReport(sweep.run_folder(run)) for run in cell.runs] for cell in sweep.cells
    }
    return {cell: [each for each in runs if each.metrics.steps] for cell, runs in reports.items()}


@dataclass
class _Active:
    cell: Cell
    run: CellRun
    process: "subprocess.Popen[Any]"
    slot: dict[str, str]
    report: RunReport
    log: Path
    log_start: int
    began: float


class _Runner:
    """Starts the runs of a sweep as slots become free, and notes how each ends."""

    def __init__(self, sweep: Sweep, slots: list[dict[str, str]], reporter: Reporter) -> None:
        self._sweep = sweep
        self._free = list(slots)
        self._slots = len(slots)
        self._reporter = reporter
        self._active: list[_Active] = []
        self._seconds: list[float] = []

    def run(self) -> None:
        """Run all that waits; what is started ends with this call."""
        with contextlib.ExitStack() as processes, self._reporter.progress("starting") as tell:
            try:
                while self._start_next(processes) or self._active:
                    time.sleep(_TICK_S)
                    self._look(tell)
            except BaseException:
                self._stop()
                raise

    def _waiting(self) -> list[tuple[Cell, CellRun]]:
        return [(cell, run) for cell, run in self._sweep.in_order() if run.state == "waiting"]

    def _start_next(self, processes: contextlib.ExitStack) -> bool:
        """Start runs while there are free slots; return whether any is left to start."""
        for cell, run in self._waiting():
            # What is left of a killed sweep may still be saving.
            if self._free and not _is_busy(self._sweep.run_folder(run)):
                self._start(cell, run, processes)
        return bool(self._waiting())

    def _start(self, cell: Cell, run: CellRun, processes: contextlib.ExitStack) -> None:
        folder, slot = self._sweep.run_folder(run), self._free.pop(0)
        log = self._sweep.logs / f"{run.run_id}.log"
        run.state = "running"
        self._sweep.save()
        with log.open("ab") as output:
            start = output.tell()
            process = processes.enter_context(
                child(
                    self._command(cell, run, resumes=folder.resolved.is_file()),
                    # A run that is asked to stop finishes its step and saves; a second request ends it.
                    grace_s=None,
                    cwd=self._sweep.request.cwd,
                    env={**os.environ, **slot},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        report = RunReport(folder)
        self._active.append(_Active(cell, run, process, slot, report, log, start, time.monotonic()))
        self._reporter.say(
            f"run {self._number(cell, run)}: {cell.label}, seed {run.seed} ({folder.path})"
        )

    def _command(self, cell: Cell, run: CellRun, *, resumes: bool) -> list[str]:
        request = self._sweep.request
        flags = as_flags(request, cell.settings, run.seed)
        sets = [word for text in flags for word in ("--set", text)]
        probed = request.probe and run is cell.runs[0]
        root = self._sweep.folder.parent.parent.parent
        more = ["--resume"] if resumes else [] if probed else ["--no-probe"]
        train = ["train", request.recipe, "--runs", str(root), "--run-id", run.run_id, "--quiet"]
        return [*run_module("grpo_cli"), *train, *more, *sets]

    def _number(self, cell: Cell, run: CellRun) -> str:
        runs = self._sweep.in_order()
        return f"{runs.index((cell, run)) + 1} of {len(runs)}"

    def _look(self, tell: Callable[[str], None]) -> None:
        for active in list(self._active):
            if active.process.poll() is not None:
                self._finish(active)
        if self._active:
            tell(self._say_progress())

    def _say_progress(self) -> str:
        parts = []
        for each in self._active:
            with contextlib.suppress(GrpoError, OSError):
                each.report.refresh()
            status = each.report.status
            steps = f"step {status.progress}" if status.total_steps else status.phase
            which = f"{each.cell.label}, seed {each.run.seed}"
            parts.append(f"run {self._number(each.cell, each.run)} ({which}): {steps}")
        # While nothing trains, the time left would repeat the line.
        is_training = any(each.report.status.total_steps for each in self._active)
        return f"{'; '.join(parts)}{self._say_left() if is_training else ''}"

    def _say_left(self) -> str:
        """Return the time left by the runs that are finished; empty before the first."""
        if not self._seconds:
            return ""
        mean, now = fmean(self._seconds), time.monotonic()
        begun = sum(max(mean - (now - each.began), 0.0) for each in self._active)
        left_s = (len(self._waiting()) * mean + begun) / self._slots
        return f"; about {format_duration(left_s)} left"

    def _finish(self, active: _Active) -> None:
        """Note how a run has ended, and free its slot."""
        self._active.remove(active)
        self._free.append(active.slot)
        run, took = active.run, time.monotonic() - active.began
        run.state, run.reason = _read_end(active)
        if run.state == "completed":
            self._seconds.append(took)
            # As `grpo runs list` shows it, without the check and the probe.
            took = status.seconds if (status := read_status(active.report.folder)) else took
        if run.state == "failed" and not active.report.folder.resolved.is_file():
            # What a check or the probe has refused, it refuses with every seed.
            for each in active.cell.runs:
                each.state = "skipped" if each.state == "waiting" else each.state
        self._sweep.save()
        reason = f" ({run.reason})" if run.reason else ""
        more = self._say_left() if self._waiting() else ""
        text = f"run {self._number(active.cell, run)}: {run.state} in {format_duration(took)}{reason}{more}"
        self._reporter.say(text, "ok" if run.state == "completed" else "warning")

    def _stop(self) -> None:
        if not self._active:
            return
        self._reporter.say(
            f"stopping {count_noun(len(self._active), 'run')} after the current step; again to end at once",
            "warning",
        )
        for each in self._active:
            each.process.terminate()
        for each in self._active:
            each.process.wait()
            each.run.state, each.run.reason = _read_end(each)
        self._sweep.save()


def _is_busy(folder: RunFolder) -> bool:
    """Return whether another command, or a worker that outlives it, still works in a run folder."""
    if not folder.resolved.is_file():
        return False
    try:
        with folder.lock():
            return bool(live_workers(folder))
    except UsageError:
        return True


def _read_end(active: _Active) -> tuple[str, str | None]:
    """Return the state of a run that has ended, and why it is not completed."""
    folder, code = active.report.folder, active.process.returncode
    status = read_status(folder)
    if (
        code in (ExitCode.USAGE, ExitCode.ENVIRONMENT)
        or status is None
        or not folder.resolved.is_file()
    ):
        return "failed", _last_words(active)
    if status.state == "completed":
        return "completed", None
    if status.stopped_by:
        return "stopped", status.reason_line
    if status.state in ("stopped", "failed"):
        return status.state, status.reason_line or _last_words(active)
    return "interrupted", f"its command ended with exit code {code}"


def _last_words(active: _Active) -> str:
    """Return the errors that a command printed, or its last line."""
    with active.log.open("rb") as file:
        file.seek(active.log_start)
        lines = file.read()[-_LAST_BYTES:].decode(errors="replace").split("\n")
    printed = [line.strip() for line in lines if line.strip()]
    errors = [line for line in printed if line.startswith(("error:", "✗"))]
    return "; ".join(errors) or (
        printed[-1] if printed else f"exit code {active.process.returncode}"
    )
