"""The reward kinds by name: built in, from packages that add some, or registered by a program.

To add a built-in kind, write its `RewardParams` in `kinds/` and list it in `BUILT_IN`. Another package adds
one through the entry-point group `grpo.rewards`. A kind is imported when a recipe names it.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TypeVar

from grpo_cli.errors import RewardError, UsageError, nearest
from grpo_cli.recipe.kinds import KindDescription, added_kinds, describe, load_kind
from grpo_cli.rewards.contract import RewardParams

ENTRY_POINT_GROUP = "grpo.rewards"
BUILT_IN = {
    "math": "math",
    "exact": "exact",
    "choice": "choice",
    "contains": "exact",
    "json": "json",
    "code": "code",
    "reasoning_gym": "reasoning_gym",
    "regex": "format",
    "think_format": "format",
    "answer_format": "format",
    "tag_count": "format",
    "reasoning_steps": "format",
    "language": "format",
    "length": "length",
    "cosine_length": "length",
    "soft_overlong": "length",
    "repetition": "length",
    "model": "model",
    "judge": "judge",
    "environment": "episode",
    "tool_use": "episode",
    "python": "python",
}
"""The kinds of this package, and the module in `kinds/` of each; the class of `tag_count` is `TagCountParams`."""
_FORMER_HOOKS = frozenset(
    "right_answer highest repeats_gold costly needs_episode default_name required_columns named_columns "
    "score_range refuse gold_source has_gold gold_fault vote reads_tokens reads_images waits score_easily".split()
)
"""What a kind defined in earlier versions, and `Meta`, `columns` and `gold` hold now."""
_REGISTERED_ENV = "GRPO_REGISTERED_REWARDS"
"""Passes registered kinds to the processes that this one starts: JSON of kind to [folder, module, class]."""

Params = TypeVar("Params", bound=type[RewardParams])
_registered: dict[str, type[RewardParams]] = {}


def find_kind(name: str) -> type[RewardParams] | None:
    """Return the parameters' class of a kind; None if there is no such kind.

    Raises:
        RewardError: The package that adds the kind cannot be imported, or adds something else.
    """
    if name in BUILT_IN:
        module = importlib.import_module(f"grpo_cli.rewards.kinds.{BUILT_IN[name]}")
        params: type[RewardParams] = getattr(module, f"{name.title().replace('_', '')}Params")
        return params
    if name not in _registered:
        if name in _inherited():
            _registered[name] = _check_hooks(_import_inherited(name))
        elif (entry := added_kinds(ENTRY_POINT_GROUP).get(name)) is not None:
            params = load_kind(entry, "reward kind", (RewardParams,), RewardError)
            _registered[name] = _check_hooks(params)
    return _registered.get(name)


def kind_names() -> list[str]:
    """Return the names of all kinds; imports none."""
    return list(
        dict.fromkeys([*BUILT_IN, *_registered, *_inherited(), *added_kinds(ENTRY_POINT_GROUP)])
    )


def load_kinds() -> dict[str, type[RewardParams]]:
    """Return all kinds by name, built-in ones first; raises what `find_kind` raises."""
    return {name: params for name in kind_names() if (params := find_kind(name)) is not None}


def register_reward(params: Params) -> Params:
    """Add a reward kind to this process and those it starts; usable as a decorator.

    Training runs in processes of its own, which import the class: define it in a file, not in a notebook cell.

    Raises:
        RewardError: The class has no `kind`, or that name is built in.
    """
    kind = getattr(params, "kind", None)
    if not isinstance(kind, str) or kind in BUILT_IN:
        raise RewardError(f"{params.__name__}.kind is {kind!r}", "give it a name of its own")
    _registered[kind] = _check_hooks(params)
    location = [_import_folder(params.__module__), params.__module__, params.__qualname__]
    os.environ[_REGISTERED_ENV] = json.dumps({**_inherited(), kind: location})
    return params


def _check_hooks(params: Params) -> Params:
    """Return a kind; raises `RewardError` if it is written for an earlier version, whose hooks nothing calls."""
    former = sorted(_FORMER_HOOKS & {name for base in params.__mro__ for name in vars(base)})
    if former:
        raise RewardError(
            f"the reward kind {params.__name__} is written for an earlier version of grpo: it defines "
            f"{', '.join(former)}",
            "write these as `meta`, `columns` and `gold` (docs/own-reward.md has an "
            "example), or install the version that the kind was written for",
        )
    return params


def _inherited() -> dict[str, list[str]]:
    registered: dict[str, list[str]] = json.loads(os.environ.get(_REGISTERED_ENV, "{}"))
    return registered


def _import_inherited(kind: str) -> type[RewardParams]:
    folder, module, name = _inherited()[kind]
    if module == "__main__":
        raise RewardError(
            f"the class of reward kind {kind!r} stands in a notebook or script, which other processes cannot "
            "import",
            "move it to a file, and register it from there",
        )
    if folder not in sys.path:
        sys.path.append(folder)
    params: type[RewardParams] = getattr(importlib.import_module(module), name)
    return params


def _import_folder(module: str) -> str:
    """Return the folder from which a module's top-level package is imported."""
    file = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
    path = Path(file or ".").resolve()
    return str(path.parent.parent if path.name == "__init__.py" else path.parent)


def list_kinds() -> list[KindDescription]:
    """Return the descriptions of all kinds, built-in ones first."""
    return [describe(kind, params) for kind, params in load_kinds().items()]


def describe_kind(kind: str) -> KindDescription:
    """Return the description of one kind.

    Raises:
        UsageError: There is no such kind.
    """
    params = find_kind(kind)
    if params is None:
        close = nearest(kind, kind_names())
        hint = f"grpo rewards show {close}" if close else f"choose one of {', '.join(kind_names())}"
        raise UsageError(f"there is no reward kind `{kind}`", hint)
    return describe(kind, params)
