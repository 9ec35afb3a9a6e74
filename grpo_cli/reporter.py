"""How a command's work tells its progress; the command line prints it, the Python API is silent."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_cli.issues import Issue, Level

if TYPE_CHECKING:
    from grpo_cli.report.live import ProgressView
    from grpo_cli.runs.folder import RunFolder


class Reporter:
    """A silent reporter; the command line's is in `cli/output.py`."""

    def issues(self, issues: Iterable[Issue]) -> None:
        """Show warnings and notes of a recipe."""

    def say(self, text: str, level: Level = "ok") -> None:
        """Show one line."""

    def probed(self, warnings: Iterable[Issue]) -> None:
        """Show that the quick probe found no error, and its warnings."""

    def progress(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show what is being done; the function that is yielded changes the text."""
        return nullcontext(lambda what: None)

    def evaluation(self, folder: Path) -> AbstractContextManager[Callable[[str, int, int], None]]:
        """Show how far an evaluation is; the function takes a model's name, completions done, and their total."""
        return nullcontext(lambda name, done, total: None)

    def view(self, folder: "RunFolder", *, from_now: bool) -> "ProgressView":
        """Return what shows a training while it runs, from its first record or from now on."""
        from grpo_cli.report.live import ProgressView

        return ProgressView()
