"""Other tools' reward functions as reward kinds of a recipe, where the meaning agrees.

Owns the names and what each one measures. Weights are put to the rewards they belong to.
Source: `trl/scripts/grpo.py` and `trl/rewards/` of trl 1.16; open-r1's `src/open_r1/rewards.py`.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import Ledger
from grpo_cli.errors import nearest
from grpo_cli.recipe.explanation import Path, dotted


@dataclass(frozen=True)
class Translated:
    """A reward of a recipe, or the reason why there is none."""

    entry: dict[str, Any] | None
    note: str = ""


Table = dict[str, Callable[[], Translated]]
"""A tool's own reward names; what each is here."""

BOXED: dict[str, Any] = {"kind": "math", "answer": "solution", "extract": ["boxed"]}
"""TRL and open-r1 read the gold from the column `solution`, and count what stands in a box."""


def trl_rewards() -> Table:
    """The names that `trl grpo` knows."""
    return {
        "accuracy_reward": lambda: Translated(
            dict(BOXED), "other places: `extract: [boxed, hashes, answer_tag, last_number]`"
        ),
        "reasoning_accuracy_reward": lambda: Translated(
            dict(BOXED),
            "what follows </think> counts; TRL gave 0 where it is missing, which think_format does",
        ),
        "think_format_reward": lambda: Translated({"kind": "think_format"}),
        "get_soft_overlong_punishment": lambda: Translated(
            {"kind": "soft_overlong", "max_length": 1280, "cache": 256}, "the lengths TRL fixes"
        ),
    }


def take_rewards(
    ledger: Ledger,
    table: Table,
    *,
    inside: Path = (),
    model_key: str | None = None,
    default: tuple[str, ...] = (),
    folders: tuple[FilePath, ...],
) -> None:
    """Takes a list of reward functions and their weights.

    Args:
        ledger: The account.
        table: The tool's own names.
        inside: The mapping of the source that holds the lists.
        model_key: The key that names a reward model, which comes first.
        default: The rewards the tool takes where none are named.
        folders: Where modules of the user's may lie: beside the recipe first.
    """
    found: list[tuple[Path | None, Translated]] = []
    if model_key is not None and ledger.get(model_key) is not None:
        found.append(
            ((model_key,), Translated({"kind": "model", "path": str(ledger.get(model_key))}))
        )
    key = (*inside, "reward_funcs")
    names = list_names(ledger.get(*key))
    alone = isinstance(ledger.get(*key), str)
    for index, name in enumerate(names or ()):
        place = key if alone else (*key, index)
        found.append((place, _translate(name, table, ledger.tool, folders)))
    if names is None:
        found += [(None, table[name]()) for name in default]
    if names is not None:
        ledger.credit(key, "rewards")
    elif ledger.node(*key) is not None:
        ledger.drop(key, "should be a list of names")
    weights = _take_weights(ledger, (*inside, "reward_weights"), len(found))
    _write(ledger, found, weights, names is None)


def list_names(given: Any) -> list[str] | None:
    """The names of a list, or of one name alone; None for anything else."""
    if isinstance(given, str):
        return [given]
    return [str(name) for name in given] if isinstance(given, list) else None


def _write(
    ledger: Ledger,
    found: list[tuple[Path | None, Translated]],
    weights: list[float] | None,
    by_default: bool,
) -> None:
    rewards: list[dict[str, Any]] = []
    for index, (key, translated) in enumerate(found):
        if translated.entry is None:
            if key is not None:
                ledger.drop(key, f"`{ledger.get(*key)}`: {translated.note}")
            continue
        entry = dict(translated.entry)
        if weights is not None:
            entry["weight"] = weights[index]
        target = f"rewards.{len(rewards)}"
        rewards.append(entry)
        note = translated.note
        if key is None:
            note = f"{ledger.tool}'s default" + (f"; {note}" if note else "")
            ledger.comments[target] = note
        else:
            ledger.credit(key, target, note)
            said = _name(ledger, key)
            ledger.comments[target] = f"{said}; {note}" if note else said
    if rewards:
        ledger.recipe["rewards"] = rewards
    if not found or (not rewards and not by_default):
        ledger.to_do["rewards"] = "write at least one reward; `grpo rewards list` names the kinds"


def _name(ledger: Ledger, key: Path) -> str:
    listed = key[:-1] if isinstance(key[-1], int) else key
    return f"{dotted(listed)}: {ledger.get(*key)}"


def _take_weights(ledger: Ledger, key: Path, count: int) -> list[float] | None:
    weights = ledger.get(*key)
    if weights is None:
        if ledger.node(*key) is not None:
            ledger.drop(key, "empty, so the default holds")
        return None
    if not isinstance(weights, list) or len(weights) != count:
        if not count:
            ledger.drop(key, "no rewards are named; set `weight` on each entry of `rewards`")
            return None
        have = len(weights) if isinstance(weights, list) else 1
        ledger.drop(key, f"{have} weights for {count} rewards, which {ledger.tool} refuses too")
        return None
    ledger.credit(key, "rewards")
    return weights


def _translate(name: str, table: Table, tool: str, folders: tuple[FilePath, ...]) -> Translated:
    if name in table:
        return table[name]()
    if "/" in name:
        return Translated({"kind": "model", "path": name}, "a reward model")
    module, _, function = name.rpartition(".")
    if module:
        return Translated({"kind": "python", "path": place_function(module, function, folders)})
    close = nearest(name, table)
    hint = f"; did you mean `{close}`?" if close else ""
    return Translated(None, f"unknown to {tool}{hint}")


def name_file(file: FilePath, folder: FilePath) -> str:
    """Return how a recipe in a folder names a file."""
    text = os.path.relpath(file, folder)
    return text if text.startswith(".") else f"./{text}"


def place_function(module: str, function: str, folders: tuple[FilePath, ...]) -> str:
    """How a recipe names a function: by its file where that lies at hand, else by its module.

    Args:
        module: Dotted name.
        function: The function's name in it.
        folders: Where the file may lie, the recipe's folder first.
    """
    relative = FilePath(*module.split("."))
    for folder in folders:
        for file in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if file.is_file():
                return f"{name_file(file, folders[0])}:{function}"
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is not None:
        return f"{module}:{function}"
    return f"./{relative.with_suffix('.py')}:{function}"
