"""Ports of this machine that a server can listen on."""

import socket

from grpo_cli.errors import SetupError


def pick_free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of this machine."""
    return _why_not("0.0.0.0", port) is None


def check_port(host: str, port: int) -> None:
    """Refuses an address that cannot be listened on.

    Raises:
        SetupError: It is another program's, or not this machine's.
    """
    said = _why_not(host, port)
    if said is not None:
        raise SetupError(
            f"{host}:{port} cannot be listened on ({said}). Fix: another --port, or another --host"
        )


def _why_not(host: str, port: int) -> str | None:
    with socket.socket() as probe:
        # As servers do: a connection that has just been closed does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            return str(getattr(error, "strerror", None) or error)
    return None
