"""The simple commands of a shell script, and the conditions under which each of them runs.

Source: the Bash Reference Manual, section 3.2, Shell Commands.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

UNKNOWN = "\0"
"""Stands before and after an expansion whose value is not in the script."""
DOUBT = "\1"
"""Stands before and after the line and the text of a command that may change a value."""
COMMENT = "\4"
"""Stands before a comment between the lines of a command."""
PROCESS = 0
"""The branch of commands whose assignments end with their process: `( … )`, a part of a pipe, or before `&`."""
_HERE_DOCUMENT = re.compile(r"(?<![<\d])<<-?[ \t]*(['\"]?)\\?([A-Za-z_]\w*)\1")
_WRITES = re.compile(
    r"(?:^|[;&|\s])(?:cat\b[^|;]*?(?<![0-9&])>\s*([^\s<>&|;]+)|tee\s+([^\s<>&|;-]+))"
)
"""A command that writes a here-document to a file."""
_OPERATOR = re.compile(r";;&|;;|;&|;|&&|\|\||\|&|\||&|\n|\(|\)")
_REDIRECT = re.compile(r"\d*(?:<<<|<<-?|<>|>>|>&|<&|&>>?|>\||<(?!\()|>(?!\())")
_CONTINUED = re.compile(r"\\[ \t\r]*\n[ \t]*")
_INSIDE = re.compile(r"(#[^\n]*)\n[ \t]*(?=[-#]|\"?\$)")
"""A comment between the lines of a command, before the next flags."""
_BREAK = re.compile(r"[\s;&|()<>]|\\[ \t\r]*\n")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_SURE = frozenset("cd pushd mkdir source . export declare set unset module conda echo".split())
"""Commands that are not conditions of what follows them after `&&`."""
_NUMBERS = count(1)

Context = tuple[tuple[int, int], ...]
"""The branches that a command is in, outermost first: the number of an `if` or loop, and of its branch."""


class Word(NamedTuple):
    """A word of a command."""

    text: str
    line: int


class Token(NamedTuple):
    """A word as it is written, or an operator."""

    text: str
    line: int
    is_operator: bool = False


class Step(NamedTuple):
    """A simple command, or the head of a loop."""

    words: list[Word]
    """Its words as they are written."""
    text: str
    context: Context


@dataclass
class _Block:
    """A compound command that has begun."""

    outer: Context
    chain: Context
    """Conditions of `&&` and `||` before it."""
    number: int
    branch: int = 0
    """0 outside of its branches."""
    is_pattern: bool = False
    """Whether a pattern of `case` comes next."""
    function: str = ""
    """The name of the function whose body it is."""
    steps: list[Step] = field(default_factory=list)
    """The commands outside of the function."""
    started: int = 0
    """The number of commands before the pipe that it is in."""


def find_end(text: str, at: int, *, is_quoted: bool = False) -> int:
    """Return where the sign, quotation or expansion that begins at `at` ends."""
    sign, pair = text[at], text[at : at + 2]
    if sign == "\\":
        return min(at + 2, len(text))
    if sign in (UNKNOWN, DOUBT) or (sign == "'" and not is_quoted):
        return text.find(sign, at + 1) + 1 or len(text)
    if sign in '"`' and not (is_quoted and sign == '"'):
        return _find_close(text, at + 1, sign, is_quoted=sign == '"')
    if pair == "${":
        return _find_close(text, at + 2, "}", is_quoted=is_quoted)
    if pair == "$(" or (pair in ("<(", ">(") and not is_quoted):
        return _find_close(text, at + 2, ")")
    if sign == "(" and not is_quoted:
        return _find_close(text, at + 1, ")")
    return at + 1


def _find_close(text: str, at: int, close: str, *, is_quoted: bool = False) -> int:
    while at < len(text):
        if text[at] == close:
            return at + 1
        if text[at] == "#" and close == ")" and text[at - 1].isspace():
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        else:
            at = find_end(text, at, is_quoted=is_quoted)
    return len(text)


def read_tokens(text: str, first: int) -> Iterator[Token]:
    """Yield words and operators; redirections and comments are left out."""
    at, is_target, inside = 0, False, -1
    while at < len(text):
        start = at
        line = first + text.count("\n", 0, at)
        if text[at] in " \t\r":
            at += 1
        elif joined := _CONTINUED.match(text, at):
            at = inside = joined.end()
        elif at == inside and (comment := _INSIDE.match(text, at)):
            at = inside = comment.end()
            yield Token(COMMENT + comment[1], line)
        elif text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif redirect := _REDIRECT.match(text, at):
            at, is_target = redirect.end(), True
        elif (operator := _OPERATOR.match(text, at)) and not text.startswith("((", at):
            at, is_target = operator.end(), False
            yield Token(operator[0], line, is_operator=True)
        else:
            while at == start or (at < len(text) and not _BREAK.match(text, at)):
                at = find_end(text, at)
                if text[at : at + 1] == "(" and _ARRAY.fullmatch(text, start, at):
                    at = find_end(text, at)
            if not is_target:
                yield Token(text[start:at], line)
            is_target = False


def drop_here_documents(text: str, files: dict[str, str] | None = None) -> str:
    """Return the text with the lines of here-documents empty.

    `files` gets what `cat > FILE <<EOF` writes; empty if that has expansions.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    at = 0
    while at < len(lines):
        is_comment = lines[at].lstrip().startswith("#")
        for match in [] if is_comment else [*_HERE_DOCUMENT.finditer(lines[at])]:
            rest = (i for i in range(at + 1, len(lines)) if lines[i].strip() == match[2])
            if (end := next(rest, None)) is not None:
                written = _WRITES.search(lines[at])
                if files is not None and written is not None:
                    document = "\n".join(lines[at + 1 : end])
                    is_plain = match[1] or "\\" in match[0] or not re.search(r"[$`\\]", document)
                    files[(written[1] or written[2]).strip("\"'")] = document if is_plain else ""
                lines[at + 1 : end + 1] = [""] * (end - at)
                at = end
        at += 1
    return "\n".join(lines)


class Parser:
    """Reads a script as simple commands.

    Attributes:
        steps: The commands outside of functions.
        functions: The commands of each function.
    """

    def __init__(self, text: str, first: int = 1) -> None:
        """Read a script whose first line has the number `first`."""
        self.steps: list[Step] = []
        self.functions: dict[str, list[Step]] = {}
        self._blocks: list[_Block] = []
        self._words: list[Word] = []
        self._chain: Context = ()
        self._is_or = False
        self._started = 0
        self._tokens = [*read_tokens(text, first)]
        self._at = 0
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if self._blocks and self._blocks[-1].is_pattern:
                self._take_pattern(token.text)
            elif token.is_operator:
                self._take_operator(token.text)
            else:
                self._take_word(token)
        self._end_command()

    def _take_pattern(self, text: str) -> None:
        if text == ")":
            self._blocks[-1].is_pattern = False
            self._blocks[-1].branch += 1
        elif text == "esac":
            self._close()

    def _take_operator(self, text: str) -> None:
        if self._words and self._words[0].text == "[[" and self._words[-1].text != "]]":
            return
        if text == "(" and len(self._words) == 1 and self._peek() == ")":
            self._begin_function(self._words.pop().text)
            return
        if text == "\n" and not self._words and self._at > 1:
            before = self._tokens[self._at - 2]
            if before.is_operator and before.text in ("&&", "||", "|"):
                return
        self._end_command()
        if text == "(":
            self._open(is_process=True)
            return
        if text == ")":
            self._close()
            return
        if text in ("|", "|&", "&"):
            self._isolate()
        if text in ("|", "|&"):
            self._chain = (*self._chain, (next(_NUMBERS), PROCESS))
        elif text in ("&&", "||"):
            conditions = tuple(pair for pair in self._chain if pair[1] != PROCESS)
            before_it = conditions if text == "&&" and not self._is_or else ()
            first = self.steps[-1].words[0].text if self.steps else ""
            if text == "||" or not (first in _SURE or _ARRAY.match(first)):
                self._is_or = self._is_or or text == "||"
                self._chain = (*before_it, (next(_NUMBERS), 1))
        else:
            self._chain, self._is_or = (), False
            if text in (";;", ";&", ";;&") and self._blocks:
                self._blocks[-1].is_pattern = True
        self._started = len(self.steps)

    def _isolate(self) -> None:
        """Put the commands before a `|` or `&` into a process of their own."""
        at, process = len(self._branches), (next(_NUMBERS), PROCESS)
        for index in range(self._started, len(self.steps)):
            step = self.steps[index]
            context = (*step.context[:at], process, *step.context[at:])
            self.steps[index] = step._replace(context=context)

    def _take_word(self, token: Token) -> None:
        text = token.text
        if self._words:
            self._words.append(Word(text, token.line))
            if text == "in" and len(self._words) == 3 and self._words[0].text == "case":
                self._words = []
                self._open(is_pattern=True)
        elif text in ("if", "{", "while", "until", "for", "select"):
            self._open()
            if text in ("for", "select"):
                self._words.append(Word(text, token.line))
        elif text in ("then", "elif", "else", "do") and self._blocks:
            self._blocks[-1].branch += 1
        elif text in ("fi", "done", "}", "esac"):
            self._close()
        elif text == "function":
            name = self._peek()
            self._at += 1
            self._begin_function(name)
        elif text not in ("!", "time"):
            self._words.append(Word(text, token.line))

    def _peek(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _begin_function(self, name: str) -> None:
        while self._peek() in ("(", ")", "\n"):
            self._at += 1
        self._at += 1
        self._open(function=name)

    @property
    def _branches(self) -> Context:
        block = self._blocks[-1] if self._blocks else _Block((), (), 0)
        return (*block.outer, *(((block.number, block.branch),) if block.branch else ()))

    def _open(
        self, *, is_pattern: bool = False, is_process: bool = False, function: str = ""
    ) -> None:
        number = next(_NUMBERS)
        process = ((number, PROCESS),) if is_process else ()
        outer = () if function else (*self._branches, *self._chain, *process)
        block = _Block(outer, self._chain, number, 0, is_pattern, function, self.steps)
        block.started = self._started
        if function:
            self.steps = []
        self._blocks.append(block)
        self._chain, self._is_or, self._started = (), False, len(self.steps)

    def _close(self) -> None:
        if self._blocks:
            block = self._blocks.pop()
            self._chain, self._is_or, self._started = block.chain, False, block.started
            if block.function:
                self.functions[block.function] = self.steps
                self.steps = block.steps

    def _end_command(self) -> None:
        if self._words:
            text = " ".join(" ".join(word.text for word in self._words).split())
            self.steps.append(Step(self._words, text, (*self._branches, *self._chain)))
            self._words = []
