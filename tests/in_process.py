"""Run `grpo` commands in the test process, which has torch and TRL loaded already.

The command line, the checks, the run folder and the worker are the real ones. What is left out is the process
boundary: `supervise` is replaced by a call of the worker's `main`, and so are the processes of the probe and of
an export's verification. Launches of several processes, and those that sample with vLLM, still start real ones.
"""

import contextlib
import faulthandler
import functools
import gc
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from unittest import mock

from grpo_cli.cli import app
from grpo_cli.exporting import exporting
from grpo_cli.exporting.request import ExportRequest
from grpo_cli.launch import supervisor
from grpo_cli.launch import train as training
from grpo_cli.launch.plan import LaunchPlan
from grpo_cli.launch.prepare import PreparedRun
from grpo_cli.launch.supervisor import Outcome, QuickProbe
from grpo_cli.probing.procedure import probe_run
from grpo_cli.runs.files import finite
from grpo_cli.runs.folder import RunFolder, StatusFile
from grpo_cli.training import session
from tests.forking import ForkedPopen

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(
    arguments: list[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a `grpo` command to its end.

    Args:
        arguments: The command line, without `grpo`.
        folder: The working directory.
        environment: Variables set meanwhile. Those that libraries read when they are imported
            (`HF_HOME`, `OMP_NUM_THREADS`) have no effect: start a process for them.
        stdin: What the command reads from standard input.

    Returns:
        Exit code and output, as `subprocess.run` gives them.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        before = {*threading.enumerate(), *multiprocessing.active_children()}
        with (
            contextlib.chdir(folder),
            _restored_state(),
            mock.patch.dict(os.environ, environment or {}),
            mock.patch.object(sys, "argv", ["grpo", *arguments]),
            mock.patch.object(sys, "stdin", io.StringIO(stdin)),
            mock.patch.object(training, "supervise", _supervise),
            mock.patch.object(training, "start_probe", _start_probe),
            mock.patch.object(exporting, "run_verification", verify_export),
            _redirected(stdout, stderr),
        ):
            code = _exit_code(app.main)
        after = [*threading.enumerate(), *multiprocessing.active_children()]
        # A pool of rewards ends its processes as Python ends.
        left = [
            each
            for each in after
            if not (each.daemon or each in before or each.name == "grpo-reward-worker")
        ]
        assert not left, f"a process would not end before these: {left}"
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read())
    return subprocess.CompletedProcess(["grpo", *arguments], code, *texts)


@contextlib.contextmanager
def _start_probe(prepared: PreparedRun) -> Iterator[QuickProbe]:
    """Run the quick probe of a run here, to its end."""
    output = io.StringIO(json.dumps(finite(probe_run(prepared.folder.path))))
    process = mock.Mock(returncode=0, poll=lambda: 0)
    yield QuickProbe(process, output, io.StringIO(), prepared)


def verify_export(
    request: ExportRequest, folder: Path, tell: Callable[[str], object] = lambda what: None
) -> dict[str, Any]:
    """Verify an export as `run_verification` does, in this process."""
    from grpo_cli.exporting.verification import verify

    return json.loads(json.dumps(verify(request, folder, tell)))


def _supervise(
    plan: LaunchPlan,
    folder: RunFolder,
    on_tick: Callable[[], None],
    on_stopping: Callable[[], None],
    on_notice: Callable[[str], None],
    cancelled: Callable[[], str | None],
) -> Outcome:
    """Run the worker of a single-process plan here, and settle its status as the supervisor does."""
    if folder.read_recipe().generation.backend == "vllm":
        return supervisor.supervise(plan, folder, on_tick, on_stopping, on_notice, cancelled)
    if plan.num_processes > 1:
        with mock.patch.object(subprocess, "Popen", ForkedPopen):
            return supervisor.supervise(plan, folder, on_tick, on_stopping, on_notice, cancelled)
    if cancelled():
        return Outcome(StatusFile(folder.status).read(), None)
    worker = load_worker()
    with (
        folder.log.open("a") as log,
        _restored_state(),
        mock.patch.dict(os.environ, plan.add_environment(os.environ)),
        # It would end with the process that started pytest, which may be a shell in the background.
        mock.patch.object(session, "stop_with_parent"),
        _redirected(log, log),
    ):
        code = _exit_code(lambda: sys.exit(worker.main([str(folder.path)])))
    status = supervisor._settle(plan, folder, code, supervisor._Signals(), None)
    on_tick()
    return Outcome(status, None)


@functools.cache
def load_worker() -> ModuleType:
    """The worker's module, with all that it imports."""
    from grpo_cli.training import run, worker  # noqa: F401

    # Every training collects garbage, which takes half a second over the objects of torch and transformers.
    gc.collect()
    gc.freeze()
    return worker


def _exit_code(act: Callable[[], object]) -> int:
    """What a process that does nothing else would end with."""
    try:
        act()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def _redirected(stdout: IO[str], stderr: IO[str]) -> Iterator[None]:
    """Send what this process and its children write to two files."""
    with contextlib.ExitStack() as undo:
        for number, name, file in ((1, "stdout", stdout), (2, "stderr", stderr)):
            getattr(sys, name).flush()
            saved = os.dup(number)
            undo.callback(os.close, saved)
            undo.callback(os.dup2, saved, number)
            os.dup2(file.fileno(), number)
            # As a pipe has it: what is not flushed comes late.
            stream = open(number, "w", buffering=-1 if number == 1 else 1, closefd=False)  # noqa: SIM115
            undo.callback(stream.flush)
            undo.enter_context(mock.patch.object(sys, name, stream))
        yield


@contextlib.contextmanager
def _restored_state() -> Iterator[None]:
    """Undo what a process leaves to its end: signal handlers, environment, imports, accelerate's world."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    environment, modules, path = dict(os.environ), set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        faulthandler.unregister(signal.SIGUSR1)
        os.environ.clear()
        os.environ.update(environment)
        own = {Path.cwd(), *(Path(each) for each in set(sys.path) - set(path))}
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            # A recipe's own files and what they import: another test's are other files of the same names.
            file = getattr(sys.modules[name], "__file__", None)
            if name.startswith("grpo_own_") or (file and own.intersection(Path(file).parents)):
                del sys.modules[name]
        _reset_accelerate()


def _reset_accelerate() -> None:
    if "accelerate" not in sys.modules:
        return
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
