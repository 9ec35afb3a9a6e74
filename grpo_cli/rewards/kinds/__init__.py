"""One file a kind; `registry.py` lists them."""

import importlib
import importlib.util
from typing import Any

from grpo_cli.errors import SetupError, install_extra
from grpo_cli.issues import Issue


def find_missing(module: str, package: str, extra: str) -> list[Issue]:
    """Report that an optional package is not installed; imports nothing."""
    if importlib.util.find_spec(module) is not None:
        return []
    seen = f"{package} is not installed"
    return [Issue(seen, install_extra(extra), "kind", package=package)]


def import_optional(module: str, package: str, extra: str) -> Any:
    """Import a module of an optional package; raises `SetupError` if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SetupError(f"{package} cannot be imported: {error}", install_extra(extra)) from error
