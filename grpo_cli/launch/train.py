"""Train a prepared run: probe it while the workers load their libraries, supervise it, write it up."""

import contextlib
import importlib.util
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import ExitCode, GrpoError, RunError
from grpo_cli.launch.prepare import PreparedRun
from grpo_cli.launch.resume import begin_attempt
from grpo_cli.launch.supervisor import Outcome, QuickProbe, RefusedError, start_probe, supervise
from grpo_cli.recipe.episode import EpisodeConfig
from grpo_cli.reporter import Reporter
from grpo_cli.runs.checkpoints import restore
from grpo_cli.runs.folder import RunFolder, State, Status, StatusFile
from grpo_cli.runs.trackers import read_trackers

if TYPE_CHECKING:
    from grpo_cli.report.live import ProgressView


def train(prepared: PreparedRun, reporter: Reporter, *, probe: bool) -> int:
    """Launch a prepared run, follow it until it ends, and return the exit code.

    Args:
        prepared: The run.
        reporter: Told what happens.
        probe: Whether `grpo probe --quick` runs first; the workers load their libraries meanwhile.

    Raises:
        RefusedError: The probe found errors. The run folder has been removed.
        UsageError: Another command works in the run folder, or it cannot be written.
    """
    folder = prepared.folder
    if prepared.finished:
        return ExitCode.OK
    try:
        with folder.lock():
            before = StatusFile(folder.status).read().state
            if prepared.resumption or prepared.anew:
                recipe, plan, origin = prepared.recipe, prepared.plan, prepared.origin
                begin_attempt(folder, prepared.resumption, recipe, plan, origin)
            outcome = _supervise(prepared, reporter, probe=probe)
            if outcome.status.state in ("failed", "stopped"):
                _restore_unless_trained(prepared, before, outcome.status, reporter)
            finish(folder, reporter)
    except RefusedError:
        shutil.rmtree(folder.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.path.parent.rmdir()
            folder.path.parent.parent.rmdir()
        raise
    return _exit_code(outcome)


def _restore_unless_trained(
    prepared: PreparedRun, before: State, ended: Status, reporter: Reporter
) -> None:
    """Take a run back to before a resume that did no step; raise `RunError` if a completed run's failed."""
    folder, resumption = prepared.folder, prepared.resumption
    if resumption is None or ended.step > resumption.step:
        return
    restore(folder)
    if before != "completed":
        fields = {"state", "reason", "fix", "traceback"}
        StatusFile(folder.status).update(**ended.model_dump(include=fields))
        return
    text = (
        f"{ended.reason}. The run is as it was, completed; the log of this attempt is {folder.log}"
    )
    if ended.state == "failed":
        raise RunError(text, ended.fix)
    reporter.say(text, "warning")


def _exit_code(outcome: Outcome) -> int:
    if outcome.status.state == "completed":
        return ExitCode.OK
    if outcome.status.state == "failed" or outcome.status.stopped_by:
        return ExitCode.FAILED
    return 128 + (outcome.signal or signal.SIGINT)


def _supervise(prepared: PreparedRun, reporter: Reporter, *, probe: bool) -> Outcome:
    # Of an attempt that was killed.
    prepared.folder.probing.unlink(missing_ok=True)
    with contextlib.ExitStack() as opened:
        quick = opened.enter_context(start_probe(prepared)) if probe else None
        display = opened.enter_context(contextlib.closing(_Display(prepared, reporter, quick)))
        outcome = supervise(
            prepared.plan,
            prepared.folder,
            on_tick=display.refresh,
            on_stopping=display.stopping,
            on_notice=display.tell,
            cancelled=quick.find_refusal if quick else lambda: None,
        )
    if quick and quick.refusal:
        raise quick.refusal
    return outcome


def _describe_wait(episode: EpisodeConfig) -> str:
    """Return how long a step waits for tools and environments that hang."""
    return (
        "this step still waits for running calls of tools and environments, "
        f"{episode.tool_timeout_s:g} s at most for each (`episode.tool_timeout_s`): {episode.parallel} at a time, "
        f"in each turn, of which there are at most {episode.max_turns}"
    )


class _Display:
    """Shows the probe, then the training. If the display fails, the training continues."""

    def __init__(self, prepared: PreparedRun, reporter: Reporter, probe: QuickProbe | None) -> None:
        self._prepared = prepared
        self._reporter = reporter
        self._probe = probe
        self._view: ProgressView | None = None
        self._spinner = contextlib.ExitStack()
        if probe:
            what = "probing the recipe while libraries load (--no-probe skips it)"
            self._spinner.enter_context(reporter.progress(what))

    def refresh(self) -> None:
        """Show what is new, a few times a second."""
        if self._view is None and (self._probe is None or self._probe.warnings is not None):
            self._begin()
        if self._view is not None:
            self._attempt(self._view.refresh)

    def _begin(self) -> None:
        self._spinner.close()
        if self._probe and self._probe.warnings is not None:
            self._reporter.probed(self._probe.warnings)
        resumed = self._prepared.resumption is not None or self._prepared.anew
        self._view = self._reporter.view(self._prepared.folder, from_now=resumed)

    def stopping(self) -> None:
        """Report that a stop was requested."""
        if self._view is not None:
            self._attempt(self._view.stopping)
            if self._prepared.recipe.has_episodes:
                self.tell(_describe_wait(self._prepared.recipe.episode))

    def tell(self, text: str) -> None:
        """Report what a person should know now."""
        if self._view is not None:
            self._attempt(self._view.tell, text)
        else:
            self._reporter.say(text)

    def close(self) -> None:
        """End the display."""
        self._spinner.close()
        if self._view is not None:
            self._attempt(self._view.close)

    def _attempt(self, show: Callable[..., None], *values: Any) -> None:
        try:
            show(*values)
        except OSError:
            # The terminal has been closed.
            pass
        except Exception as error:
            self._view = Reporter().view(self._prepared.folder, from_now=True)
            self._reporter.say(f"the display failed ({error!r}) and is off; training continues")


def finish(folder: RunFolder, reporter: Reporter) -> None:
    """Write the report of a run that has ended, and say which trackers failed.

    Nothing here fails a run.
    """
    try:
        write_page(folder, reporter)
    except KeyboardInterrupt:
        reporter.say("interrupted: report skipped", "warning")
    except Exception as error:
        # Whatever it is, the training is done, and its summary must be shown.
        text = str(error) if isinstance(error, GrpoError) else repr(error)
        reporter.say(f"the report cannot be written: {text}", "warning")
    for tracker, why in read_trackers(folder, "failures").items():
        reporter.say(f"{tracker}: {why}", "warning")


def write_page(folder: RunFolder, reporter: Reporter) -> Path | None:
    """Write the report of a run; None if plotly is missing or there is nothing to draw."""
    if importlib.util.find_spec("plotly") is None or not folder.metrics.is_file():
        return None
    from grpo_cli.report.page import write_report

    with reporter.progress("writing the report"):
        return write_report([folder.path], None)
