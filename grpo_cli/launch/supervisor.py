"""Starts a planned launch, watches it, passes signals on, and says how it ended.

Owns the worker processes: none outlives this one. Does not read metrics or draw anything: it calls
`on_tick` a few times a second.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from grpo_cli.errors import RunError
from grpo_cli.launch.plan import LaunchPlan
from grpo_cli.launch.server_watch import watched
from grpo_cli.processes import start_child
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.heartbeat import BeatWatch
from grpo_cli.runs.liveness import live_workers
from grpo_cli.runs.status import FINAL, Status, StatusFile
from grpo_cli.units import format_duration

TICK_S = 0.2
_STACKS_S = 2.0
"""Seconds that workers get to write down where they stand."""
_LONGEST_ECHO = 200
_HANG_UP = re.compile(r"Connection|connection|Read error|gloo|NCCL")
"""What a process says whose peer has died."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Status
    signal: int | None
    """The signal that asked it to stop, if one did."""


class _Signals:
    """Counts the signals that arrive while a run is watched."""

    def __init__(self) -> None:
        self.count = 0
        self.last: int | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = number

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        # A terminal that is closed asks as well, unless `nohup` has the command ignore that.
        hears = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        numbers = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hears else []))
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
) -> Outcome:
    """Runs a plan to its end.

    The first SIGINT, SIGTERM or SIGHUP asks the workers to finish their step, save and stop; the second
    ends them at once.

    Args:
        plan: What to start.
        folder: The run's folder; logs go to its present attempt.
        on_tick: Called a few times a second, and once at the end.
        on_stopping: Called when a stop has been asked for.
        on_notice: Told what a person should know of the vLLM server.

    Raises:
        RunError: The run folder has gone.
    """
    signals = _Signals()
    cause = None
    beats = BeatWatch(folder)
    with (
        signals.installed(),
        folder.log.open("ab") as output,
        watched(plan.server, folder.server_log, on_notice, lambda: signals.count > 1) as server,
    ):
        process = _start(plan, output)
        look = server.look if server else lambda: None
        try:
            cause = _watch(process, plan, folder, beats, signals, look, on_tick, on_stopping)
        finally:
            # Whatever broke the watch, nothing stays behind and the status tells the end.
            _end(process, folder)
            status = _settle(plan, folder, process.returncode, signals, cause)
    on_tick()
    return Outcome(status, signals.last)


def _start(plan: LaunchPlan, output: IO[bytes]) -> subprocess.Popen[bytes]:
    # Where this process dies, the launcher gets a SIGTERM, as the workers do: a step, a save, an end.
    return start_child(
        plan.argv,
        env=plan.add_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # A session of its own: Ctrl-C in the terminal reaches this process alone.
        start_new_session=True,
    )


def _watch(
    process: subprocess.Popen[bytes],
    plan: LaunchPlan,
    folder: RunFolder,
    beats: BeatWatch,
    signals: _Signals,
    look_at_server: Callable[[], str | None],
    on_tick: Callable[[], None],
    on_stopping: Callable[[], None],
) -> str | None:
    """Waits for the end; gives the reason where a stall or the server is one."""
    handled = 0
    while process.poll() is None:
        if signals.count > handled:
            handled = signals.count
            if handled > 1:
                return None
            with contextlib.suppress(OSError):
                folder.stop_request.touch()
            on_stopping()
        still_s = beats.look()
        if plan.stall_timeout_s is not None and still_s > plan.stall_timeout_s:
            return _explain_stall(folder, plan.stall_timeout_s)
        if (reason := look_at_server()) is not None:
            return reason
        on_tick()
        time.sleep(TICK_S)
    return None


def _explain_stall(folder: RunFolder, limit_s: float) -> str:
    """Has every worker write down where it stands, and says where to look."""
    for pid in live_workers(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)
    phase = StatusFile(folder.status).read().phase
    return (
        f"no progress for {format_duration(limit_s)} while {phase}. The stacks of all workers are at the "
        f"end of {folder.log}. Fix: what hangs there; `launch.stall_timeout_s` is how long to wait"
    )


def _end(process: subprocess.Popen[bytes], folder: RunFolder) -> None:
    """Makes sure that nothing is left running: the launcher, its session, and every worker."""
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
    cause: str | None,
) -> Status:
    """The final status: the workers' own, or what their end says where they left none."""
    if not folder.path.is_dir():
        raise RunError(f"the run folder {folder.path} has gone. Fix: start the run again")
    file = StatusFile(folder.status)
    status = file.read()
    failure = _first_failure(folder)
    # One that was asked to stop may leave the others in the middle of a word.
    if failure and status.state not in ("completed", "stopped"):
        return file.update(state="failed", reason=failure["reason"], traceback=failure["traceback"])
    if status.state in FINAL:
        return status
    if cause:
        return file.update(state="failed", reason=cause)
    if signals.count > 1:
        lost = f"ended at once after step {status.step}; steps since the last checkpoint are lost"
        return file.update(state="stopped", reason=lost)
    if returncode == 0 and plan.machine_rank > 0:
        # Machine 0 holds the main process; this one has done its part.
        return file.update(state="completed", phase="done")
    return file.update(state="failed", reason=_explain_exit(returncode), traceback=_tail(folder))


def _first_failure(folder: RunFolder) -> dict[str, Any] | None:
    """What the rank that failed first wrote down: the others only see it hang up."""
    written = folder.failures()
    if not written:
        return None
    found = [json.loads(path.read_text()) for path in written.values()]
    first = min(found, key=lambda failure: failure["time"])
    silent = sorted(folder.worker_pids().keys() - written.keys())
    if silent and _HANG_UP.search(first["reason"]):
        who = ", ".join(map(str, silent))
        said = first["reason"].partition("\n")[0][:_LONGEST_ECHO]
        first["reason"] = (
            f"process {who} ended without a word (killed, or by os._exit); "
            f"process {first['rank']} then lost the connection: {said}"
        )
        # Where the others stood then is not the cause.
        first["traceback"] = None
    return first


def _explain_exit(returncode: int) -> str:
    if returncode == -signal.SIGKILL:
        return "the worker was killed (signal 9), most often because memory ran out"
    if returncode < 0:
        return f"the worker ended with signal {-returncode} ({signal.Signals(-returncode).name})"
    if returncode == 0:
        return "the worker ended before the run was finished, without an error"
    return f"the worker ended with exit code {returncode} without saying why"


def _tail(folder: RunFolder, lines: int = 30) -> str:
    return "\n".join(folder.log.read_text(errors="replace").splitlines()[-lines:])
