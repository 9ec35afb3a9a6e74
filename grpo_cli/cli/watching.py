"""`grpo watch`: finds the run, shows it until it ends, and sums it up."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_cli.cli.arguments import RUNS, NewestRun, RunsRoot
from grpo_cli.cli.output import write_line
from grpo_cli.errors import ExitCode
from grpo_cli.runs.files import finite

if TYPE_CHECKING:
    from grpo_cli.report.live.following import Follower
    from grpo_cli.report.live.watching import Ending
    from grpo_cli.report.summary import RunSummary
    from grpo_cli.runs.folder import RunFolder

_HISTORY = 20
"""Lines of what has been that plain lines begin with."""


def watch(
    run: NewestRun = "latest",
    runs: RunsRoot = RUNS,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print each record of the metrics as a line of JSON, and the summary last.",
        ),
    ] = False,
) -> None:
    """Watch a run that trains elsewhere, from another terminal or machine, until it ends.

    Ctrl-C ends the watching alone. Exit code 0 where the run completed, 1 where it failed, was stopped or
    ended without a word.
    """
    from grpo_cli.report.summary import read_summary
    from grpo_cli.runs.selection import find_run

    folder = find_run(runs, run).main
    try:
        ending = _follow(folder, as_json=as_json)
    except KeyboardInterrupt:
        _say("no longer watched; the run goes on")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    _print_end(ending, read_summary(folder), as_json=as_json)
    raise typer.Exit(ExitCode.OK if ending.completed else ExitCode.FAILED)


class _JsonView:
    """Each record as a line of JSON, as it comes."""

    def __init__(self, follower: "Follower") -> None:
        self._follower = follower

    def refresh(self) -> None:
        for record in self._follower.read().records:
            if not write_line(json.dumps(finite(record), ensure_ascii=False)):
                raise BrokenPipeError

    def stopping(self) -> None:
        """Nothing to say: nobody is asked to stop."""

    def tell(self, text: str) -> None:
        _say(text)

    def close(self) -> None:
        """Nothing to undo."""


def _follow(folder: "RunFolder", *, as_json: bool) -> "Ending":
    from grpo_cli.cli.output import stdout
    from grpo_cli.report.live.following import Follower
    from grpo_cli.report.live.progress import choose_view
    from grpo_cli.report.live.watching import watch_run

    follower, console = Follower(folder), stdout()
    if not as_json:
        _say(f"run folder: {folder.path}")
    view = _JsonView(follower) if as_json else choose_view(follower, console, history=_HISTORY)
    try:
        # A console falls silent when its reader has gone; a training goes on then, a watching need not.
        return watch_run(follower, view, lambda: not console.quiet)
    finally:
        view.close()


def _print_end(ending: "Ending", summary: "RunSummary", *, as_json: bool) -> None:
    from grpo_cli.cli import views

    if as_json:
        lost = {"state": "interrupted", "reason": ending.lost} if ending.lost else {}
        told = {"event": "summary", **summary.as_json(), **lost}
        write_line(json.dumps(finite(told), ensure_ascii=False, default=str))
    else:
        views.print_summary(summary, lost=ending.lost)


def _say(text: str) -> None:
    from grpo_cli.cli.output import stderr

    stderr().print(text, markup=False)
