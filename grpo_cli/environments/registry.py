"""The kinds of tools and environments by name: built in, or from packages that add some."""

import importlib
from typing import TYPE_CHECKING, Any

from grpo_cli.environments.contract import EnvironmentParams, EpisodeError, ToolParams
from grpo_cli.errors import GrpoError, UsageError, nearest
from grpo_cli.recipe.episode import KindConfig
from grpo_cli.recipe.kinds import KindDescription, added_kinds, describe, load_kind
from grpo_cli.rewards.scoring import explain_build

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "grpo.environments"
KINDS = {
    "tools": {
        "function": "function.FunctionToolParams",
        "python_code": "python_code.PythonCodeToolParams",
        "mcp": "mcp.McpToolParams",
    },
    "environment": {
        "python": "python.PythonEnvironmentParams",
        "reasoning_gym": "reasoning_gym.ReasoningGymEnvironmentParams",
        "textarena": "textarena.TextArenaEnvironmentParams",
        "mcp": "mcp.McpEnvironmentParams",
        "openenv": "openenv.OpenEnvEnvironmentParams",
        "verifiers": "verifiers.VerifiersEnvironmentParams",
    },
}
"""The kinds of this package by section of the recipe, each with its module in `kinds/` and its class."""
_BASES: dict[str, Any] = {"tools": ToolParams, "environment": EnvironmentParams}


def find_kind(section: str, name: str) -> Any:
    """Return the parameters' class of a kind of `tools` or `environment`; None if there is no such kind.

    Raises `EpisodeError` if the package that adds the kind cannot be imported, or adds something else.
    """
    if name in KINDS[section]:
        module, _, owner = KINDS[section][name].partition(".")
        return getattr(importlib.import_module(f"grpo_cli.environments.kinds.{module}"), owner)
    entry = added_kinds(ENTRY_POINT_GROUP).get(name)
    params = _load(entry) if entry is not None else None
    return params if params is not None and issubclass(params, _BASES[section]) else None


def kind_names(section: str) -> list[str]:
    """Return the names of all kinds of a section; imports none that is built in."""
    added = added_kinds(ENTRY_POINT_GROUP).items()
    own = [name for name, entry in added if issubclass(_load(entry), _BASES[section])]
    return [*KINDS[section], *own]


def list_kinds(section: str) -> list[KindDescription]:
    """Return the descriptions of all kinds of a section."""
    return [describe(name, find_kind(section, name)) for name in kind_names(section)]


def describe_kind(kind: str) -> dict[str, KindDescription]:
    """Return the descriptions of a kind by section of the recipe: `tools`, `environment`, or both.

    Raises `UsageError` if there is no such kind.
    """
    found = {section: find_kind(section, kind) for section in KINDS}
    described = {each: describe(kind, params) for each, params in found.items() if params}
    if not described:
        names = list(dict.fromkeys(name for each in KINDS for name in kind_names(each)))
        close = nearest(kind, names)
        fix = f"grpo env show {close}" if close else f"choose one of {', '.join(names)}"
        raise UsageError(f"there is no kind of tool or environment `{kind}`", fix)
    return described


def _load(entry: "EntryPoint") -> Any:
    return load_kind(entry, "kind", (ToolParams, EnvironmentParams), EpisodeError)


def open_kind(section: str, config: KindConfig) -> Any:
    """Return an entry's `ToolSource` or `EnvironmentSource`; raises `GrpoError`, whose path is a parameter."""
    try:
        return find_kind(section, config.kind).model_validate(config.params).open()
    except GrpoError:
        raise
    except (Exception, SystemExit) as error:  # a user's module raises anything
        name = "tool" if section == "tools" else section
        subject, key = f"the {name} ({config.kind})", "path" if "path" in config.params else ""
        raise explain_build(EpisodeError, subject, error, key) from error
