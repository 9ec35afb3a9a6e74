"""The worker: builds TRL's trainer from a run folder, trains, measures and saves.

Owns callbacks, checkpoints and exact resume; experimental modes have folders of their own. The algorithm is TRL's.
"""

import os
import sys


def _drop_working_directory() -> None:
    """Undo what accelerate does to PYTHONPATH for DeepSpeed, before a file of the working directory is imported.

    Source: accelerate 1.15, `prepare_deepspeed_cmd_env`, which appends the working directory.
    """
    *own, last = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if last == os.getcwd():
        os.environ["PYTHONPATH"] = os.pathsep.join(own)
        sys.path[:] = [path for path in sys.path if path != last or path in own]


if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
    _drop_working_directory()
