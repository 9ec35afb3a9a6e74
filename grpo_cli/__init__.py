"""`grpo`: train, measure and ship language models with GRPO from YAML recipes.

The names below are the Python API. Importing them loads nothing heavy, and they print nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_cli.api import check, evaluate, export, load_recipe, probe, train
    from grpo_cli.rewards.registry import register_reward
    from grpo_cli.runs.run import Run

__version__ = "0.1.0"
__all__ = ["Run", "check", "evaluate", "export", "load_recipe", "probe", "register_reward", "train"]
_MODULES = {"Run": "runs.run", "register_reward": "rewards.registry"}


def __getattr__(name: str) -> Any:
    """Import a name of the API when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
