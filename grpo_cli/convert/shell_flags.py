"""The flags of a command in a shell script that starts a training, and the YAML that they name.

Source: `HfArgumentParser` of transformers 5.24; the launchers of accelerate 1.15 and torch 2.13.
"""

import re
from collections.abc import Container
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import by_key, read_keys
from grpo_cli.convert.shell import Command
from grpo_cli.convert.shell_syntax import DOUBT, UNKNOWN, Word
from grpo_cli.convert.shell_values import DOUBTS, is_open, show
from grpo_cli.errors import recipe_error
from grpo_cli.issues import Location
from grpo_cli.recipe.grpo_fields import read_grpo_fields
from grpo_cli.recipe.yaml_tree import Node, as_node, merge, read_scalar, read_source, read_text


@dataclass
class Flags:
    """The flags of a command, and what the script leaves open."""

    tree: Node
    """Flags with values, with the YAML that `--config` names, as a config."""
    unset: dict[str, str] = field(default_factory=dict)
    """Flag → its value as it is written, which holds variables that the script does not set."""
    unknown: list[str] = field(default_factory=list)
    """Words as they are written that may hold any flags."""
    doubts: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Flag → lines and texts of commands that may change its value; those of any flag under an empty name."""
    lines: dict[str, int] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    """Flag → its name in the script."""


def _name_flag(text: str) -> str:
    """Return the name in `--name=value`."""
    return text.lstrip("-").partition("=")[0].replace("-", "_")


def _read_values(
    words: list[Word], lines: dict[str, int], switches: Container[str] | None = None
) -> dict[str, list[str]]:
    """Return flags and the texts of their values; words that may hold any flags are keys themselves.

    Args:
        words: The arguments of a command.
        lines: Gets the line of each flag.
        switches: Of a launcher, whose other flags have one value each: the flags without one.
    """
    flags: dict[str, list[str]] = {}
    name = ""
    for text, line in words:
        flag, equals, value = text.partition("=")
        is_made = flag.startswith("-") and (UNKNOWN in flag or DOUBT in flag)
        if is_made or (is_open(text) and (text[0] == DOUBT or not name or flags[name])):
            flags[text] = [text]
            lines[text] = line
            name = "" if is_made else name
        elif re.match(r"--?[A-Za-z]", flag):
            name = _name_flag(flag)
            flags[name] = [value] if equals else []
            lines[name] = line
            name = "" if switches is not None and (equals or name in switches) else name
        elif not name or (switches is not None and flags[name]):
            flags.setdefault("", []).append(text)
            lines.setdefault("", line)
        else:
            flags[name].append(text)
            if is_open(text) and re.search(r"\$(?:@|\{@\}|\{\w+\[@\]\})$", show(text)):
                # The flag may be a switch, and the words after it any flags.
                flags[text] = [text]
                lines[text] = line
    return flags


def _read_launcher(command: Command, lines: dict[str, int]) -> dict[str, list[str]]:
    """Return what the recipe's `launch` takes of a launcher's flags; note the others."""
    table = read_keys("launchers")
    at: dict[str, int] = {}
    texts: dict[str, list[str]] = {}
    flags = _read_values(command.launcher, at, table["switches"].split())
    flags.pop("", None)
    for name, values in flags.items():
        target = by_key(table["names"]).get(name)
        is_number = "".join(values).isdigit() or UNKNOWN in "".join(values)
        if target is not None and (is_number or target not in table["numbers"].split()):
            texts[target], lines[target] = values, at[name]
        elif UNKNOWN in name or DOUBT in name:
            texts[name], lines[name] = values, at[name]
        elif name not in table["python"].split():
            flag = f"{'--' if len(name) > 1 else '-'}{name}"
            text = show(" ".join([flag, *values]))
            command.notes.append((Word(text, at[name]), table["reason"]))
    return texts


_ON = tuple(
    name
    for name, each in read_grpo_fields().items()
    if each.annotation.startswith("bool") and each.default == "True"
)
"""Switches that are on by default, for which the parser of transformers has `--no_NAME`."""


def _count_processes(
    texts: dict[str, list[str]], lines: dict[str, int], written: dict[str, str]
) -> None:
    """Turn the processes of a machine into those of all machines, which a recipe counts."""
    count = texts.pop("nproc_per_node", None)
    if count is None or "num_processes" in texts:
        return
    machines = "".join(texts.get("num_machines", ["1"]))
    text = "".join(count)
    if text.isdigit() and machines.isdigit():
        text = str(int(text) * int(machines))
    elif machines != "1":
        text = f"{UNKNOWN}{show(text)} on each of {show(machines)} machines{UNKNOWN}"
    texts["num_processes"] = [text]
    lines["num_processes"] = lines["nproc_per_node"]
    written["num_processes"] = "--num_processes"


def read_flags(command: Command, source: FilePath, *, is_read: bool) -> Flags:
    """Return a command's flags, with the YAML that `--config` names.

    Args:
        command: The command; gets notes on what is not a flag of the training.
        source: The shell script.
        is_read: Whether the Python file that the command starts is read.

    Raises:
        RecipeError: The YAML cannot be read.
    """
    lines = {name: word.line for name, word in command.environment.items()}
    launcher = _read_launcher(command, lines)
    environment = {name: [word.text] for name, word in command.environment.items()}
    texts = {**environment, **launcher, **_read_values(command.words, lines)}
    if "" in texts:
        text = show(" ".join(texts.pop("")))
        command.notes.append((Word(text, lines[""]), "is not a flag, and not read"))
    written = {name: name if name in environment else f"--{name}" for name in texts}
    renames = {**by_key(read_keys("launcher-names")), **{f"no_{name}": name for name in _ON}}
    for name, renamed in renames.items():
        if name not in texts or (name.startswith("no_") and texts[name]):
            continue
        lines.setdefault(renamed, lines[name])
        written.setdefault(renamed, written[name])
        texts.setdefault(renamed, ["false"] if name.startswith("no_") else texts[name])
        if not (is_read and name.startswith("no_")):
            del texts[name]
    _count_processes(texts, lines, written)
    where = Location(str(source), command.line, 1)
    result = Flags(Node({}, where), lines=lines, written=written)
    values: dict[str, Any] = {}
    for name, parts in texts.items():
        is_any = UNKNOWN in name or DOUBT in name
        for doubt in DOUBTS.findall(" ".join(parts)):
            if name not in environment:
                line, _, text = doubt.partition("\t")
                result.doubts.setdefault("" if is_any else name, []).append((int(line), text))
        bare = [DOUBTS.sub("", part) for part in parts]
        if is_any and UNKNOWN in "".join(bare):
            result.unknown.append(name)
        elif UNKNOWN in "".join(bare) and name not in environment:
            result.unset[name] = show(" ".join(parts))
        elif not is_any:
            scalars = [read_scalar(show(part) if UNKNOWN in part else part) for part in bare]
            values[name] = True if not scalars else scalars[0] if len(scalars) == 1 else scalars
    config = result.unset.pop("config", None) or values.pop("config", None)
    places = {name: replace(where, line=lines[name]) for name in values}
    result.tree = Node(
        {name: as_node(value, places[name]) for name, value in values.items()}, where
    )
    result.tree.key_locations.update(places)
    if config is not None:
        result.tree = merge(_read_config(FilePath(str(config)), source, where), result.tree)
    return result


def _read_config(config: FilePath, source: FilePath, where: Location) -> Node:
    """Return the YAML that `--config` names."""
    path = next((each for each in (config, source.parent / config) if each.exists()), None)
    if path is None:
        cause = f"names the YAML `{config}`, which is not here"
        raise recipe_error(cause, "run `grpo convert` where the script runs", location=where)
    base = read_text(read_source(path), str(path))
    if not isinstance(base.value, dict):
        raise recipe_error(
            "is not a config", "name the YAML of the training", location=base.location
        )
    return base
