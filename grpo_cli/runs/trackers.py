"""The trackers of `logging.report_to`: their packages, their environment variables, and a run's runs in them.

Source: `INTEGRATION_TO_CALLBACK` and the `is_…_available` functions of transformers 5.17,
`integrations/integration_utils.py`; a test compares the two.
"""

import importlib.util
import re
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

from grpo_cli.errors import install_extra, pip
from grpo_cli.runs.files import SCHEMA_VERSION, read_file, write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.records import Trackers

MODULES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "comet_ml": "comet_ml",
    "swanlab": "swanlab",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "neptune": "neptune",
    "azure_ml": "azureml.core.run",
    "codecarbon": "codecarbon",
    "dagshub": "dagshub",
    "flyte": "flytekit",
    "kubeflow": "kubeflow.trainer",
}
"""Tracker → the module that transformers looks for."""
ALL = "all"
"""Every tracker that is installed."""
_EXTRAS = frozenset({"tensorboard", "wandb", "trackio", "mlflow"})
_PACKAGES = {"azure_ml": "azureml-mlflow", "flyte": "flytekit"}
"""Packages whose name is not the tracker's."""
_NO_TELEMETRY = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
}


def is_installed(tracker: str) -> bool:
    """Return whether the package of a tracker can be imported; nothing is imported."""
    try:
        spec = importlib.util.find_spec(MODULES[tracker])
    except ModuleNotFoundError:
        # The parent of a dotted name is missing.
        return False
    # Any folder of that name is a module too, with no file to load.
    return spec is not None and spec.origin is not None


def install_command(tracker: str) -> str:
    """Return the command that installs a tracker."""
    if tracker in _EXTRAS:
        return install_extra(tracker)
    return pip(f"install {_PACKAGES.get(tracker, tracker.replace('_', '-'))}")


def expand(report_to: Iterable[str]) -> list[str]:
    """Return the trackers that a recipe names; `all` is every one that is installed."""
    named = list(report_to)
    return [name for name in MODULES if is_installed(name)] if ALL in named else named


def lacks_wandb_login(environment: Mapping[str, str], working_dir: Path) -> bool:
    """Return whether W&B would stop a training to ask for a key: nothing holds one, and it is online.

    What a netrc or settings file says is W&B's to read.
    """
    mode = environment.get("WANDB_MODE") or _read_wandb_mode(working_dir) or "online"
    keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if mode != "online" or any(environment.get(name) for name in keys):
        return False
    if environment.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return False
    netrc = [environment["NETRC"]] if environment.get("NETRC") else ["~/.netrc", "~/_netrc"]
    config = environment.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    return not any(Path(file).expanduser().is_file() for file in (*netrc, f"{config}/settings"))


def _read_wandb_mode(working_dir: Path) -> str | None:
    """Return what `wandb offline` or `wandb online` set in a folder; None if neither was run there."""
    try:
        text = (working_dir / "wandb" / "settings").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^mode\s*[=:]\s*(\w+)", text, re.MULTILINE)
    return match[1] if match else None


def set_defaults(folder: RunFolder, name: str, environment: MutableMapping[str, str]) -> None:
    """Set where trackers write, under which `name`, and which runs they resume; what the user has set wins.

    TensorBoard and W&B write into the run folder. Trackio and MLflow keep one store, in which runs are compared.
    """
    defaults = {
        **_NO_TELEMETRY,
        "TENSORBOARD_LOGGING_DIR": str(folder.path / "tensorboard"),
        "WANDB_DIR": str(folder.path),
        "WANDB_DATA_DIR": str(folder.path / "wandb"),
        "WANDB_PROJECT": name,
        "MLFLOW_EXPERIMENT_NAME": name,
    }
    # With WANDB_DIR set, W&B no longer reads what `wandb offline` set in the working directory.
    if (mode := _read_wandb_mode(Path.cwd())) is not None:
        defaults["WANDB_MODE"] = mode
    if folder.resumption.is_file():
        # Trackio finds its run by the name.
        runs = read_trackers(folder, "runs")
        if "wandb" in runs:
            defaults |= {"WANDB_RUN_ID": runs["wandb"]["id"], "WANDB_RESUME": "allow"}
        if "mlflow" in runs:
            defaults["MLFLOW_RUN_ID"] = runs["mlflow"]["id"]
    for variable, value in defaults.items():
        environment.setdefault(variable, value)


def read_trackers(folder: RunFolder, part: Literal["runs", "failures"]) -> dict[str, Any]:
    """Return a part of `trackers.json` by tracker: what identifies its run, or why it failed."""
    entries: dict[str, Any] = read_file(folder.trackers, Trackers, missing={})[part]
    return entries


def write_trackers(folder: RunFolder, runs: Mapping[str, Any], failures: Mapping[str, str]) -> None:
    """Write `trackers.json`, from which a resumed run finds its runs in the trackers."""
    content = {"schema_version": SCHEMA_VERSION, "runs": runs, "failures": failures}
    write_json(folder.trackers, content)
