"""Watching a run that another process trains, until it ends: from its folder alone.

Owns when a run counts as ended. What is shown meanwhile is a view's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from grpo_cli.errors import RunError
from grpo_cli.report.live.following import Follower
from grpo_cli.report.live.progress import ProgressView
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.liveness import Life, look_at_life, was_started
from grpo_cli.runs.status import FINAL, Status
from grpo_cli.units import format_duration

TICK_S = 0.25
_SURE_S = 3.0
"""So long a run's processes have to be gone: its supervisor may be about to say why."""


@dataclass(frozen=True)
class Ending:
    """How a watched run ended."""

    status: Status
    lost: str | None = None
    """What is known of a run that ended without a word; None where its status tells."""

    @property
    def completed(self) -> bool:
        """Whether it did what was planned."""
        return self.status.state == "completed"


def watch_run(follower: Follower, view: ProgressView, is_heard: Callable[[], bool]) -> Ending:
    """Shows a run until it ends; one that has ended is not waited for.

    Args:
        follower: What reads the run.
        view: What shows it, from the same follower.
        is_heard: Whether anybody still reads what is shown.

    Raises:
        BrokenPipeError: Nobody does.
        UsageError: Its status is damaged.
        RunError: Its folder has gone.
        KeyboardInterrupt: Ctrl-C; the run knows nothing of it.
    """
    run, gone_since, waited = follower.folder, None, False
    while True:
        view.refresh()
        if not is_heard():
            raise BrokenPipeError
        if not run.path.is_dir():
            raise RunError(f"the run folder {run.path} has gone, and with it the run")
        status = follower.status
        if status.state in FINAL:
            return Ending(status)
        if status.state == "pending" and not waited and not was_started(run, status):
            waited = True
            view.tell("nothing was started in this folder yet: waiting (Ctrl-C ends the watching)")
        life = look_at_life(run, status)
        if life.state != "interrupted":
            gone_since = None
        elif gone_since is None:
            gone_since = time.monotonic()
        elif time.monotonic() - gone_since > _SURE_S:
            return Ending(status, say_lost(run, life, status))
        time.sleep(TICK_S)


def say_lost(run: RunFolder, life: Life, status: Status) -> str:
    """What to make of a run that says it runs, and does not."""
    seen = f"the last sign of life is {format_duration(life.silent_s)} old"
    where = (
        "none of its processes is left on this machine" if life.here else "it was made elsewhere"
    )
    return (
        f"it ended without a word while {status.phase}: {where}, and {seen}. "
        f"Fix: look at {run.log}; grpo train {run.resolved} --resume-from {run.path} goes on with it"
    )
