"""Python processes forked from this one: real ones, that need not import torch and transformers again.

Each import takes ten seconds of a core. Pipes, sessions, signals, exit codes and the death of a parent are as
`subprocess` has them. Other commands, and those with other variables that libraries read as they are imported
(`HF_HOME`), are started as ever.
"""

import atexit
import ctypes
import importlib
import inspect
import multiprocessing.util
import os
import runpy
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

GRPO = "from grpo_cli.cli.app import main; main()"
_MODULES = (
    "accelerate.commands.launch",
    "grpo_cli.exporting.verification",
    "grpo_cli.probing.procedure",
    "grpo_cli.training.worker",
    "grpo_cli",
)
_READ_ON_IMPORT = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "LD_PRELOAD", "PYTHONPATH", "VLLM_")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


class ForkedPopen(subprocess.Popen):
    """`subprocess.Popen`, which forks this process for the commands of `GRPO` and `_MODULES`."""

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*args).arguments
        run = _find_entry(given["args"], given["env"])
        if run is None:
            super()._execute_child(*args)
            return
        from tests.in_process import load_worker

        load_worker()
        self.pid = os.fork()
        if self.pid == 0:
            _become(run, given)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))


def _find_entry(argv: Any, environment: Mapping[str, str] | None) -> Callable[[], object] | None:
    """What a command runs, if it is one that this process can become."""
    if isinstance(argv, (str, bytes)) or _read_on_import(environment) != _read_on_import(None):
        return None
    program, *words = map(str, argv)
    while words and words[0] in ("-P", "-u"):
        words.pop(0)
    if program != sys.executable or len(words) < 2:
        return None
    option, name, *rest = words
    if option == "-c" and name == GRPO:
        return lambda: _run(["-c", *rest], lambda: exec(GRPO, {}))
    if option == "-m" and name in _MODULES:
        # Once, here, rather than in each child.
        importlib.import_module(name)
        return lambda: _run([name, *rest], lambda: runpy.run_module(name, run_name="__main__"))
    return None


def _read_on_import(environment: Mapping[str, str] | None) -> dict[str, str]:
    variables = os.environ if environment is None else environment
    return {name: variables[name] for name in variables if name.startswith(_READ_ON_IMPORT)}


def _run(argv: list[str], act: Callable[[], object]) -> None:
    sys.argv = argv
    with warnings.catch_warnings():
        # The module is imported already.
        warnings.filterwarnings("ignore", module="runpy")
        act()


def _become(run: Callable[[], object], given: dict[str, Any]) -> None:
    """Be what `subprocess` would have started, to its end."""
    code = 1
    try:
        _take_over(given)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        multiprocessing.util._exit_function()
        # The child may have put others in their places.
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            stream.flush()
    finally:
        os._exit(code)


def _forget_servers() -> None:
    """Let a fork start its own servers of multiprocessing: those of its parent are not its children."""
    vars(forkserver._forkserver).update(
        _forkserver_address=None, _forkserver_alive_fd=None, _forkserver_pid=None
    )
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
    # Otherwise the fork would not end its own workers when it exits, and wait for them for ever.
    if (pool := sys.modules.get("grpo_cli.rewards.pool")) is not None:
        pool._alive.clear()


# For the children of commands, too, that run in the test process.
os.register_at_fork(after_in_child=_forget_servers)


def _take_over(given: dict[str, Any]) -> None:
    """Leave what belongs to the parent, and be as a new process is."""
    # What the parent registered, and the children that it waits for at its end, are its own.
    atexit._clear()
    multiprocessing.process._children.clear()
    signal.set_wakeup_fd(-1)
    for number, handler in _DEFAULTS.items():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if given[name] != -1:
            os.dup2(given[name], number)
    _drop_pipes({0, 1, 2, *given["pass_fds"]})
    if given.get("start_new_session"):
        os.setsid()
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    environment = dict(os.environ if given["env"] is None else given["env"])
    os.environ.clear()
    os.environ.update(environment | {"TOKENIZERS_PARALLELISM": "false"})
    _set_command_line(" ".join(map(str, given["args"])))
    tempfile.tempdir = None
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    lines = 1 if environment.get("PYTHONUNBUFFERED") else -1
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=lines, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # Some took it by its name as they were imported.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("Popen") is ForkedPopen.__base__:
            module.Popen = ForkedPopen
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()


def _set_command_line(line: str) -> None:
    """Be listed under another command, by which workers are known.

    Written over the memory of the command line and the first environment, which `os.environ` has copied.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[48])
    ctypes.memmove(start, line.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _drop_pipes(kept: set[int]) -> None:
    """Let go of the parent's pipes, sockets and locks; their numbers stay taken, for its objects to close."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        is_lock = os.readlink(f"/proc/self/fd/{number}").endswith("/.lock")
        if number not in kept and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or is_lock):
            os.dup2(nothing, number, inheritable=False)
