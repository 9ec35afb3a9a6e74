"""Lists of reward functions, and their weights, as a recipe's rewards.

Source: `trl/scripts/grpo.py` of trl 1.16; open-r1, `rewards.py`; axolotl, docs/grpo.qmd.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.convert.key_report import EMPTY, KeyReport, read_keys, settled
from grpo_cli.errors import nearest
from grpo_cli.recipe.yaml_tree import KeyPath, dotted


@dataclass(frozen=True)
class Reward:
    """A reward of a recipe, or the reason why there is none."""

    entry: dict[str, Any] | None
    note: str = ""


Rewards = Mapping[str, Reward]
"""A tool's reward names, and what each is in a recipe."""


def read_rewards(name: str) -> Rewards:
    """Return a tool's rewards, a part of `keys.yaml`."""
    entries = read_keys(name).items()
    return {key: Reward(each.get("entry"), each.get("note", "")) for key, each in entries}


TRL_REWARDS = read_rewards("trl-rewards")
_MODEL_KEY = "reward_model_name_or_path"


def take_rewards(
    report: KeyReport, table: Rewards, folders: tuple[Path, ...], default: tuple[str, ...] = ()
) -> None:
    """Take a list of reward functions and their weights; `table` has the tool's own names.

    A reward model, if a key of its own names one, comes first.
    """
    rewards: list[tuple[KeyPath | None, Reward]] = []
    if report.tool == "TRL" and report.get(_MODEL_KEY) is not None:
        entry = {"kind": "model", "path": str(report.get(_MODEL_KEY))}
        rewards.append(((_MODEL_KEY,), Reward(entry)))
    names = listed_rewards(report)
    if names is not None:
        report.settle(("reward_funcs",), "rewards")
        alone = isinstance(report.get("reward_funcs"), str)
        for index, name in enumerate(names):
            key: KeyPath = ("reward_funcs",) if alone else ("reward_funcs", index)
            rewards.append((key, _translate(name, table, report.tool, folders)))
    else:
        report.drop_all(["reward_funcs"], "should be a list of names")
        rewards += [(None, table[name]) for name in default]
    weights = _take_weights(report, len(rewards))
    for (origin, reward), weight in zip(rewards, weights, strict=True):
        _write(report, origin, reward, {} if weight is None else {"weight": weight})
    if "rewards" not in report.recipe:
        text = "write at least one reward; `grpo rewards list` names the kinds"
        text += f". The config names {', '.join(names)}" if names else ""
        unused = report.get("reward_weights")
        text += "" if unused is None else f". Their weights (`weight`) were {unused}"
        report.to_do.setdefault("rewards", text)
    elif "rewards" not in report.to_do:
        # Those of a script are named there, with their lines.
        pairs = zip(rewards, weights, strict=True)
        lost = [
            (key, reward.note, weight) for (key, reward), weight in pairs if reward.entry is None
        ]
        for index, (place, note, weight) in enumerate(lost, len(report.recipe["rewards"])):
            name = report.get(*place) if place else "a default"
            share = "" if weight is None else f", weight: {weight}"
            report.to_do[f"rewards.{index}"] = (
                f"`{name}` of the config is missing ({note}); write a reward for it\n"
                f"- {{kind: python, path: './FILE.py:{name}'{share}}}"
            )


def take_parameters(
    report: KeyReport,
    rewards: Rewards,
    parameters: str,
    listed: Sequence[str],
    adapt: Callable[[str, Any], Any],
) -> Rewards:
    """Return a tool's rewards with the parameters for which the config has keys of their own.

    `parameters` is the part of `keys.yaml` that says what each key is for, and `listed` the config's rewards;
    `adapt` returns the value of a parameter for a key and its value, or None.
    """
    entries = {name: dict(reward.entry or {}) for name, reward in rewards.items()}
    for key, (owner, name, default) in read_keys(parameters).items():
        value = adapt(key, default if report.get(key) is None else report.get(key))
        entries[owner] |= {} if value is None else {name: value}
        if owner in listed:
            report.take({key: settled(f"rewards.{owner}.{name}")})
        else:
            report.drop_all((key,), f"`{owner}` is not among the rewards, so nothing reads it")
    return {name: Reward(entries[name] or None, each.note) for name, each in rewards.items()}


def listed_rewards(report: KeyReport) -> list[str] | None:
    """Return the names in `reward_funcs`, which may be one name; None if it is neither."""
    listed = report.get("reward_funcs")
    names = [listed] if isinstance(listed, str) else listed
    return [str(name) for name in names] if isinstance(names, list) else None


def _write(report: KeyReport, key: KeyPath | None, reward: Reward, weight: dict[str, Any]) -> None:
    written = report.recipe.get("rewards", [])
    target, source = f"rewards.{len(written)}", f"{report.tool}'s default"
    if key is not None and reward.entry is None:
        report.drop(key, f"`{report.get(*key)}`: {reward.note}")
        return
    if key is not None:
        report.settle(key, target, reward.note)
        source = f"{dotted(report.origin(key[:1]))}: {report.get(*key)}"
    report.recipe["rewards"] = [*written, {**(reward.entry or {}), **weight}]
    report.comment(target, source, reward.note)


def _take_weights(report: KeyReport, count: int) -> list[Any]:
    weights = report.get("reward_weights")
    if isinstance(weights, list) and len(weights) == count:
        report.settle(("reward_weights",), "rewards")
        return weights
    reason = f"set `weight` on each entry of `rewards` (they were {weights})"
    report.drop_all(["reward_weights"], EMPTY if weights is None else reason)
    return [None] * count


def _translate(name: str, table: Rewards, tool: str, folders: tuple[Path, ...]) -> Reward:
    module, _, function = name.rpartition(".")
    if name in table:
        return table[name]
    if "/" in name:
        return Reward({"kind": "model", "path": name}, "a reward model")
    if module:
        return Reward({"kind": "python", "path": place_function(module, function, folders)})
    close = nearest(name, table)
    hint = f"; did you mean `{close}`?" if close else ""
    return Reward(None, f"unknown to {tool}{hint}")


def name_file(file: Path, folder: Path) -> str:
    """Return how a recipe in a folder names a file."""
    text = os.path.relpath(file, folder)
    return text if text.startswith(".") else f"./{text}"


def place_function(module: str, function: str, folders: tuple[Path, ...]) -> str:
    """Return how a recipe in the first of some folders names a function: by its file if one has it."""
    relative = Path(*module.split("."))
    for folder in folders:
        for file in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if file.is_file():
                return f"{name_file(file, folders[0])}:{function}"
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        return f"{module}:{function}"
    return f"./{relative.with_suffix('.py')}:{function}"
