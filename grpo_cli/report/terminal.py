"""The terminal itself: what Ctrl-C must not write into a view that redraws its lines."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_control_echo() -> Iterator[None]:
    """Keeps the terminal from printing `^C`, which would shift the view; a no-op where there is none."""
    try:
        import termios

        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
    except (ImportError, OSError, ValueError, AttributeError):
        # No terminal, no standard input, or a system without termios.
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(handle, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSANOW, before)
