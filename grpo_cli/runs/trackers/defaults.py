"""The environment variables that trackers read, where the user has not set them.

The only place that sets any. What is set already wins, always.
"""

from collections.abc import MutableMapping
from pathlib import Path

from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers.ledger import read_ledger
from grpo_cli.runs.trackers.login import read_local_mode

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""What these libraries tell their makers about their use, switched off."""


def set_defaults(folder: RunFolder, environment: MutableMapping[str, str]) -> None:
    """Tells the trackers where to write and under which names, and to go on with their earlier runs.

    TensorBoard and W&B write into the run folder. Trackio and MLflow keep one store for many runs,
    which is theirs and the user's to place: there runs are compared.

    Args:
        folder: The run; only its resolved recipe need be there.
        environment: Usually `os.environ`; changed.
    """
    name = folder.read_recipe().name
    found = {
        **_QUIET,
        "TENSORBOARD_LOGGING_DIR": str(folder.path / "tensorboard"),
        "WANDB_DIR": str(folder.path),
        "WANDB_DATA_DIR": str(folder.path / "wandb"),
        "WANDB_PROJECT": name,
        "MLFLOW_EXPERIMENT_NAME": name,
    }
    # `wandb offline` leaves its word in the working directory, where WANDB_DIR has it not look.
    if (mode := read_local_mode(Path.cwd())) is not None:
        found["WANDB_MODE"] = mode
    if folder.read_resumption():
        found |= _going_on(folder)
    for variable, value in found.items():
        environment.setdefault(variable, value)


def _going_on(folder: RunFolder) -> dict[str, str]:
    """What has W&B and MLflow go on with a run; Trackio does by the run's name."""
    runs = read_ledger(folder).runs
    found: dict[str, str] = {}
    if "wandb" in runs:
        found |= {"WANDB_RUN_ID": runs["wandb"]["id"], "WANDB_RESUME": "allow"}
    if "mlflow" in runs:
        found["MLFLOW_RUN_ID"] = runs["mlflow"]["id"]
    return found
