"""What `grpo train` does when a run has ended: its page, and what its trackers are given.

Nothing here fails a run: it says what did not work, and goes on.
"""

import importlib.util
from pathlib import Path

from rich.text import Text

from grpo_cli.cli.output import print_words, progress, stderr
from grpo_cli.errors import GrpoError
from grpo_cli.report.page.assembly import write_report
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers.uploads import hand_over


def finish(folder: RunFolder) -> None:
    """Writes the page of a run that has ended, and hands the run to its trackers."""
    for act in (write_page, _tell_trackers):
        try:
            act(folder)
        except KeyboardInterrupt:
            _warn("left out at your wish: the report, or what the trackers had still to be given")
            return
        except Exception as error:
            # Whatever it is, the training is done, and its summary is what was waited for.
            said = str(error) if isinstance(error, GrpoError) else repr(error)
            _warn(f"the end of the run could not be written up: {said}")


def _tell_trackers(folder: RunFolder) -> None:
    if not folder.trackers.is_file():
        return
    with progress("handing completions and report to the trackers (Ctrl-C leaves it out)"):
        failures = hand_over(folder)
    for failure in failures:
        _warn(failure)


def write_page(folder: RunFolder) -> Path | None:
    """The run's page; None where plotly is missing or there is nothing to draw."""
    if importlib.util.find_spec("plotly") is None or not folder.metrics.is_file():
        return None
    with progress("writing the report"):
        return write_report([folder.path], None)


def _warn(text: str) -> None:
    print_words(stderr(), Text(f"warning: {text}", style="yellow"))
