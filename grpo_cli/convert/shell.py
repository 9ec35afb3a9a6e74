"""Shell scripts that start a training: the command, its flags, and the YAML that they name.

Source: `trl grpo`, `accelerate launch`, `torchrun`, and ms-swift's `swift rlhf`.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import CONVERTIBLE, by_key, read_keys
from grpo_cli.convert.shell_syntax import (
    DOUBT,
    UNKNOWN,
    Context,
    Parser,
    Step,
    Word,
    drop_here_documents,
)
from grpo_cli.convert.shell_values import (
    ASSIGNMENT,
    DOUBTS,
    Frame,
    Variables,
    is_open,
    show,
    write_doubt,
)
from grpo_cli.errors import recipe_error
from grpo_cli.issues import Location
from grpo_cli.recipe.yaml_tree import Node, as_node, merge, read_scalar, read_source, read_text

_NAME = re.compile(r"[A-Za-z_]\w*")
_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_SETTERS = ("read", "mapfile", "readarray", "getopts", "printf", "unset")
"""Commands that set the variables that they name."""
_PRINTERS = frozenset("echo printf [ [[ test : cat grep which type pgrep pip".split())
"""Commands that start nothing that they name."""
_COUNTED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))")
"""A variable that arithmetic changes."""


@dataclass
class Command:
    """A command that starts a training."""

    line: int
    tool: str
    """`trl`, `swift`, or the Python file that is started."""
    words: list[Word] = field(default_factory=list)
    """Its arguments."""
    launcher: list[Word] = field(default_factory=list)
    """Arguments of accelerate or torchrun before the Python file."""
    environment: dict[str, Word] = field(default_factory=dict)


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


class _Reader:
    """Runs the assignments of a script, and collects its commands that start a training."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.unknown: list[Word] = []
        """Commands that are known only when the script runs."""
        self.functions: dict[str, list[Step]] = {}
        self.variables = Variables()
        self._exported: dict[str, int] = {}

    def run_text(self, text: str, line: int, context: Context) -> None:
        """Run the text of a script whose first line has the number `line`."""
        script = Parser(text, line)
        self.functions |= script.functions
        self.run(script.steps, context)

    def run(self, steps: list[Step], context: Context) -> None:
        """Run commands under conditions."""
        for step in steps:
            self._run_step(step, (*context, *step.context))

    def _run_step(self, step: Step, context: Context) -> None:
        raw = step.words[1:] if step.words[0].text == "env" else step.words
        start = next((i for i, each in enumerate(raw) if not ASSIGNMENT.match(each.text)), len(raw))
        before, rest = raw[:start], raw[start:]
        if not rest or rest[0].text in _DECLARATIONS:
            options = [each.text for each in rest if each.text.startswith("-")]
            is_exported = bool(rest) and (rest[0].text == "export" or "x" in "".join(options))
            for word in [*before, *rest[1:]]:
                self.variables.assign(word, context, step.text)
                name = _NAME.match(word.text)
                if is_exported and name:
                    self._exported[name[0]] = word.line
            return
        words = [each for word in rest for each in self.variables.expand(word, context)]
        if words:
            self._run_command(words, before, step, context)

    def _run_command(
        self, words: list[Word], before: list[Word], step: Step, context: Context
    ) -> None:
        (first, line), rest = words[0], words[1:]
        texts = [each.text for each in words]
        shell = next((i for i, text in enumerate(texts[:-2]) if _is_shell(*texts[i : i + 2])), None)
        if first in ("for", "select"):
            name = _NAME.search(texts[1]) if rest else None
            self._forget([name[0]] if name else [], step, context, doubt=True)
        elif first.startswith("((") or first in ("let", *_SETTERS):
            names = texts[1:] if first in _SETTERS else _COUNTED.findall(step.text)
            names = names if first != "printf" else names[1:2] if names[:1] == ["-v"] else []
            self._forget([name for name in names if _NAME.fullmatch(name)], step, context)
        elif first in ("set", "shift"):
            self._set_arguments(words, step, context)
        elif first == "eval" or shell is not None:
            part = texts[1:] if shell is None else texts[shell + 2 : shell + 3]
            self.run_text(" ".join(part), line, context)
        elif first in self.functions:
            if first not in self.variables.calls:
                self._call(first, rest, step, context)
        elif first in _PRINTERS:
            return
        elif (command := _find_command(words)) is None:
            self.unknown += [Word(show(first), line)] if is_open(first) else []
        else:
            command.line = next((call.line for call in self.variables.calls.values()), line)
            environment = {
                name: Word(self.variables.expand_parameter(f"${name}", context, True, False), at)
                for name, at in self._exported.items()
                if name in self.variables.assignments
            }
            for text, at in before:
                variable, value = text.split("=", 1)
                environment[variable] = Word(
                    self.variables.substitute(value, context, is_split=False), at
                )
            command.environment = environment
            self.commands.append(command)

    def _call(self, name: str, words: list[Word], step: Step, context: Context) -> None:
        """Run the commands of a function with its arguments."""
        arguments = self.variables.assignments.pop("@", [])
        frame = Frame(context, step.words[0].line, step.text)
        self.variables.record("@", words, frame, is_list=True)
        self.variables.calls[name] = frame
        self.run(self.functions[name], context)
        del self.variables.calls[name]
        self.variables.assignments["@"] = arguments

    def _set_arguments(self, words: list[Word], step: Step, context: Context) -> None:
        texts = [each.text for each in words]
        if texts[0] == "set":
            if "--" not in texts:
                return
            kept = words[texts.index("--") + 1 :]
        else:
            arguments, _ = self.variables.look_up("@", context)
            number = int(texts[1]) if texts[1:] and texts[1].isdigit() else 1
            if arguments is None or any(UNKNOWN in each.text for each in arguments[:number]):
                return
            kept = arguments[number:]
        self.variables.record(
            "@", kept, Frame(context, step.words[0].line, step.text), is_list=True
        )

    def _forget(
        self, names: list[str], step: Step, context: Context, *, doubt: bool = False
    ) -> None:
        """Record that variables get values that are not in the script."""
        line = step.words[0].line
        for name in names:
            text = f"{UNKNOWN}${name}{UNKNOWN}" + (write_doubt(line, step.text) if doubt else "")
            words = [] if step.words[0].text == "unset" else [Word(text, line)]
            self.variables.record(name, words, Frame(context, line, step.text))


def _is_shell(name: str, option: str) -> bool:
    return (
        name.rpartition("/")[2] in ("bash", "sh", "zsh")
        and re.fullmatch("-[a-z]*c", option) is not None
    )


def read_command(text: str, source: FilePath) -> Command:
    """Return the command of a shell script that starts a training with TRL or ms-swift.

    Raises:
        RecipeError: There is none, or several.
    """
    reader = _Reader()
    reader.run_text(drop_here_documents(text), 1, ())
    if not reader.commands:
        for steps in reader.functions.values():
            reader.run(steps, ())
    commands = reader.commands
    meant = [each for each in commands if each.tool in ("trl", "swift")] or commands
    if len(meant) != 1:
        where = Location(str(source), meant[0].line if meant else 1, 1)
        if not meant and reader.unknown:
            name, line = reader.unknown[0]
            cause = f"runs `{name}`, which is known only when the script runs"
            fix = "write the command that it stands for"
            raise recipe_error(cause, fix, location=replace(where, line=line))
        if not meant:
            cause = "starts no training of TRL or ms-swift"
            raise recipe_error(cause, CONVERTIBLE, location=where)
        starts = ", ".join(str(command.line) for command in meant)
        cause = f"starts {len(meant)} trainings (lines {starts})"
        raise recipe_error(cause, "keep one of them in the file", location=where)
    return meant[0]


def _find_command(words: list[Word]) -> Command | None:
    names = [word.text.rpartition("/")[2] for word in words]
    for index, name in enumerate(names):
        line, following = words[index].line, names[index + 1 : index + 2]
        if name == "trl" and following == ["grpo"]:
            return Command(line, "trl", words[index + 2 :])
        if name in ("swift", "megatron") and following == ["rlhf"]:
            return Command(line, "swift", words[index + 2 :])
        is_launcher = name in ("accelerate", "torchrun", "deepspeed", "accelerate-launch")
        if is_launcher or name.startswith("python") or (index == 0 and is_open(words[0].text)):
            start = index + (0 if is_open(words[index].text) else 1)
            start += following == ["launch"]
            if "trl.scripts.grpo" in names[start:]:
                at = names.index("trl.scripts.grpo", start)
                return Command(line, "trl", words[at + 1 :], words[start : at - 1])
            at = next((i for i in range(start, len(names)) if names[i].endswith(".py")), -1)
            if at > 0 and any(_is_argument(word.text) for word in words[at:]):
                return Command(line, words[at].text, words[at + 1 :], words[start:at])
    return None


def _is_argument(text: str) -> bool:
    return text.startswith("--") or is_open(text)


def _name_flag(text: str) -> str:
    """Return the name in `--name=value`."""
    return text.lstrip("-").partition("=")[0].replace("-", "_")


def _read_values(
    words: list[Word], lines: dict[str, int], *, is_one: bool = False
) -> dict[str, list[str]]:
    """Return flags and the texts of their values; words that may hold any flags are keys themselves."""
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
        elif name and not (is_one and flags[name]):
            flags[name].append(text)
            if is_open(text) and re.search(r"@\]?\}?$", show(text)):
                # The flag may be a switch, and the words after it any flags.
                flags[text] = [text]
                lines[text] = line
    return flags


def read_flags(command: Command, source: FilePath) -> Flags:
    """Return a command's flags, with the YAML that `--config` names.

    Raises:
        RecipeError: The YAML cannot be read.
    """
    lines = {name: word.line for name, word in command.environment.items()}
    launcher = _read_values(command.launcher, lines, is_one=True)
    if "config_file" in launcher:
        launcher["accelerate_config"] = launcher.pop("config_file")
        lines["accelerate_config"] = lines["config_file"]
    environment = {name: [word.text] for name, word in command.environment.items()}
    texts = {**launcher, **environment, **_read_values(command.words, lines)}
    written = {name: name if name in environment else f"--{name}" for name in texts}
    for name, renamed in by_key(read_keys("launcher-names")).items():
        if name in texts:
            lines.setdefault(renamed, lines[name])
            written.setdefault(renamed, written[name])
            texts.setdefault(renamed, texts.pop(name))
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
