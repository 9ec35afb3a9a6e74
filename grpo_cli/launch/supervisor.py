"""Starts the processes of a run, the quick probe and the workers; watches them, and settles the final status."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from grpo_cli.errors import ExitCode, GrpoError, RunError, UsageError
from grpo_cli.issues import Issue
from grpo_cli.launch.plan import LaunchPlan
from grpo_cli.launch.prepare import PreparedRun
from grpo_cli.launch.server_process import watched
from grpo_cli.processes import child, run_module
from grpo_cli.runs.files import read_file
from grpo_cli.runs.folder import FINAL, BeatWatch, RunFolder, Status, StatusFile, live_workers
from grpo_cli.runs.records import Failure
from grpo_cli.units import format_duration

TICK_S = 0.2
_STACKS_S = 2.0
"""Seconds that workers get to write their stack traces."""
_REASON_LENGTH = 200
_LOST_CONNECTION = re.compile(r"Connection|connection|Read error|gloo|NCCL")
"""What a process reports whose peer has died."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Status
    signal: int | None
    """The signal that asked it to stop, if one did."""


class RefusedError(GrpoError):
    """The quick probe found that a training would fail or learn nothing; nothing was trained."""

    def __init__(self, exit_code: int, issues: tuple[Issue, ...], output: str = "") -> None:
        self.exit_code = ExitCode(exit_code)
        self.issues = issues
        self.output = output
        """What the probe printed, if it ended without a result."""
        super().__init__(output or "\n".join(map(str, issues)))


@dataclass
class QuickProbe:
    """`grpo probe --quick` in a child process. Workers wait until it has passed."""

    _process: "subprocess.Popen[bytes]"
    _output: IO[str]
    _error_log: IO[str]
    _prepared: PreparedRun
    warnings: tuple[Issue, ...] | None = None
    """Set once it has ended without errors."""
    refusal: RefusedError | None = None

    def find_refusal(self) -> RefusedError | None:
        """Return the errors that were found, if there are any; release the workers once it has passed."""
        if self.warnings is not None or self._process.poll() is None:
            return None
        self.refusal = self._read()
        if self.refusal is None:
            self._prepared.folder.probing.unlink(missing_ok=True)
        return self.refusal

    def _read(self) -> RefusedError | None:
        code = self._process.returncode
        self._output.seek(0)
        try:
            result = json.load(self._output)
        except ValueError:
            self._error_log.seek(0)
            output = (
                self._error_log.read() or f"the probe ended without a result (exit code {code})"
            )
            return RefusedError(
                code if code in set(ExitCode) and code else ExitCode.FAILED, (), output
            )
        issues = tuple(self._prepared.place(Issue.from_json(entry)) for entry in result["issues"])
        if result["exit_code"] is not None:
            return RefusedError(result["exit_code"], issues)
        if any(issue.level == "error" for issue in issues):
            return RefusedError(ExitCode.FAILED, issues)
        self.warnings = tuple(issue for issue in issues if issue.level == "warning")
        return None


@contextlib.contextmanager
def start_probe(prepared: PreparedRun) -> Iterator[QuickProbe]:
    """Start the quick probe of a run, and keep its workers waiting until it has passed."""
    folder = prepared.folder
    folder.probing.touch()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error_log:
        try:
            with child(
                [
                    *run_module("grpo_cli.probing.procedure"),
                    str(folder.path),
                    prepared.origin["recipe"],
                ],
                env=prepared.plan.add_environment(os.environ),
                stdout=output,
                stderr=error_log,
            ) as process:
                yield QuickProbe(process, output, error_log, prepared)
        finally:
            folder.probing.unlink(missing_ok=True)


class _Signals:
    def __init__(self) -> None:
        self.count = 0
        self.last: int | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = number

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        # Closing the terminal is a request to stop too, except under `nohup`.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self.receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def supervise(
    plan: LaunchPlan,
    folder: RunFolder,
    on_tick: Callable[[], None],
    on_stopping: Callable[[], None],
    on_notice: Callable[[str], None],
    cancelled: Callable[[], GrpoError | None] = lambda: None,
) -> Outcome:
    """Run a plan to its end; no worker outlives this call.

    The first SIGINT, SIGTERM or SIGHUP asks the workers to finish their step, save and stop; the second kills
    them.

    Args:
        on_tick: Called a few times a second, and once at the end.
        on_notice: Told what the user should know of the vLLM server.
        cancelled: Called a few times a second; an error it returns ends the run.

    Raises:
        RunError: The run folder was removed.
    """
    signals = _Signals()
    error: GrpoError | None = None
    beats = BeatWatch(folder)
    with (
        signals.installed(),
        folder.log.open("ab") as output,
        (
            watched(plan.server, folder.server_log, on_notice, lambda: signals.count > 1)
            if plan.server
            else contextlib.nullcontext()
        ) as server,
        child(
            plan.argv,
            env=plan.add_environment(os.environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal reaches this process only.
            start_new_session=True,
        ) as process,
    ):
        try:
            for _ in _ticks(process, signals, folder, on_stopping):
                error = _find_stall(beats, plan, folder) or cancelled()
                error = error or (server.look() if server else None)
                if error is not None:
                    break
                on_tick()
                time.sleep(TICK_S)
        finally:
            # However the loop ended, nothing stays behind and the status is final.
            _kill_all(process, folder)
            status = _settle(plan, folder, process.returncode, signals, error)
    on_tick()
    return Outcome(status, signals.last)


def _ticks(
    process: "subprocess.Popen[bytes]",
    signals: _Signals,
    folder: RunFolder,
    on_stopping: Callable[[], None],
) -> Iterator[None]:
    """Iterate until the process has ended or a second signal arrives; pass the first one on."""
    handled = 0
    while process.poll() is None:
        if signals.count > handled:
            handled = signals.count
            if handled > 1:
                return
            with contextlib.suppress(OSError):
                folder.stop_request.touch()
            on_stopping()
        yield


def _find_stall(beats: BeatWatch, plan: LaunchPlan, folder: RunFolder) -> RunError | None:
    """Return why the run counts as stalled; its workers have then written their stack traces."""
    silent_s = beats.look()
    if plan.stall_timeout_s is None or silent_s <= plan.stall_timeout_s:
        return None
    for pid in live_workers(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)
    phase = StatusFile(folder.status).read().phase
    seen = (
        f"no progress for {format_duration(plan.stall_timeout_s)} while {phase}. The stacks of all workers are at "
        f"the end of {folder.log}"
    )
    return RunError(seen, "mend what hangs there, or wait longer with `launch.stall_timeout_s`")


def _kill_all(process: "subprocess.Popen[bytes]", folder: RunFolder) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in live_workers(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _settle(
    plan: LaunchPlan,
    folder: RunFolder,
    returncode: int,
    signals: _Signals,
    error: GrpoError | None,
) -> Status:
    """Return the final status: what the workers wrote, or else what their end implies."""
    if not folder.path.is_dir():
        raise RunError(f"the run folder {folder.path} was removed", "start the run again")
    file = StatusFile(folder.status)
    status = file.read()
    failure = _first_failure(folder)
    # In a run that was asked to stop, one process may interrupt the others' communication.
    if failure and status.state not in ("completed", "stopped"):
        why = {name: failure[name] for name in ("reason", "fix", "traceback")}
        return file.update(state="failed", **why)
    if status.state in FINAL:
        return status
    if error:
        lines = "\n".join(error.details) or None
        return file.update(state="failed", reason=error.seen, fix=error.fix, traceback=lines)
    if signals.count > 1:
        lost = f"ended at once after step {status.step}; steps since the last checkpoint are lost"
        return file.update(state="stopped", reason=lost)
    if returncode == 0 and plan.machine_rank > 0:
        # The main process is on machine 0; this machine has done its part.
        return file.update(state="completed", phase="done")
    log = folder.log.read_text(errors="replace").splitlines()
    return file.update(
        state="failed", reason=_explain_exit(returncode), traceback="\n".join(log[-30:])
    )


def _first_failure(folder: RunFolder) -> dict[str, Any] | None:
    """Return what the process that failed first recorded: the others only see a lost connection."""
    written, failures = folder.failures(), []
    for path in written.values():
        # A damaged one says nothing; the log has the traceback.
        with contextlib.suppress(UsageError):
            failures.append(read_file(path, Failure))
    if not failures:
        return None
    first: dict[str, Any] = min(failures, key=lambda failure: failure["time"])
    silent = sorted(folder.worker_pids().keys() - written.keys())
    if silent and _LOST_CONNECTION.search(first["reason"]):
        reason = first["reason"].partition("\n")[0][:_REASON_LENGTH]
        first["reason"] = (
            f"process {', '.join(map(str, silent))} exited without reporting an error (killed, or by "
            f"os._exit); process {first['rank']} then lost the connection: {reason}"
        )
        # The stack of the process that lost the connection is not the cause.
        first |= {"fix": "", "traceback": None}
    return first


def _explain_exit(returncode: int) -> str:
    if returncode == -signal.SIGKILL:
        return "the worker was killed (signal 9), most often because memory ran out"
    if returncode < 0:
        return f"the worker ended with signal {-returncode} ({signal.Signals(-returncode).name})"
    if returncode == 0:
        return "the worker ended before the run was finished, without an error"
    return f"the worker ended with exit code {returncode} without reporting an error"
