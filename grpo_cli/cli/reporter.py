"""Shows on stderr what a workflow does."""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress

from grpo_cli.cli.output import print_findings, print_problems, print_words, progress, stderr
from grpo_cli.issues import Issue, Level
from grpo_cli.launch.train import RefusedError
from grpo_cli.report.follower import Follower
from grpo_cli.report.live import ProgressView, choose_view
from grpo_cli.reporter import Reporter
from grpo_cli.runs.folder import RunFolder
from grpo_cli.units import count_noun, format_duration

_LINES: dict[Level, tuple[str, str]] = {
    "ok": ("", ""),
    "note": ("  ", "yellow"),
    "warning": ("warning: ", "yellow"),
    "error": ("error: ", "red"),
}


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

    def refused(self, refused: RefusedError) -> None:
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

    def view(self, folder: RunFolder, *, from_now: bool) -> ProgressView:
        """Return the panel of a terminal, or plain lines elsewhere."""
        if self._quiet:
            return ProgressView()
        console = stderr()
        console.print(f"run folder: {folder.path}")
        return choose_view(Follower(folder, from_now=from_now), console)
