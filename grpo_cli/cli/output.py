"""The one place that prints: results on stdout; issues, progress and what a command does on stderr."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from grpo_cli.issues import Issue, Level
from grpo_cli.report.wording import LEVEL_MARKS, clean_lines
from grpo_cli.reporter import Reporter
from grpo_cli.runs.files import finite
from grpo_cli.units import count_noun, format_duration

if TYPE_CHECKING:
    from grpo_cli.launch.supervisor import RefusedError
    from grpo_cli.recipe.kinds import KindDescription
    from grpo_cli.report.live import ProgressView
    from grpo_cli.runs.folder import RunFolder

_STYLES: dict[Level, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_PIPE_WIDTH = 160
"""Columns if output is not a terminal."""
_CONTROLS = re.compile("[\x7f-\x9f]")
_QUIET_S = 10.0
"""Seconds between lines of progress if stderr is not a terminal."""
_consoles: dict[bool, tuple[TextIO, Console]] = {}
"""Whether it is stderr's → the stream, which tests replace, and its console."""
_LINES: dict[Level, tuple[str, str]] = {
    "ok": ("", ""),
    "note": ("  ", "yellow"),
    "warning": ("warning: ", "yellow"),
    "error": ("error: ", "red"),
}


class _Console(Console):
    """A console that strips control sequences, and goes quiet on a broken pipe, where rich would exit."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render without control sequences: models, data and file names may contain any."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else clean_lines(text), style, control)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a terminal would break lines in the middle of words, so text is wrapped at spaces there.

        A line with a longer word, such as a path, stays whole, to be copied.
        """
        if self.is_terminal and "soft_wrap" not in options:
            texts = [str(each) for each in objects if isinstance(each, str | Text)]
            words = (word for text in texts for word in text.split())
            options["soft_wrap"] = any(cell_len(word) > self.width for word in words)
        super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Go quiet: a run must survive the pipe it is watched through."""
        self.quiet = True
        _silence(2 if self.stderr else 1)


def _silence(number: int) -> None:
    """Redirect a stream without a reader to /dev/null; otherwise Python fails to flush it and exits with 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def stdout() -> Console:
    """Return the console for results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Return the console for hints, progress and errors."""
    return _console(sys.stderr, stderr=True)


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    # One console for a stream: what is printed during a `status` appears above it, and not in it.
    if (known := _consoles.get(stderr)) and known[0] is stream:
        return known[1]
    width = None if stream.isatty() else _PIPE_WIDTH
    # Neither `[x]` in a path nor `:100:` in `recipe.yaml:100:1` means anything to rich.
    console = _Console(
        stderr=stderr, width=width, soft_wrap=True, markup=False, emoji=False, highlight=False
    )
    _consoles[stderr] = stream, console
    return console


def _print_sometimes() -> Callable[[str], None]:
    """Return progress without a terminal: a line every 10 seconds, none for quick work."""
    last, at = "", time.monotonic()

    def tell(what: str) -> None:
        nonlocal last, at
        now = time.monotonic()
        if what != last and now - at >= _QUIET_S:
            last, at = what, now
            stderr().print(f"· {what}")

    return tell


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr meanwhile, so that prints of rewards and libraries stay out of the result."""
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
    """Show on stderr what is being done; yields a function that changes the text."""
    console = stderr()
    if not console.is_terminal:
        yield _print_sometimes()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what)
        yield lambda what: bars.update(task, description=what)


def print_words(console: Console, text: str | Text, style: str = "", indent: int = 0) -> None:
    """Print indented text, wrapped at words on a terminal and not at all in a file."""
    if console.is_terminal:
        shown = Padding(text, (0, 0, 0, indent)) if indent else text
        console.print(shown, style=style, soft_wrap=False, overflow="fold")
    else:
        console.print(Text.assemble(" " * indent, text), style=style, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a result as JSON; NaN and infinity become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    # json.dumps escapes the other control characters.
    write_line(_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def show(result: Any, draw: Callable[[Any], None], *, as_json: bool) -> None:
    """Print a result, or several, as JSON or as `draw` does for people."""
    if not as_json:
        draw(result)
    elif isinstance(result, list | tuple):
        print_json([each.as_json() for each in result])
    else:
        print_json(result if isinstance(result, dict) else result.as_json())


def write_line(line: str) -> bool:
    """Write a line to stdout and flush it; return False if the reader has gone."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # `grpo … | head` is not an error.
        _silence(1)
        return False
    return True


def print_problems(problems: Iterable[Issue]) -> None:
    """Print issues to stderr, one per line."""
    console = stderr()
    for problem in problems:
        line = Text(f"{problem.level}: ", style=_STYLES[problem.level])
        console.print(line.append(Text(str(problem), style="default not bold")))


def marked(level: Level, *parts: str | Text | tuple[str, str]) -> Text:
    """Return text behind the mark of a level; parts are texts, or texts with their styles."""
    mark, style = LEVEL_MARKS[level]
    return Text.assemble((f"{mark} ", style), *parts)


def print_marked(console: Console, lines: Sequence[tuple[Level, Text]]) -> None:
    """Print issues, each under the mark of its level; lines are wrapped at words on a terminal only."""
    if not console.is_terminal:
        for level, text in lines:
            console.print(marked(level, text))
        return
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold")
    for level, text in lines:
        table.add_row(Text(*LEVEL_MARKS[level]), text)
    if lines:
        console.print(table)


def number_table(first: str | Column, numbers: Iterable[str]) -> Table:
    """Return a table of a column of names and columns of numbers."""
    table = Table(first, box=None, padding=(0, 2), pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def print_kinds(kinds: "Sequence[KindDescription]") -> None:
    """Print a line for each kind."""
    table = Table.grid(padding=(0, 2))
    for kind in kinds:
        table.add_row(Text(kind.kind, style="bold"), Text(kind.summary))
    stdout().print(table)


def print_kind(kind: "KindDescription", section: str = "") -> None:
    """Print all that is known of a kind, under its name and the recipe's section that it is for."""
    console = stdout()
    console.print(f"{kind.kind}, in `{section}`" if section else kind.kind, style="bold")
    console.print(Text(kind.doc))
    table = Table.grid(padding=(0, 2))
    for parameter in kind.parameters:
        default = "required" if parameter.required else json.dumps(parameter.default)
        table.add_row(Text(f"  {parameter.name}", style="bold"), default, Text(parameter.doc))
    if kind.parameters:
        console.print("\nparameters")
        console.print(table)


def print_counts(console: Console, issues: Sequence[Issue], took: Text, fine: Text) -> None:
    """Print how many errors and warnings there are, or that all is fine."""
    errors, warnings = (
        sum(each.level == level for each in issues) for level in ("error", "warning")
    )
    if errors or warnings:
        counts = f"{count_noun(errors, 'error')}, {count_noun(warnings, 'warning')} "
        console.print(Text.assemble(counts, took))
    else:
        console.print(marked("ok", fine))


def print_findings(console: Console, findings: Sequence[Issue]) -> None:
    """Print issues, each with its place, why it matters and the fix."""
    print_marked(console, [(finding.level, _say_finding(finding)) for finding in findings])


def _say_finding(finding: Issue) -> Text:
    _, style = LEVEL_MARKS[finding.level]
    text = Text(f"{finding.subject}: ", style=f"bold {style}")
    text.append(finding.seen.rstrip("."), style="default not bold")
    if finding.why:
        text.append(f"; {finding.why.rstrip('.')}", style="default not bold")
    if finding.fix:
        text.append(f"\nFix: {finding.fix}", style="default not bold")
    if finding.location:
        text.append(f" ({finding.location})", style="dim not bold")
    return text


class TerminalReporter(Reporter):
    """Prints what happens; with `quiet`, only errors."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._started = time.monotonic()

    def issues(self, issues: Iterable[Issue]) -> None:
        """Print the warnings and notes of a recipe."""
        if not self._quiet:
            print_problems(issue for issue in issues if issue.level != "error")

    def say(self, text: str, level: Level = "ok") -> None:
        """Print one line; the terminal may have been closed."""
        start, style = _LINES[level]
        with suppress(OSError):
            print_words(stderr(), f"{start}{text}", style)

    def progress(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show what is being done, on a terminal."""
        return progress(what)

    def probed(self, warnings: Iterable[Issue]) -> None:
        """Print that the quick probe found no error, and its warnings."""
        if self._quiet:
            return
        issues = list(warnings)
        print_findings(stderr(), issues)
        took = format_duration(time.monotonic() - self._started)
        others = f", {count_noun(len(issues), 'warning')}" if issues else " found"
        stderr().print(f"probed in {took}: no error{others}", style="dim")

    def refused(self, refused: "RefusedError") -> None:
        """Print why the probe refused a recipe."""
        if refused.output:
            sys.stderr.write(refused.output)
            return
        shown = {"error"} if self._quiet else {"error", "warning"}
        issues = [issue for issue in refused.issues if issue.level in shown]
        if any(issue.subject for issue in issues):
            print_findings(stderr(), issues)
        else:
            print_problems(issues)
        stderr().print("nothing was trained. --no-probe skips this probe", style="red")

    def view(self, folder: "RunFolder", *, from_now: bool) -> "ProgressView":
        """Return the panel of a terminal, or plain lines elsewhere."""
        from grpo_cli.report.follower import Follower
        from grpo_cli.report.live import ProgressView, choose_view

        if self._quiet:
            return ProgressView()
        console = stderr()
        console.print(f"run folder: {folder.path}")
        return choose_view(Follower(folder, from_now=from_now), console)
