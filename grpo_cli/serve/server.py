"""vLLM's server as a child: started, waited for, and ended cleanly. Owns its life."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from grpo_cli.errors import RunError, SetupError
from grpo_cli.runs.guardian import guarded
from grpo_cli.serve.plan import ServePlan

_LOOK_S = 0.5
_LAST_LINES, _LAST_BYTES, _LINE_LENGTH = 8, 2**16, 500


def check_port(host: str, port: int) -> None:
    """Refuses a port that another program listens on.

    Raises:
        SetupError: It is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            said = getattr(error, "strerror", None) or error
            raise SetupError(
                f"{host}:{port} cannot be listened on ({said}). Fix: another --port, or another --host"
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
    with (
        log.open("wb") as out,
        guarded(plan.argv, stdout=out, stderr=subprocess.STDOUT) as process,
    ):
        _wait(process, plan, log, timeout_s, tell)
        yield process


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
        # The address is this machine's: a proxy would not find it.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


def read_end(log: Path, lines: int = _LAST_LINES) -> str:
    """The last lines of a log."""
    with log.open("rb") as said:
        said.seek(max(log.stat().st_size - _LAST_BYTES, 0))
        text = said.read().decode("utf-8", "replace").strip()
    return "\n".join(line[:_LINE_LENGTH] for line in text.splitlines()[-lines:])
