"""The flags of a command in a shell script that starts a training, and the YAML that they name.

Source: `HfArgumentParser` of transformers 5.24; the launchers of accelerate 1.15 and torch 2.13.
"""

import re
from collections.abc import Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_cli.convert.key_report import by_key, read_keys
from grpo_cli.convert.shell import Command
from grpo_cli.convert.shell_syntax import DOUBT, UNKNOWN, Word
from grpo_cli.convert.shell_values import DOUBTS, find_beside, is_open, show
from grpo_cli.errors import recipe_error
from grpo_cli.issues import Location
from grpo_cli.recipe.grpo_fields import read_grpo_fields
from grpo_cli.recipe.yaml_tree import Node, as_node, merge, read_scalar, read_source, read_text

_ON = tuple(
    name
    for name, each in read_grpo_fields().items()
    if each.annotation.startswith("bool") and each.default is True
)
"""Switches that are on by default, for which the parser of transformers has `--no_NAME`."""


class Flag(NamedTuple):
    """A flag of a command."""

    line: int
    values: list[str]
    written: str
    """Its name in the script."""

    @property
    def text(self) -> str:
        """The flag and its values as they are written."""
        return show(" ".join([self.written, *self.values]))


@dataclass
class Flags:
    """The flags of a command, and what the script leaves open."""

    tree: Node
    """Flags with values, with the YAML that `--config` names, as a config."""
    launch: set[str]
    """Those of the launcher."""
    unset: dict[str, Flag] = field(default_factory=dict)
    """Flags with variables that the script does not set."""
    to_do: dict[str, list[str]] = field(default_factory=dict)
    """Flag → what may change it; under an empty name, what may be any flags."""


def _read_values(words: list[Word], switches: Container[str] | None = None) -> dict[str, Flag]:
    """Return flags by name; words that may be any flags are names themselves, others have an empty one.

    Args:
        words: The arguments of a command.
        switches: Of a launcher, whose other flags have one value each: the flags without one.
    """
    flags: dict[str, Flag] = {}
    name = ""
    for text, line in words:
        written, equals, value = text.partition("=")
        is_made = text.startswith("-") and (UNKNOWN in written or DOUBT in written)
        if is_made or (is_open(text) and (text[0] == DOUBT or not name or flags[name].values)):
            flags[text] = Flag(line, [text], "")
            name = "" if is_made else name
        elif re.match(r"--?[A-Za-z]", written):
            name = written.lstrip("-").replace("-", "_")
            flags[name] = Flag(line, [value] if equals else [], written)
            name = "" if switches is not None and (equals or name in switches) else name
        elif not name or (switches is not None and flags[name].values):
            flags.setdefault("", Flag(line, [], "")).values.append(text)
        else:
            flags[name].values.append(text)
            if is_open(text) and re.search(r"\$(?:@|\{@\}|\{\w+\[@\]\})$", show(text)):
                # The flag may be a switch, and the words after it any flags.
                flags[text] = Flag(line, [text], "")
    return flags


def _read_launcher(command: Command) -> dict[str, Flag]:
    """Return the flags of the launcher, and variables for it, that a recipe has; note the others."""
    table, names = read_keys("launchers"), by_key(read_keys("launcher-names"))
    flags: dict[str, Flag] = {}
    for name, flag in _read_values(command.launcher, table["switches"].split()).items():
        target, text = by_key(table["names"]).get(name), "".join(flag.values)
        is_number = text.isdigit() or UNKNOWN in text
        if UNKNOWN in name or DOUBT in name:
            flags[name] = flag
        elif target is not None and (is_number or target not in table["numbers"].split()):
            flags[target] = flag
        elif name not in ("", *table["python"].split()):
            command.notes.append((Word(flag.text, flag.line), table["reason"]))
    if command.tool == "swift":
        names |= {name: key for name, key in read_keys("swift-names").items() if name.isupper()}
    for name, (value, line) in command.environment.items():
        if name in names:
            flags.setdefault(names[name], Flag(line, [value], name))
        else:
            reason = "set it in the environment of `grpo train`"
            command.notes.append((Word(name, line), reason))
    _count_processes(flags)
    return flags


def _count_processes(flags: dict[str, Flag]) -> None:
    """Turn the processes of a machine into those of all machines, which a recipe counts."""
    count = flags.pop("nproc_per_node", None)
    if count is None or "num_processes" in flags:
        return
    text = "".join(count.values)
    machines = "".join(flags["num_machines"].values) if "num_machines" in flags else "1"
    if text.isdigit() and machines.isdigit():
        text = str(int(text) * int(machines))
    elif machines != "1":
        text = f"{UNKNOWN}{show(text)} on each of {show(machines)} machines{UNKNOWN}"
    flags["num_processes"] = count._replace(values=[text])


def read_flags(command: Command, source: Path, *, is_read: bool) -> Flags:
    """Return a command's flags, with the YAML that `--config` names.

    Args:
        command: The command; gets notes on what is not a flag of the training.
        source: The shell script.
        is_read: Whether the Python file that the command starts is read.

    Raises:
        RecipeError: The YAML cannot be read.
    """
    launcher = _read_launcher(command)
    flags = {**launcher, **_read_values(command.words)}
    others = flags.pop("", None)
    files = (".yaml", ".yml", ".json")
    if others is not None and command.tool == "swift" and others.text.endswith(files):
        flags.setdefault("config", others)
    elif others is not None:
        note = Word(others.text, others.line), "is not a flag, and not read"
        command.notes.append(note)
    for name in _ON:
        off = flags.get(f"no_{name}")
        if off is not None and not off.values:
            flags.setdefault(name, off._replace(values=["false"]))
            flags = {key: flag for key, flag in flags.items() if is_read or flag is not off}
    where = Location(str(source), command.line, 1)
    result = Flags(Node({}, where), {*launcher})
    values: dict[str, Any] = {}
    for name, flag in flags.items():
        place, bare = f"of {source.name}", [DOUBTS.sub("", part) for part in flag.values]
        is_any, is_unset = UNKNOWN in name or DOUBT in name, UNKNOWN in "".join(bare)
        to_do = result.to_do.setdefault("" if is_any else name, [])
        if is_any and is_unset:
            why = "which is known only when it runs; write the flags that it stands for"
            to_do.append(f"line {flag.line} {place} passes `{show(name)}`, {why}")
        elif is_unset:
            result.unset[name] = flag
        elif not is_any:
            scalars = [read_scalar(part) for part in bare]
            values[name] = True if not scalars else scalars[0] if len(scalars) == 1 else scalars
        what = "add or change flags" if is_any else f"change `{flag.written}`"
        for doubt in dict.fromkeys(DOUBTS.findall(" ".join(flag.values))):
            line, _, text = doubt.partition("\t")
            to_do.append(f"line {line} {place} (`{text}`) may {what}; write the values that apply")
    config = " ".join(flags["config"].values) if "config" in flags else ""
    values.pop("config", None)
    is_unset = result.unset.pop("config", None) is not None
    places = {name: replace(where, line=flags[name].line) for name in values}
    nodes = {name: as_node(value, places[name]) for name, value in values.items()}
    result.tree = Node(nodes, where)
    result.tree.key_locations.update(places)
    if "config" in flags:
        _merge_config(result, config, is_unset, flags["config"].line, command, source)
    return result


def _merge_config(
    result: Flags, config: str, is_unset: bool, line: int, command: Command, source: Path
) -> None:
    """Take the YAML that `--config` names: a file, or what the script writes to it."""
    where = Location(str(source), command.line, 1)
    written = {Path(name).name: text for name, text in command.files.items()}
    name, path = config.rpartition("/")[2], find_beside(config, source.parent)
    if not config and not is_unset:
        cause, fix = "`--config` has no value", "name the YAML after it, or remove it"
        raise recipe_error(cause, fix, location=where)
    if text := written.get(name, ""):
        base = read_text(text, f"{source}, {config}")
    elif name in written or (path is None and (is_unset or result.to_do.get("config"))):
        text = f"line {line} of {source.name} names a YAML that is known only when it runs"
        result.to_do.setdefault("", []).append(f"{text}; convert that YAML, or write its values")
        return
    elif path is None:
        cause = f"names the YAML `{config}`, which was not found"
        raise recipe_error(cause, "run `grpo convert` where the script runs", location=where)
    else:
        base = read_text(read_source(path), str(path))
    if not isinstance(base.value, dict):
        fix = "name the YAML of the training"
        raise recipe_error("is not a config", fix, location=base.location)
    result.tree = merge(base, result.tree)
