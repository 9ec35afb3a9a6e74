"""Trackio's dashboard beside a training: on this machine alone, and gone with the command.

Runs as a process of its own, `python -m grpo_cli.runs.trackers.dashboard PROJECT`, which says the address
on its first line and serves until it is ended.
"""

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator
from urllib.parse import urlencode

from grpo_cli.errors import SetupError
from grpo_cli.processes import run_module, start_child
from grpo_cli.runs.trackers.catalogue import install_command, is_installed

_PATIENCE_S = 30.0
"""How long the dashboard may take to come up before training begins without it."""
_GRACE_S = 5.0
_MARK = b"dashboard "


def check_dashboard() -> None:
    """Refuses where there is no Trackio.

    Raises:
        SetupError: It is not installed.
    """
    if not is_installed("trackio"):
        raise SetupError(f"trackio is not installed. Fix: {install_command('trackio')}")


@contextlib.contextmanager
def dashboard(project: str) -> Iterator[str]:
    """Serves a project's dashboard meanwhile, and opens it where there is a display.

    Args:
        project: Trackio's project, which is the recipe's name.

    Yields:
        The address for people, or why there is no dashboard: a training goes on without.
    """
    process = start_child(
        [*run_module("grpo_cli.runs.trackers.dashboard"), project],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C asks the training to stop; until it has, there is something to see.
        start_new_session=True,
    )
    try:
        address = _read_address(process)
        if address is not None and _has_display():
            webbrowser.open(address)
        later = f"trackio show --project {shlex.quote(project)}"
        yield f"dashboard: {address}" if address else f"no dashboard came up; later: {later}"
    finally:
        _end(process)


def _read_address(process: "subprocess.Popen[bytes]") -> str | None:
    """The address that the process says; None where it ends, or says none in time."""
    pipe, said = process.stdout, b""
    deadline = time.monotonic() + _PATIENCE_S
    while pipe is not None and (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([pipe], [], [], left)
        chunk = os.read(pipe.fileno(), 4096) if ready else b""
        if not chunk:
            return None
        said += chunk
        for line in said.splitlines(keepends=True):
            if line.startswith(_MARK) and line.endswith(b"\n"):
                return line.removeprefix(_MARK).decode().strip()
    return None


def _has_display() -> bool:
    """Whether a browser window could be seen by the one who asked."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    shown = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(shown) or sys.platform in ("darwin", "win32")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def serve(project: str) -> None:
    """Serves a project's dashboard on the loopback address until this process is ended."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    import trackio

    _, url, _, _ = trackio.show(
        project=project, open_browser=False, block_thread=False, host="127.0.0.1", share=False
    )
    # The address without the token that allows writing: a browser need only look.
    print(f"\n{_MARK.decode()}{url.rstrip('/')}/?{urlencode({'project': project})}", flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(sys.argv[1])
