"""Shell scripts that start a training: the command, its flags, and the YAML that they name.

Source: `trl grpo`, `accelerate launch`, `torchrun`, and ms-swift's `swift rlhf`.
"""

import io
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import CONVERTIBLE, by_key, read_keys
from grpo_cli.errors import recipe_error
from grpo_cli.issues import Location
from grpo_cli.recipe.yaml_tree import Node, as_node, merge, read_scalar, read_source, read_text

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = ("export", "declare", "local", "readonly")
_ARRAY = re.compile(
    rf"\s*(?:(?:{'|'.join(_DECLARATIONS)})\s+(?:-\w+\s+)*)?(\w+)(\+?)=\(", re.DOTALL
)
"""The start of an array, up to its first word."""
_NAMED = re.compile(r"--?[A-Za-z]|[A-Za-z_]\w*=")
"""The start of a flag, or of a variable with its value."""
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_WHOLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(\[[@*]\])?(?::?-)?\}|([A-Za-z_]\w*)|[@*])")
"""A word that is a variable or an array, and may stand for several words."""
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'", re.DOTALL)
_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?<!\S)#[^\n\f]*""", re.DOTALL)
"""A quoted text or an escaped sign, or a comment: a `#` inside a word begins none."""
_CONTINUED = "\f"
"""Stands for a `\\` at the end of a line, and the end of the line."""
_ENDS = {"|", "||", "&&", "&", ";", ">", ">>", "2>&1", "<"}

Word = tuple[str, int]
"""A word of a command, and its line."""


@dataclass
class Command:
    """A command that starts a training."""

    line: int
    tool: str
    """`trl`, `swift`, or the Python file that is started."""
    words: list[str] = field(default_factory=list)
    """Its arguments."""
    launcher: list[str] = field(default_factory=list)
    """Arguments of accelerate or torchrun before the Python file."""
    environment: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    """The line of each flag and variable of the environment."""


def read_command(text: str, source: FilePath) -> Command:
    """Return the command of a shell script that starts a training with TRL or ms-swift.

    Raises:
        RecipeError: There is none, or several.
    """
    variables: dict[str, str] = {}
    arrays: dict[str, list[Word]] = {}
    exported: dict[str, str] = {}
    lines: dict[str, int] = {}
    commands: list[Command] = []
    for first, code in _join_lines(text):
        if (array := _ARRAY.match(code)) is not None:
            body = code[array.end() :].rstrip().removesuffix(")")
            before = arrays.get(array[1], []) if array[2] else []
            first += code[: array.end()].count("\n")
            arrays[array[1]] = [*before, *_spread(_split(body, first), variables, arrays)]
            continue
        placed = _spread(_split(code, first), variables, arrays)
        words = [word for word, _ in placed]
        line = placed[0][1] if placed else first
        named = {_name_flag(word): number for word, number in placed if _NAMED.match(word)}
        if words and words[0] in _DECLARATIONS:
            exported |= _assign(words[1:], variables)
            variables |= exported
            lines |= named
            continue
        start = next(
            (i for i, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words)
        )
        prefix = _assign(words[:start], variables)
        if start == len(words):
            variables |= prefix
        elif (command := _find_command(words[start:], line)) is not None:
            command.environment = {**exported, **prefix}
            command.lines = {**lines, **named}
            commands.append(command)
    meant = [each for each in commands if each.tool in ("trl", "swift")] or commands
    if len(meant) != 1:
        where = Location(str(source), meant[0].line if meant else 1, 1)
        if not meant:
            cause = "starts no training of TRL or ms-swift"
            raise recipe_error(cause, CONVERTIBLE, location=where)
        starts = ", ".join(str(command.line) for command in meant)
        cause = f"starts {len(meant)} trainings (lines {starts})"
        raise recipe_error(cause, "keep one of them in the file", location=where)
    return meant[0]


def _assign(words: list[str], variables: dict[str, str]) -> dict[str, str]:
    """Return the values that words like `NAME=value` and `NAME+=value` give."""
    pairs = [_ASSIGNMENT.fullmatch(word) for word in words]
    return {
        pair[1]: (variables.get(pair[1], "") if pair[2] else "") + pair[3] for pair in pairs if pair
    }


def _spread(
    placed: list[Word], variables: dict[str, str], arrays: dict[str, list[Word]]
) -> list[Word]:
    """Replace variables and arrays that the script sets; one that holds flags becomes several words."""
    spread: list[Word] = []
    for word, line in placed:
        whole = _WHOLE.fullmatch(word)
        name = (whole[1] or whole[3] or "") if whole else ""
        text = variables.get(name, "")
        if whole and whole[2] and name in arrays:
            spread += arrays[name]
        elif text.lstrip().startswith("-"):
            spread += [(part, line) for part, _ in _split(text, line)]
        else:
            spread.append((_expand(word, variables), line))
    return spread


def _join_lines(text: str) -> list[tuple[int, str]]:
    """Return the commands of a script with their first lines: lines are joined at `\\` and inside quotes."""
    joined: list[tuple[int, str]] = []
    start, code = 0, ""
    for number, line in enumerate(text.split("\n"), 1):
        is_comment = line.lstrip().startswith("#")
        if is_comment and (not code or code.endswith(_CONTINUED)):
            code += _CONTINUED if code else ""
            continue
        start = start or number
        if line.rstrip().endswith("\\") and not line.rstrip().endswith("\\\\"):
            code += f"{line.rstrip()[:-1]}{_CONTINUED}"
            continue
        code += line
        if _is_open(code) and number - start < 200:
            code += "\n"
            continue
        joined.append((start, code))
        start, code = 0, ""
    return [*joined, (start, code)] if code.strip() else joined


def _keep_quoted(match: re.Match[str]) -> str:
    return match[1] or ""


def _is_open(code: str) -> bool:
    """Return whether a quotation, or an array, goes on in the next line."""
    text = _COMMENT.sub(_keep_quoted, code)
    try:
        shlex.split(text)
    except ValueError:
        return True
    bare = _QUOTED.sub("", text)
    return _ARRAY.match(code) is not None and bare.count("(") > bare.count(")")


def _split(code: str, line: int) -> list[Word]:
    """Return the words of a command, each with its line: of several commands, of one that trains."""
    text = _COMMENT.sub(_keep_quoted, code)
    stream = io.StringIO(text)
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    lexer.whitespace += _CONTINUED
    placed: list[Word] = []
    try:
        for word in lexer:
            before = text[: stream.tell() - 1].removesuffix(word)
            number = line + before.count("\n") + before.count(_CONTINUED)
            placed.append((word.replace(_CONTINUED, ""), number))
    except ValueError:
        return []
    while True:
        words = [word for word, _ in placed]
        end = next((i for i, word in enumerate(words) if word in _ENDS), len(words))
        is_last = end + 1 >= len(words) or words[end] not in ("&&", ";")
        if is_last or _find_command(words[:end], line):
            return [(word.rstrip(";"), number) for word, number in placed[:end]]
        placed = placed[end + 1 :]


def _expand(word: str, variables: dict[str, str]) -> str:
    """Replace variables that the script sets; others stay as they are written."""

    def replace(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, default if default is not None else match[0])

    return _VARIABLE.sub(replace, word)


def _find_command(words: list[str], line: int) -> Command | None:
    names = [word.rpartition("/")[2] for word in words]
    for index, name in enumerate(names):
        following = names[index + 1 : index + 2]
        if name == "trl" and following == ["grpo"]:
            return Command(line, "trl", words[index + 2 :])
        if name in ("swift", "megatron") and following == ["rlhf"]:
            return Command(line, "swift", words[index + 2 :])
        is_launcher = name in (
            "accelerate",
            "torchrun",
            "deepspeed",
            "accelerate-launch",
        ) or name.startswith("python")
        if is_launcher:
            start = index + (2 if following == ["launch"] else 1)
            script = next((i for i in range(start, len(words)) if words[i].endswith(".py")), None)
            if script is not None and any(_is_argument(word) for word in words[script:]):
                return Command(line, words[script], words[script + 1 :], words[start:script])
    return None


def _is_argument(word: str) -> bool:
    return word.startswith("--") or _WHOLE.fullmatch(word) is not None


def _name_flag(word: str) -> str:
    """Return the name in `--name=value` or `NAME=value`."""
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def read_flags(words: list[str], *, is_one: bool = False) -> dict[str, Any]:
    """Return flags and their values: a list if there are several, true if there is none."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            _, equals, value = word.partition("=")
            name = _name_flag(word)
            flags[name] = [value] if equals else []
        elif _WHOLE.fullmatch(word) and (not name or flags[name]):
            # It may hold more flags.
            flags[word] = [word]
        elif name and not (is_one and flags[name]):
            flags[name].append(word)
    return {
        key: True
        if not texts
        else read_scalar(texts[0])
        if len(texts) == 1
        else [read_scalar(text) for text in texts]
        for key, texts in flags.items()
    }


def build_tree(command: Command, source: FilePath) -> tuple[Node, dict[str, str]]:
    """Return a command's flags, with the YAML that `--config` names, as a config, and values of the shell.

    Flags whose values hold variables that the script does not set are returned apart, as they are written.

    Raises:
        RecipeError: The YAML cannot be read.
    """
    where, lines = Location(str(source), command.line, 1), dict(command.lines)
    flags = read_flags(command.words)
    launcher = read_flags(command.launcher, is_one=True)
    if "config_file" in launcher:
        launcher["accelerate_config"] = launcher.pop("config_file")
        lines["accelerate_config"] = lines["config_file"]
    flags = {**launcher, **command.environment, **flags}
    for name, renamed in by_key(read_keys("launcher-names")).items():
        if name in flags:
            value = flags.pop(name)
            lines.setdefault(renamed, lines.get(name, command.line))
            flags.setdefault(renamed, read_scalar(value) if isinstance(value, str) else value)
    config = flags.pop("config", None)
    unset = {
        name: str(value)
        for name, value in flags.items()
        if re.search(r"\$[\w({@*]", str(value)) and name not in command.environment
    }
    flags = {name: value for name, value in flags.items() if name not in unset}
    places = {name: replace(where, line=lines.get(name, command.line)) for name in flags}
    tree = Node({name: as_node(value, places[name]) for name, value in flags.items()}, where)
    tree.key_locations.update(places)
    if config is None:
        return tree, unset
    path = next(
        (each for each in (FilePath(str(config)), source.parent / str(config)) if each.exists()),
        None,
    )
    if path is None:
        cause = f"names the YAML `{config}`, which is not here"
        raise recipe_error(cause, "run `grpo convert` where the script runs", location=where)
    base = read_text(read_source(path), str(path))
    if not isinstance(base.value, dict):
        raise recipe_error(
            "is not a config", "name the YAML of the training", location=base.location
        )
    return merge(base, tree), unset
