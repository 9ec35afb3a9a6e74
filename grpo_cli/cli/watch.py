"""`grpo watch`: shows a run that trains elsewhere until it ends, and sums it up."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_cli.cli.arguments import RUNS, NewestRun, RunsRoot
from grpo_cli.cli.output import stderr, stdout, write_line
from grpo_cli.errors import ExitCode
from grpo_cli.runs.files import finite

if TYPE_CHECKING:
    from grpo_cli.report.follower import Follower
    from grpo_cli.report.live import ProgressView
    from grpo_cli.report.summary import RunReport


def watch(
    run: NewestRun = "latest",
    runs: RunsRoot = RUNS,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each record, and last the summary, as JSON.")
    ] = False,
) -> None:
    """Watch a run that trains in another terminal or on another machine, until it ends.

    Ctrl-C stops watching; the run continues. Exit code 0 if the run completed, 1 if it failed, was stopped or was
    interrupted.
    """
    from grpo_cli.logs.run import LogRun, open_run
    from grpo_cli.report.follower import Follower
    from grpo_cli.report.live import choose_view, watch_run
    from grpo_cli.report.summary import RunReport

    opened = open_run(runs, run)
    followed = opened if isinstance(opened, LogRun) else opened.folder.main
    follower, console = Follower(followed, skims=not as_json), stdout()
    if not as_json:
        stderr().print(f"run folder: {follower.run.folder.path}")
    # Elsewhere than on a terminal, the last 20 records are printed first.
    view = _json_view(follower) if as_json else choose_view(follower, console, history=20)
    try:
        # The console goes quiet when its reader has gone.
        watch_run(follower, view, lambda: not console.quiet)
    except KeyboardInterrupt:
        view.close()
        stderr().print("stopped watching; the run continues")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    finally:
        view.close()
    ended = opened if isinstance(opened, LogRun) else RunReport(follower.run.folder)
    _print_end(ended, as_json=as_json)
    raise typer.Exit(ExitCode.OK if ended.status.state == "completed" else ExitCode.FAILED)


def _json_view(follower: "Follower") -> "ProgressView":
    from grpo_cli.report.live import ProgressView

    class JsonView(ProgressView):
        def refresh(self) -> None:
            for record in follower.read()[0]:
                if not write_line(json.dumps(finite(record), ensure_ascii=False)):
                    raise BrokenPipeError

        def tell(self, text: str) -> None:
            stderr().print(text)

    return JsonView()


def _print_end(run: "RunReport", *, as_json: bool) -> None:
    if as_json:
        lost = run.lost()
        interrupted = {"state": "interrupted", "reason": lost} if lost else {}
        summary = {"event": "summary", **run.summary_json(), **interrupted}
        write_line(json.dumps(finite(summary), ensure_ascii=False, default=str))
    else:
        from grpo_cli.cli.summary import print_summary

        print_summary(run)
