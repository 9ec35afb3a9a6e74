"""The worker process: reads a run folder, builds TRL's `GRPOTrainer`, trains, saves.

Run it with `python -m grpo_cli.train.worker RUN`, or under `accelerate launch` for several
processes; `grpo train` does. It reads nothing but `RUN/resolved.json`. What it leaves behind is
told by `runs/folder.py`; how it is watched, by `launch/supervisor.py`.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from grpo_cli.errors import ExitCode, GrpoError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.status import StatusFile
from grpo_cli.runs.trackers.defaults import set_defaults
from grpo_cli.train.failures import describe, trace
from grpo_cli.train.stopping import Stopped, StoppedByRule, StopRequest, write_pid


def main(argv: list[str]) -> int:
    """Trains the run in the folder `argv[0]`; returns the exit code."""
    folder = RunFolder(Path(argv[0]).resolve())
    # It is for the workers: what a reward starts has its own folder on the path, as ever.
    os.environ.pop("PYTHONSAFEPATH", None)
    rank = int(os.environ.get("RANK", "0"))
    stop = StopRequest(folder)
    stop.listen()
    # The supervisor of a stalled run asks every worker where it stands.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    write_pid(folder, rank)
    status = StatusFile(folder.status)
    if rank == 0:
        status.update(state="running", phase="loading libraries")
    try:
        # Before anything imports a tracker.
        set_defaults(folder, os.environ)
        # Torch and its family take seconds to import; by now a stop or a failure is heard.
        from grpo_cli.train.training import train

        try:
            train(folder, stop)
        except Stopped:
            _leave_group()
            raise
        _leave_group()
    except Stopped as stopped:
        # One process of every machine: their supervisors read folders of their own.
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:
            rule = stopped.rule if isinstance(stopped, StoppedByRule) else None
            status.update(state="stopped", reason=str(stopped), stopped_by=rule)
        return ExitCode.INTERRUPTED
    except BaseException as error:
        # A reward may raise anything, even SystemExit; signals do not come this way.
        reason = describe(error, _read_recipe(folder))
        failure = {"time": time.time(), "rank": rank, "reason": reason, "traceback": trace(error)}
        traceback.print_exc()
        write_json(folder.failure(rank), failure)
        if rank == 0:
            status.update(state="failed", reason=reason, traceback=trace(error))
        return ExitCode.FAILED
    return ExitCode.OK


def _leave_group() -> None:
    """End the communication with the other processes, if there is any, before Python ends.

    A thread of gloo that releases a tensor while the interpreter ends aborts the process (pytorch issue 179291),
    and torchrun then kills the others, though this one has done its part. After an error nothing is ended: the
    others may be in the middle of a collective.
    """
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()


def _read_recipe(folder: RunFolder) -> Recipe | None:
    with contextlib.suppress(GrpoError):
        return folder.read_recipe()
    return None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
