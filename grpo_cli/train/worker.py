"""The worker process: reads a run folder, builds TRL's `GRPOTrainer`, trains, saves.

Run it with `python -m grpo_cli.train.worker RUN`, or under `accelerate launch` for several
processes; `grpo train` does. It reads nothing but `RUN/resolved.json`. What it leaves behind is
told by `runs/folder.py`; how it is watched, by `launch/supervisor.py`.
"""

import os
import sys
import time
import traceback
from pathlib import Path

from grpo_cli.errors import ExitCode, GrpoError
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.status import StatusFile
from grpo_cli.train.stopping import Stopped, StopRequest, write_pid


def main(argv: list[str]) -> int:
    """Trains the run in the folder `argv[0]`; returns the exit code."""
    folder = RunFolder(Path(argv[0]).resolve())
    rank = int(os.environ.get("RANK", "0"))
    stop = StopRequest(folder)
    stop.listen()
    write_pid(folder, rank)
    status = StatusFile(folder.status)
    if rank == 0:
        status.update(state="running", phase="loading libraries")
    try:
        # Torch and its family take seconds to import; by now a stop or a failure is heard.
        from grpo_cli.train.training import train

        train(folder, stop)
    except Stopped as reason:
        if rank == 0:
            status.update(state="stopped", reason=str(reason))
        return ExitCode.INTERRUPTED
    except BaseException as error:
        # A reward may raise anything, even SystemExit; signals do not come this way.
        _write_failure(folder, rank, error)
        traceback.print_exc()
        if rank == 0:
            status.update(state="failed", reason=_describe(error), traceback=_trace(error))
        return ExitCode.FAILED
    return ExitCode.OK


def _write_failure(folder: RunFolder, rank: int, error: BaseException) -> None:
    failure = {
        "time": time.time(),
        "rank": rank,
        "reason": _describe(error),
        "traceback": _trace(error),
    }
    write_json(folder.failure(rank), failure)


def _describe(error: BaseException) -> str:
    text = str(error).strip()
    return text if isinstance(error, GrpoError) else f"{type(error).__name__}: {text}"


def _trace(error: BaseException) -> str | None:
    """The traceback, where the message is not meant to speak for itself."""
    return None if isinstance(error, GrpoError) else "".join(traceback.format_exception(error))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
