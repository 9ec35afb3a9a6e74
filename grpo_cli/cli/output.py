"""The one place that prints: results on stdout, everything else on stderr.

Owns the two consoles, JSON and problems; how results look is `views.py`.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from grpo_cli.errors import Level, Problem
from grpo_cli.report.live.terminal import clean_lines
from grpo_cli.runs.files import finite

_STYLES: dict[Level, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_PIPE_WIDTH = 160
"""Columns where there is no terminal to ask."""
_CONTROLS = re.compile("[\x7f-\x9f]")
_QUIET_S = 10.0
"""Seconds between lines of progress where there is no terminal."""


class _Console(Console):
    """A console that prints text alone, and falls silent when its reader has gone; rich would end the program."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render without what a terminal would obey: models, data and file names may hold anything."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else clean_lines(text), style, control)

    def on_broken_pipe(self) -> None:
        """Says no more: a run must not die with the pipe it is watched through."""
        self.quiet = True
        _silence(2 if self.stderr else 1)


def _silence(number: int) -> None:
    """Point a stream without a reader to nowhere: Python would fail to flush it, and end with exit code 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def stdout() -> Console:
    """Where results go."""
    return _console(_is_terminal(sys.stdout))


def stderr() -> Console:
    """Where hints, progress and errors go."""
    return _console(_is_terminal(sys.stderr), stderr=True)


def _console(terminal: bool, *, stderr: bool = False) -> Console:
    width = None if terminal else _PIPE_WIDTH
    # Without emoji: the `:100:` of `recipe.yaml:100:1` is a line.
    return _Console(stderr=stderr, highlight=False, soft_wrap=True, width=width, emoji=False)


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; one that was closed before the start is None."""
    return stream is not None and stream.isatty()


class _PlainProgress:
    """Progress where there is no terminal: a line now and then, none for what is quick."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said_at = time.monotonic()

    def __call__(self, what: str) -> None:
        """Says what was begun, where the last line is old enough."""
        now = time.monotonic()
        if now - self._said_at >= _QUIET_S:
            self._said_at = now
            stderr().print(f"· {what}", markup=False)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends what rewards and libraries print to stderr meanwhile: stdout is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on stderr what is being done, where that is a terminal; gives the way to change it."""
    console = stderr()
    if not console.is_terminal:
        yield _PlainProgress(what)
        return
    with console.status(Text(what)) as status:
        yield lambda what: status.update(Text(what))


def print_words(console: Console, text: Text) -> None:
    """Prints text that breaks at words on a terminal, and not at all in a file."""
    if console.is_terminal:
        console.print(text, soft_wrap=False, overflow="fold")
    else:
        console.print(text, soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints a result as JSON; numbers that JSON does not have become null."""
    told = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    # JSON escapes the lower half of what a terminal obeys by itself.
    write_line(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", told))


def write_line(line: str) -> bool:
    """Writes a line to stdout at once; gives whether anybody is there to read it."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nothing is wrong (`grpo … | head`).
        _silence(1)
        return False
    return True


def print_problems(problems: Iterable[Problem]) -> None:
    """Prints problems to stderr, one a line."""
    console = stderr()
    for problem in problems:
        line = Text(f"{problem.level}: ", style=_STYLES[problem.level])
        console.print(line.append(Text(str(problem), style="default not bold")))
