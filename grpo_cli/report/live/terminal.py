"""The terminal itself: what Ctrl-C and the text of models must not write into it."""

import contextlib
import sys
import unicodedata
from collections.abc import Iterator

_OBEYED = {"Cc", "Cf", "Cs"}
"""Unicode's categories of characters that are no text."""
_KEPT = "\n\t\u200c\u200d"
"""Of these, what text needs: line ends, tabs, and what joins or parts letters in Persian, Hindi and emoji."""


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


def clean_text(text: object) -> str:
    """Text of a model or a file on one line; line ends and tabs become spaces."""
    return clean_lines(" ".join(str(text).split()))


def clean_lines(text: str) -> str:
    """Text without what a terminal would obey instead of showing; its lines and their indentation stay.

    Control characters, and those that turn the direction of writing or are not seen at all, are dropped.
    """
    if text.isprintable():
        return text
    return "".join(
        each for each in text if each in _KEPT or unicodedata.category(each) not in _OBEYED
    )
