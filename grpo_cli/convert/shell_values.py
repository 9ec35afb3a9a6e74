"""The values of variables, arrays and arguments of a shell script, and what may change them.

Source: the Bash Reference Manual, section 3.5, Shell Expansions.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from grpo_cli.convert.shell_syntax import (
    COMMENT,
    DOUBT,
    PROCESS,
    UNKNOWN,
    Context,
    Word,
    find_end,
    read_tokens,
)

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_LIST = re.compile(r"(\")?\$(?:([@*])|\{([@*]|\w+(?=\[))(?:\[[@*]\])?\})(?(1)\")")
"""A word that is an array or the arguments, and stands for several words."""
_SIMPLE = re.compile(r"\$(?:[A-Za-z_]\w*|[\d@*#?$!-])")
_PARAMETER = re.compile(r"(\w+|[@*])(?:\[([^]]*)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_UNKNOWN = re.compile(f"{UNKNOWN}([^{UNKNOWN}]*){UNKNOWN}")
DOUBTS = re.compile(f"{DOUBT}([^{DOUBT}]*){DOUBT}")
_SPACE = re.compile(rf"({_UNKNOWN.pattern}|{DOUBTS.pattern})|\s+")
_GAP = "\2"
"""Stands between words in a text."""
_QUOTES = "\3"
"""Stands for quotes, which make a word even if it is empty."""
_UNSURE: Context = ((-1, 1),)
"""A condition that is not known to hold anywhere."""


class Frame(NamedTuple):
    """A command that runs under conditions."""

    context: Context
    line: int
    text: str


class Assignment(NamedTuple):
    """A command that sets a variable."""

    words: list[Word]
    """The elements of an array, or one text."""
    frames: tuple[Frame, ...]
    """The calls of functions that it is in, outermost first, and itself."""
    is_append: bool = False
    is_list: bool = False
    uses: frozenset[str] = frozenset()
    """The variables that its text holds."""


class Variables:
    """Holds what a script sets, under which conditions.

    Attributes:
        assignments: Variable → its assignments in their order; the arguments are `@`.
        calls: Functions that are running, outermost first.
        uses: Variables that were looked up since it was cleared, and those that their texts hold.
    """

    def __init__(self) -> None:
        """Begin without variables."""
        self.assignments: dict[str, list[Assignment]] = {}
        self.calls: dict[str, Frame] = {}
        self.uses: set[str] = set()
        self._any: list[Assignment] = []
        """Commands that may set any variable."""
        self._outer: list[dict[str, list[Assignment] | None]] = []
        """For each running function, the variables outside of it that it hides."""

    @contextmanager
    def enter(self, name: str, frame: Frame) -> Iterator[None]:
        """Run a function, whose local variables end with it."""
        self.calls[name] = frame
        self._outer.append({})
        try:
            yield
        finally:
            del self.calls[name]
            for each, before in self._outer.pop().items():
                self.assignments.pop(each, None)
                if before is not None:
                    self.assignments[each] = before

    def make_local(self, name: str) -> None:
        """Hide the variable of the caller."""
        if self._outer and name not in self._outer[-1]:
            self._outer[-1][name] = self.assignments.get(name)
            self.assignments[name] = []

    def record_any(self, frame: Frame) -> None:
        """Record that a command may set any variable."""
        made = Assignment(
            [], (*self.calls.values(), frame._replace(context=(*frame.context, *_UNSURE)))
        )
        for name in self.assignments.keys() - {"@"}:
            self.assignments[name].append(made)
        self._any.append(made)

    def record(
        self,
        name: str,
        words: list[Word],
        frame: Frame,
        *,
        is_append: bool = False,
        is_list: bool = False,
    ) -> None:
        """Record that a command sets a variable."""
        frames = (*self.calls.values(), frame)
        made = Assignment(words, frames, is_append, is_list, frozenset(self.uses))
        self.assignments.setdefault(name, [*self._any]).append(made)

    def assign(self, word: Word, context: Context, text: str, *, is_local: bool = False) -> None:
        """Record an assignment of the command `text`, if the word is one."""
        self.uses.clear()
        match = ASSIGNMENT.match(word.text)
        if match is None:
            if is_local and word.text.isidentifier():
                self.make_local(word.text)
            return
        name, index, plus, value = match.groups()
        if index:
            # One element: it may change the array.
            context = (*context, *_UNSURE)
        is_list = value.startswith("(")
        if is_list:
            tokens = read_tokens(value[1:-1], word.line)
            raw = [Word(each.text, each.line) for each in tokens if not each.is_operator]
            words = [each for part in raw for each in self.expand(part, context)]
        else:
            words = [Word(self.substitute(value, context, is_split=False), word.line)]
        if is_local:
            self.make_local(name)
        frame = Frame(context, word.line, text)
        self.record(name, words, frame, is_append=bool(plus), is_list=is_list)

    def look_up(self, name: str, context: Context) -> tuple[list[Word] | None, str]:
        """Return what a variable holds, None if the script does not set it, and what may change it."""
        if name.isdigit():
            arguments, changes = self.look_up("@", context)
            before = (arguments or [])[: int(name)]
            is_open = any(_UNKNOWN.search(each.text) for each in before[:-1])
            if arguments is None or name == "0" or changes or is_open:
                return None, changes
            return before[int(name) - 1 :], ""
        words: list[Word] | None = None
        doubts: list[str] = []
        self.uses.add(name)
        for each in self.assignments.get(name, self._any):
            conditions = {*context}
            if not is_possible(each.frames[-1].context, conditions):
                continue
            self.uses |= each.uses
            uncertain = [frame for frame in each.frames if not conditions.issuperset(frame.context)]
            if uncertain:
                doubts.append(write_doubt(uncertain[0].line, uncertain[0].text))
            elif not each.is_append:
                words, doubts = each.words, []
            elif each.is_list:
                words = [*(words or []), *each.words]
            else:
                first, *others = words or [Word("", each.frames[-1].line)]
                words = [Word(first.text + each.words[0].text, first.line), *others]
        return words, "".join(dict.fromkeys(doubts))

    def expand(self, word: Word, context: Context) -> list[Word]:
        """Return the words that a word of a command stands for."""
        if word.text.startswith(COMMENT):
            return [word]
        array = _LIST.fullmatch(word.text)
        if array is None or (array[1] and "*" in word.text):
            text = self.substitute(word.text, context)
            parts = [part for part in text.split(_GAP) if part]
            return [Word(part.replace(_QUOTES, ""), word.line) for part in parts]
        words, doubts = self.look_up((array[2] or array[3]).replace("*", "@"), context)
        if words is None and not doubts:
            written = word.text.strip('"')
            return [Word(f"{UNKNOWN}{written}{UNKNOWN}", word.line)]
        words = [*(words or []), *([Word(doubts, word.line)] if doubts else [])]
        if array[1]:
            return words
        return [
            Word(part, each.line)
            for each in words
            for part in _split(each.text).split(_GAP)
            if part
        ]

    def substitute(
        self, raw: str, context: Context, *, is_quoted: bool = False, is_split: bool = True
    ) -> str:
        """Return a text without its quotes and with the values of variables."""
        parts: list[str] = []
        at = 0
        while at < len(raw):
            simple = _SIMPLE.match(raw, at)
            end = simple.end() if simple else find_end(raw, at, is_quoted=is_quoted)
            part, at = raw[at:end], end
            if part == "$" and not is_quoted and raw[at : at + 1] == "'":
                end = find_end(raw, at)
                part, at = raw[at:end].replace("\\n", "\n"), end
            is_literal = part[0] == "'" and not is_quoted
            if is_literal or (part[0] == '"' and len(part) > 1):
                inner = part[1:-1]
                if not is_literal:
                    inner = self.substitute(inner, context, is_quoted=True, is_split=is_split)
                parts += [_QUOTES if is_split else "", inner]
            elif part[0] == "\\" and (not is_quoted or part[1:] in ("$", "`", '"', "\\", "\n")):
                parts.append(part[1:].strip("\n"))
            elif part[0] in "$`" and len(part) > 1:
                parts.append(self.expand_parameter(part, context, is_quoted, is_split))
            else:
                parts.append(_GAP if part.isspace() and is_split and not is_quoted else part)
        return "".join(parts)

    def expand_parameter(self, part: str, context: Context, is_quoted: bool, is_split: bool) -> str:
        """Return the value of `$NAME`, `${NAME…}` or `$(…)`."""
        is_command = part.startswith(("`", "$("))
        inner = part[2:-1] if part.startswith("${") else part[1:]
        match = None if is_command else _PARAMETER.fullmatch(inner)
        if match is None:
            return f"{UNKNOWN}{part}{UNKNOWN}"
        name, index, operator, default = match.groups()
        words, doubts = self.look_up(name.replace("*", "@"), context)
        value: str | None = None
        if words is not None and (index in ("@", "*") or name in "@*"):
            gap = f"{_GAP}{_QUOTES}" if is_split and "@" in (index, name) else " "
            value = gap.join(each.text for each in words)
        elif words is not None and (index or "0").isdigit():
            before = words[: int(index or 0) + 1]
            if not any(UNKNOWN in each.text for each in before[:-1]):
                value = "".join(each.text for each in before[int(index or 0) :])
        kind = (operator or " ")[-1]
        if kind in "-=" and (value is None or (value == "" and ":" in operator)):
            value = self.substitute(default, context, is_quoted=is_quoted, is_split=is_split)
            if kind == "=":
                text = self.substitute(default, context, is_split=False)
                self.record(name, [Word(text, 0)], Frame(context, 0, part))
        elif kind == "+" and value is not None and _UNKNOWN.search(value):
            value = None
        elif kind == "+" and value is not None and (value or ":" not in operator):
            value = self.substitute(default, context, is_quoted=is_quoted, is_split=is_split)
        elif is_split and not is_quoted and value is not None:
            value = _split(value)
        if value is None:
            value = f"{UNKNOWN}{part}{UNKNOWN}"
        # Flags stand apart from what may add more.
        if doubts and value.lstrip(f" {_GAP}").startswith("-"):
            value += _GAP if is_split and not is_quoted else " "
        return value + doubts


def is_possible(path: Context, conditions: set[tuple[int, int]]) -> bool:
    """Return whether commands on a path may have run where some conditions hold."""
    others = {number: branch for number, branch in conditions if branch >= PROCESS}
    return all(
        (number, ~branch) not in conditions
        and (
            branch < PROCESS or others.get(number, None if branch == PROCESS else branch) == branch
        )
        for number, branch in path
    )


def _split(text: str) -> str:
    """Return a text with gaps for its spaces."""
    return _SPACE.sub(lambda match: match[1] or _GAP, text)


def write_doubt(line: int, text: str) -> str:
    """Return the mark of a command that may change a value."""
    shown = re.sub(f"[{UNKNOWN}{DOUBT}]", "", text)
    shown = shown if len(shown) <= 80 else f"{shown[:79]}…"
    return f"{DOUBT}{line}\t{shown}{DOUBT}"


def find_beside(text: str, folder: Path) -> Path | None:
    """Return the file that a text names, whose beginning may be the script's folder; None if it is not here."""
    known = DOUBTS.sub("", text)
    if re.search(rf"{UNKNOWN}.*(?:dirname|BASH_SOURCE|pwd).*{UNKNOWN}", known, re.IGNORECASE):
        known = known.rpartition(UNKNOWN)[2].lstrip("/")
    paths = Path(known), folder / known
    return next((each for each in paths if os.path.isfile(each)), None)


def is_open(text: str) -> bool:
    """Return whether a word may stand for any flags."""
    bare = DOUBTS.sub("", text)
    return _UNKNOWN.fullmatch(bare) is not None or (text != bare and not bare)


def show(text: str) -> str:
    """Return a text as it is written in the script."""
    return " ".join(DOUBTS.sub("", text).replace(UNKNOWN, "").split())
