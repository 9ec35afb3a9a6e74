"""Hands a run's completions, recipe, measurements and report to its trackers, after the end.

`hand_over` does it in a process of its own, `python -m grpo_cli.runs.trackers.uploads RUN`: a tracker
that hangs, or ends its process, takes nothing with it. What fails is written down and told, and
the run stays what it is.
"""

import os
import subprocess
import sys
from pathlib import Path

from grpo_cli.processes import run_module, start_child
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers.contents import read_contents
from grpo_cli.runs.trackers.defaults import set_defaults
from grpo_cli.runs.trackers.ledger import note_failure, read_ledger
from grpo_cli.runs.trackers.recipients import RECIPIENTS

_PATIENCE_S = 600.0
"""How long an upload may take."""
_LONGEST = 200
"""Characters of an exception that are told."""


def hand_over(folder: RunFolder) -> list[str]:
    """Hands a run to its trackers, and says what went wrong with them, in training too.

    Args:
        folder: A run that has ended, in whatever way.
    """
    wanted = [name for name in read_ledger(folder).runs if name in RECIPIENTS]
    log = folder.log.with_name("trackers.log")
    if wanted:
        command = [*run_module("grpo_cli.runs.trackers.uploads"), str(folder.path)]
        why = _run(command, log)
        if why:
            note_failure(folder, ", ".join(wanted), f"{why}; see {log}")
    return [f"{name}: {why}" for name, why in read_ledger(folder).failures.items()]


def _run(command: list[str], log: Path) -> str | None:
    """Runs the process to its end; gives the reason where that was not a good one."""
    try:
        with log.open("ab") as output:
            process = start_child(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            code = process.wait(_PATIENCE_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
    except subprocess.TimeoutExpired:
        return f"took no files within {_PATIENCE_S:.0f} s"
    except OSError as error:
        return f"took no files ({error.strerror})"
    return None if code == 0 else f"took no files (exit code {code})"


def main(path: Path) -> None:
    """Hands the run in a folder to each of its trackers; one that fails does not keep the others from it."""
    folder = RunFolder(path)
    set_defaults(folder, os.environ)
    contents = read_contents(folder)
    for name, known in read_ledger(folder).runs.items():
        if name not in RECIPIENTS:
            continue
        try:
            RECIPIENTS[name](known, contents, folder)
        except Exception as error:
            note_failure(folder, name, f"took no files ({summarize(error)})")


def summarize(error: Exception) -> str:
    """An exception in a line."""
    first = str(error).strip().partition("\n")[0][:_LONGEST]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


if __name__ == "__main__":
    main(Path(sys.argv[1]))
