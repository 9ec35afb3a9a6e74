"""One of several processes that measure together: reads the folder, does its share of the chunks.

Run by `accelerate launch -m grpo_cli.eval.worker FOLDER`; `grpo eval` does. It reads nothing but the
folder's request.
"""

import os
import sys
from pathlib import Path

from grpo_cli.errors import ExitCode, GrpoError, SetupError
from grpo_cli.eval.folder import EvalFolder
from grpo_cli.machine import pick_device
from grpo_cli.processes import stop_with_parent


def main(argv: list[str]) -> int:
    """Measures this process's share; returns the exit code.

    Args:
        argv: The folder, and how many processes were planned.
    """
    stop_with_parent()
    # As in a training's worker.
    os.environ.pop("PYTHONSAFEPATH", None)
    folder = EvalFolder(Path(argv[0]))
    try:
        _work(folder, planned=int(argv[1]))
    except GrpoError as error:
        folder.write_failure(error)
        return error.exit_code
    return ExitCode.OK


def _work(folder: EvalFolder, planned: int) -> None:
    from accelerate import PartialState

    from grpo_cli.eval.work import Place, measure

    request = folder.read_request()
    state = PartialState(cpu=pick_device(request.recipe.launch) == "cpu")
    if state.num_processes != planned:
        raise SetupError(
            f"{planned} processes were planned but {state.num_processes} work together. "
            "Fix: see `grpo doctor`, or measure with --num-processes 1"
        )
    place = Place(state.process_index, state.num_processes, state.device)
    measure(request, folder, place, lambda subject, done, total: None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
