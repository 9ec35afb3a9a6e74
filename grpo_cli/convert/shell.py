"""Shell scripts that start a training: the command, its flags, and the YAML that they name.

Source: `trl grpo`, `accelerate launch`, `torchrun`, and ms-swift's `swift rlhf`.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from grpo_cli.convert.key_report import CONVERTIBLE, read_words
from grpo_cli.convert.shell_syntax import (
    COMMENT,
    PROCESS,
    UNKNOWN,
    Context,
    Parser,
    Step,
    Word,
    drop_here_documents,
)
from grpo_cli.convert.shell_values import (
    ASSIGNMENT,
    Frame,
    Variables,
    find_beside,
    is_open,
    is_possible,
    show,
    write_doubt,
)
from grpo_cli.errors import recipe_error
from grpo_cli.issues import Location
from grpo_cli.recipe.yaml_tree import read_source

_NAME = re.compile(r"[A-Za-z_]\w*")
_WORDS = read_words("shell-words")
_COMMANDS = {("trl", "grpo"): "trl", ("swift", "rlhf"): "swift", ("megatron", "rlhf"): "swift"}
_TOOLS = {"trl.scripts.grpo": "trl", "swift.cli.rlhf": "swift", "swift.cli._megatron.rlhf": "swift"}
_SHELL = re.compile(r"(?:\S*/)?(?:ba|z)?sh -[a-z]*c")
_NEVER: Context = ((-2, 1), (-2, ~1))
"""Conditions of which one does not hold."""
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
    """Arguments of Python, accelerate, torchrun or deepspeed before what they start."""
    environment: dict[str, Word] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """What the script writes to files; empty if that is known only when it runs."""
    notes: list[tuple[Word, str]] = field(default_factory=list)
    """What the script has besides, as it is written, and why it is not taken."""


class _Reader:
    """Runs the assignments of a script, and collects its commands that start a training."""

    def __init__(self, folder: Path) -> None:
        self.commands: list[Command] = []
        self.unknown: list[Word] = []
        """Commands that are known only when the script runs."""
        self.functions: dict[str, list[Step]] = {}
        self.variables = Variables()
        self.notes: list[tuple[Word, str]] = []
        self._folder = folder
        self._exported: dict[str, int] = {}
        self._uses: set[str] = set()
        """Variables in the text that `eval` or a shell runs."""
        self._sourced: set[Path] = set()
        self._ends: Context = ()
        """Branches that were not taken, since they end the script."""
        self._returns: Context = ()
        """Branches that were not taken, since they end the function that is running."""

    def run_text(self, text: str, line: int, context: Context, *, is_inside: bool = False) -> None:
        """Run the text of a script whose first line, or with `is_inside` every line, has a number."""
        script = Parser(text, line)
        if is_inside:
            for steps in (script.steps, *script.functions.values()):
                steps[:] = [
                    step._replace(words=[Word(each.text, line) for each in step.words])
                    for step in steps
                ]
        self.functions |= script.functions
        self.run(script.steps, context)

    def run(self, steps: list[Step], context: Context) -> None:
        """Run commands under conditions, until one ends them."""
        for step in steps:
            path = (*context, *self._ends, *self._returns, *step.context)
            if is_possible(path, {*path}) and self._run_step(step, path, len(context)):
                return

    def _run_step(self, step: Step, context: Context, depth: int) -> bool:
        """Run a command; return whether none follows it."""
        raw = step.words[1:] if step.words[0].text == "env" else step.words
        start = next((i for i, each in enumerate(raw) if not ASSIGNMENT.match(each.text)), len(raw))
        before, rest = raw[:start], raw[start:]
        if not rest or rest[0].text in _WORDS["declarations"]:
            options = "".join(each.text for each in rest if each.text.startswith("-"))
            is_exported = bool(rest) and (rest[0].text == "export" or "x" in options)
            is_local = bool(rest) and rest[0].text in _WORDS["local"] and "g" not in options
            for word in [*before, *rest[1:]]:
                self.variables.assign(word, context, step.text, is_local=is_local)
                name = _NAME.match(word.text)
                if is_exported and name:
                    self._exported[name[0]] = word.line
            return False
        if rest[0].text in ("exit", "return"):
            return self._end(rest[0].text, context, depth)
        self.variables.uses.clear()
        words = [each for word in rest for each in self.variables.expand(word, context)]
        if words:
            self._run_command(words, before, step, context)
        return False

    def _end(self, name: str, context: Context, depth: int) -> bool:
        """End the script, or a function whose caller is under the first conditions of the context."""
        is_return = name == "return" and bool(self.variables.calls)
        known = (*self._ends, *self._returns)
        branches = [pair for pair in context[depth if is_return else 0 :] if pair not in known]
        if not branches:
            self._ends = self._ends if is_return else (*self._ends, *_NEVER)
            return True
        number, branch = branches[-1]
        if is_return:
            self._returns = (*self._returns, (number, ~branch))
        else:
            self._ends = (*self._ends, (number, ~branch))
        return False

    def _run_command(
        self, words: list[Word], before: list[Word], step: Step, context: Context
    ) -> None:
        (first, line), rest = words[0], words[1:]
        texts = [each.text for each in words]
        pairs = [f"{name} {option}" for name, option in pairwise(texts[:-1])]
        shell = next((i for i, pair in enumerate(pairs) if _SHELL.fullmatch(pair)), None)
        if first in ("for", "select"):
            self._forget(texts[1:2], step, context, doubt=True)
        elif first.startswith("((") or first in ("let", *_WORDS["setters"]):
            names = texts[1:] if first in _WORDS["setters"] else _COUNTED.findall(step.text)
            names = names if first != "printf" else names[1:2] if names[:1] == ["-v"] else []
            self._forget(names, step, context)
        elif first in ("set", "shift"):
            self._set_arguments(words, step, context)
        elif first in ("source", "."):
            self._source("".join(texts[1:2]), step, context)
        elif first == "eval" or shell is not None:
            self._uses = {*self.variables.uses}
            part = texts[1:] if shell is None else texts[shell + 2 : shell + 3]
            process = () if shell is None else ((0, PROCESS),)
            self.run_text(" ".join(part), line, (*context, *process))
        elif first in self.functions:
            if first not in self.variables.calls:
                self._call(first, rest, step, context)
        elif first.startswith("--"):
            reason = (
                "bash runs this line as a separate command: the line before does not end with `\\`"
            )
            self.notes.append((Word(show(" ".join(texts)), line), reason))
        elif first in _WORDS["printers"]:
            return
        elif (command := _find_command(words, self._folder)) is None:
            self.unknown += [Word(show(first), line)] if is_open(first) else []
        else:
            self._add(command, before, context)

    def _add(self, command: Command, before: list[Word], context: Context) -> None:
        """Add a command that starts a training, with its environment."""
        uses = self._uses | self.variables.uses
        command.line = next((call.line for call in self.variables.calls.values()), command.line)
        for name, at in self._exported.items():
            if name in self.variables.assignments and name not in uses:
                value = self.variables.expand_parameter(f"${name}", context, True, False)
                command.environment.setdefault(name, Word(value, at))
        for text, at in before:
            name, value = text.split("=", 1)
            value = self.variables.substitute(value, context, is_split=False)
            command.environment[name] = Word(value, at)
        for word in [each for each in command.words if each.text.startswith(COMMENT)]:
            command.words.remove(word)
            reason = (
                "bash ends the command at this comment; the flags after it are taken all the same"
            )
            command.notes.append((Word(word.text[1:], word.line), reason))
        self.commands.append(command)

    def _source(self, name: str, step: Step, context: Context) -> None:
        """Run the commands of another file if it is there; it may set any variable otherwise."""
        line, file = step.words[0].line, find_beside(name, self._folder)
        if any(each in name.rpartition("/")[2] for each in _WORDS["preparers"]):
            reason = "what it sets is not read; start `grpo train` in the same environment"
        elif file is not None and file not in self._sourced:
            self._sourced.add(file)
            text = drop_here_documents(read_source(file))
            self.run_text(text, line, context, is_inside=True)
            return
        else:
            reason = "was not found, and may set variables and flags"
            self.variables.record_any(Frame(context, line, step.text))
        self.notes.append((Word(show(step.text), line), reason))

    def _call(self, name: str, words: list[Word], step: Step, context: Context) -> None:
        """Run the commands of a function with its arguments."""
        frame = Frame(context, step.words[0].line, step.text)
        returns = self._returns
        with self.variables.enter(name, frame):
            self.variables.make_local("@")
            self.variables.record("@", words, frame, is_list=True)
            self.run(self.functions[name], context)
        self._returns = returns

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
        frame = Frame(context, step.words[0].line, step.text)
        self.variables.record("@", kept, frame, is_list=True)

    def _forget(
        self, names: list[str], step: Step, context: Context, *, doubt: bool = False
    ) -> None:
        """Record that variables get values that are not in the script."""
        line = step.words[0].line
        for name in filter(_NAME.fullmatch, names):
            text = f"{UNKNOWN}${name}{UNKNOWN}" + (write_doubt(line, step.text) if doubt else "")
            words = [] if step.words[0].text == "unset" else [Word(text, line)]
            self.variables.record(name, words, Frame(context, line, step.text))


def read_command(text: str, source: Path) -> Command:
    """Return the command of a shell script that starts a training with TRL or ms-swift.

    Raises:
        RecipeError: There is none, or several.
    """
    reader = _Reader(source.parent)
    files: dict[str, str] = {}
    try:
        reader.run_text(drop_here_documents(text, files), 1, ())
        if not reader.commands:
            for steps in reader.functions.values():
                reader.run(steps, ())
    except RecursionError:
        fix = "write the command without the functions and texts around it"
        raise recipe_error("is nested too deeply", fix, location=Location(str(source))) from None
    commands = reader.commands
    tools = [each for each in commands if each.tool in ("trl", "swift")]
    meant = tools or [each for each in commands if "grpo" in each.tool.lower()] or commands
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
    meant[0].notes += reader.notes
    meant[0].files = files
    return meant[0]


def _find_command(words: list[Word], folder: Path) -> Command | None:
    """Return the training that a command starts, or None."""
    texts = [word.text for word in words]
    names = [text.rpartition("/")[2] for text in texts]
    is_launcher = [name in _WORDS["launchers"] or name.startswith("python") for name in names]
    is_launcher[0] = is_launcher[0] or is_open(texts[0])
    first = next((index for index, is_it in enumerate(is_launcher) if is_it), len(words))
    for index, text in enumerate(texts):
        end = index + 1
        tool = "" if index < first else _TOOLS.get(text.replace("/", ".").removesuffix(".py"), "")
        if text.endswith(".py") and find_beside(text, folder):
            tool = ""  # a file of its own, or changed
        if (names[index], *texts[end : end + 1]) in _COMMANDS:
            tool, end = _COMMANDS[names[index], texts[end]], end + 1
        elif index > first and not tool and not text.startswith(_WORDS["other-modules"]):
            is_module = texts[index - 1] in ("-m", "--module")
            is_sure = not names[first].startswith("python") or "grpo" in text.lower()
            has_flags = any(each.startswith("--") or is_open(each) for each in texts[end:])
            if is_sure if is_module else text.endswith(".py") and (is_sure or has_flags):
                tool = f"{text.replace('.', '/')}.py" if is_module else text
        if tool:
            start = min(first, index)
            matches = [(ASSIGNMENT.match(word.text), word.line) for word in words[:start]]
            environment = {each[1]: Word(each[4], line) for each, line in matches if each}
            launcher = words[start:index]
            return Command(words[start].line, show(tool), words[end:], launcher, environment)
    return None
