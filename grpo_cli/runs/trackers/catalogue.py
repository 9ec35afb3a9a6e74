"""The trackers that `logging.report_to` may name, and the package that each one needs.

Source: `INTEGRATION_TO_CALLBACK` and the `is_…_available` functions of transformers 5.17,
`integrations/integration_utils.py`; a test holds the two together.
"""

import importlib.util
from collections.abc import Iterable

from grpo_cli.errors import install_extra

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
"""Packages that are not called like their tracker."""


def is_installed(tracker: str) -> bool:
    """Whether the package of a tracker can be imported; nothing is."""
    try:
        found = importlib.util.find_spec(MODULES[tracker])
    except ModuleNotFoundError:
        # Of a dotted name the parent is missing.
        return False
    # Any folder of that name is a module too, with nothing to load.
    return found is not None and found.origin is not None


def install_command(tracker: str) -> str:
    """What installs a tracker."""
    if tracker in _EXTRAS:
        return install_extra(tracker)
    return f"pip install {_PACKAGES.get(tracker, tracker.replace('_', '-'))}"


def expand(report_to: Iterable[str]) -> list[str]:
    """The trackers that a recipe asks for; `all` is every one that is installed."""
    named = list(report_to)
    return [name for name in MODULES if is_installed(name)] if ALL in named else named
