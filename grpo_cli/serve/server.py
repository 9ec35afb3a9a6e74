"""vLLM's server as a child: started, waited for, and ended cleanly. Owns its life."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_cli.errors import RunError, SetupError
from grpo_cli.runs.processes import stop_with_parent
from grpo_cli.serve.plan import ServePlan

_LOOK_S = 0.5
_END_S = 20.0
"""Seconds a server has to end by itself."""
_LAST_LINES = 8


def check_port(host: str, port: int) -> None:
    """Refuses a port that another program listens on.

    Raises:
        SetupError: It is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SetupError(
                f"{host}:{port} cannot be listened on ({error.strerror}). Fix: another --port"
            ) from None


@contextmanager
def running(
    plan: ServePlan, log: Path, timeout_s: float, tell: Callable[[str], None]
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
    with log.open("wb") as out:
        process = subprocess.Popen(
            plan.argv,
            stdout=out,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C reaches it through us, once.
            start_new_session=True,
            preexec_fn=stop_with_parent,
        )
        try:
            _wait(process, plan, log, timeout_s, tell)
            yield process
        finally:
            _end(process)


def _wait(
    process: subprocess.Popen[bytes],
    plan: ServePlan,
    log: Path,
    timeout_s: float,
    tell: Callable[[str], None],
) -> None:
    deadline = time.monotonic() + timeout_s
    while not _answers(plan.health):
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


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the server and all its children to end, and makes them where they do not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(_LOOK_S)
    process.wait()


def read_end(log: Path, lines: int = _LAST_LINES) -> str:
    """The last lines of a log."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return "\n".join(text.splitlines()[-lines:])
