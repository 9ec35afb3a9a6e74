"""Records in text that tools print: dicts, `step:N - key:value`, bullets, `Step N | key: value`, tables."""

import html
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

Raw = dict[str, Any]
"""A record as it was logged: numbers may still be text, and names are the tool's."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_RAY = re.compile(r"^\([\w.:\[\]=, /-]* ?pid=\d+[^)]*\) ?")
_START = re.compile(r"""\{\s*(?:$|['"][^'"{}]{1,120}['"]\s*:)""")
_NEW = re.compile(r"""\{\s*['"](?:loss|reward|step|policy_loss)['"]\s*:""")
"""How a record begins; one that is not complete before it is torn."""
_NUMBER = re.compile(r"\b(rollout|step|perf) (\d+): ?$")
_BRACE = re.compile(r"[{}]")
_PAIR = re.compile(
    r"""['"]([^'"]{1,120})['"]\s*:\s*(?:[A-Za-z_][\w.]*\()?\s*(?:'([^']*)'|"([^"]*)"|([^\s,}\])]+))"""
)
_MOST_LINES = 200
"""Of a dict; a brace that is never closed must not hide what follows."""
_BAR = re.compile(r"\d+%\|.*\|.*[\[\]]")
_VERL = re.compile(r"\bstep:\s*(\d+)(?= - )")
_STEP = re.compile(
    r"\b(?:global[_ ])?(?:step|iteration|iter)s?\b\s*[:=#]?\s*\[?(\d+)(?:\s*/\s*(\d+))?", re.I
)
_FIELD = re.compile(
    r"([A-Za-z][\w./-]*(?:\.? [A-Za-z][\w./-]*){0,3})\s*[:=]\s*"
    r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf)\b)",
    re.I,
)
_POSTFIX = re.compile(r"\[[^\[\]]*?(?:it/s|s/it|\?), ([^\[\]]*=[^\[\]]*)\]")
_HEADER = re.compile(r"={3,} Step (\d+)(?:/(\d+))? ={3,}", re.I)
_SECTION = re.compile(r"^\W*([A-Z][\w ()/]*?(?:Results|Metrics|Timing)):\s*$")
_BULLET = re.compile(r"^\s*[•*]\s*([^:]{1,60}):\s*([-+]?[\d.]+(?:e[-+]?\d+)?|nan|inf)\b", re.I)
_ROW = re.compile(r"<tr[^>]*>(.*?)</tr>", re.S | re.I)
_CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>", re.S | re.I)
_TAG = re.compile(r"<[^>]*>")
_REWARD = re.compile(r"reward|\brm\b|score", re.I)


def clean_line(line: str) -> str:
    """Return a line without escape sequences, control characters and the prefix of Ray."""
    if "\x1b" in line:
        line = _ESCAPES.sub("", line)
    return _RAY.sub("", line) if line.startswith("(") else line


def read_dict(text: str) -> Raw:
    """Return what a printed dict holds; never evaluates anything, so that values of other kinds are left out."""
    try:
        values = json.loads(text if '"' in text else text.replace("'", '"'))
    except ValueError:
        pairs = _PAIR.findall(text)
        return {name: first or second or bare for name, first, second, bare in pairs}
    return values if isinstance(values, dict) else {}


def read_tables(text: str) -> Iterator[Raw]:
    """Yield the rows of tables in HTML."""
    names: list[str] = []
    for row in _ROW.findall(text):
        cells = [" ".join(html.unescape(_TAG.sub("", cell)).split()) for cell in _CELL.findall(row)]
        if "<th" in row.lower() and "<td" not in row.lower():
            names = cells
        elif len(cells) == len(names) > 1:
            yield dict(zip(names, cells, strict=True))


class TextReader:
    """Finds records in lines of text; of the others it keeps the first ones, which may name settings."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Lines without a record, the first of them."""
        self._dict = ""
        """A dict that is not closed yet."""
        self._lines = 0
        self._block: Raw = {}
        """Bullets of a step."""
        self._prefix: str | None = None
        """Of the names in the present section of bullets; None outside of training and validation."""
        self._columns: list[str] = []
        """Of a table drawn with `|`."""

    def read(self, lines: Iterable[str]) -> Iterator[Raw]:
        """Yield the records of all lines."""
        for line in lines:
            yield from self._read_line(clean_line(line.rstrip("\r\n")))
        yield from self._end_block()

    def _read_line(self, line: str) -> Iterator[Raw]:
        if self._dict:
            if not _NEW.search(line):
                yield from self._continue_dict(line)
                return
            self._dict = ""
        if ("it/s" in line or "s/it" in line) and "=" not in line and "{" not in line:
            # A progress bar, of which there may be more than of all else.
            return
        if "{" in line and (start := _START.search(line)):
            yield from self._read_dicts(line, start.start())
        elif " - " in line and (match := _VERL.search(line)):
            parts = (part.rpartition(":") for part in line[match.end() :].split(" - "))
            yield {"step": match[1], **{name: value for name, _, value in parts if name}}
        elif "===" in line and (match := _HEADER.search(line)):
            yield from self._end_block()
            self._block = {"step": match[1], **({"max_steps": match[2]} if match[2] else {})}
        elif self._block and (match := _SECTION.match(line)):
            section = match[1].lower()
            self._prefix = {"training": "", "validation": "eval_"}.get(section.split()[0])
            self._prefix = self._prefix if section.endswith("results") else None
        elif self._prefix is not None and (match := _BULLET.match(line)):
            self._block[f"{self._prefix}{match[1].strip()}"] = match[2]
        elif ("|" in line and (record := self._read_row(line))) or (
            ("=" in line or ":" in line) and (record := self._read_fields(line))
        ):
            yield record
        elif line and len(self.notes) < 20_000 and len(line) < 20_000:
            self.notes.append(line)

    def _end_block(self) -> Iterator[Raw]:
        if len(self._block) > 2:
            yield self._block
        self._block, self._prefix = {}, None

    def _read_dicts(self, line: str, start: int) -> Iterator[Raw]:
        """Yield the dicts of a line; keep the last one if it is not closed."""
        while start >= 0:
            if (end := _find_end(line, start)) is None:
                self._dict, self._lines = line[start:], 0
                return
            # Tools print a number before a dict; slime has several steps of learning to a rollout.
            number = _NUMBER.search(line, 0, start)
            record = read_dict(line[start:end])
            counts = number and (number[1] != "step" or any(map(_REWARD.search, record)))
            yield {"step": number[2], **record} if number and counts else record
            following = _START.search(line, end)
            start = following.start() if following else -1

    def _continue_dict(self, line: str) -> Iterator[Raw]:
        if _BAR.search(line) and not _PAIR.search(line):
            return
        self._dict += f"\n{line}"
        self._lines += 1
        if (end := _find_end(self._dict, 0)) is not None:
            text, self._dict = self._dict[:end], ""
            yield read_dict(text)
        elif self._lines > _MOST_LINES:
            self._dict = ""

    def _read_row(self, line: str) -> Raw | None:
        """Return a row of a table that is drawn with `|`, after its line of names."""
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        lowered = [cell.lower() for cell in cells]
        if "step" in lowered and any(map(_REWARD.search, cells)) and not _FIELD.search(line):
            self._columns = cells
        elif self._columns and len(cells) == len(self._columns) and cells[0][:1].isdigit():
            return dict(zip(self._columns, cells, strict=True))
        return None

    def _read_fields(self, line: str) -> Raw | None:
        """Return the fields of a line with a step and a reward, or those behind a progress bar."""
        if "=" in line and (match := _POSTFIX.search(line)):
            fields = dict(_FIELD.findall(match[1]))
            return fields if any(map(_REWARD.search, fields)) else None
        match = _STEP.search(line)
        if match is None:
            return None
        fields = dict(_FIELD.findall(line, match.end()))
        if not any(map(_REWARD.search, fields)) and len(fields) < 3:
            return None
        return {"step": match[1], **({"max_steps": match[2]} if match[2] else {}), **fields}


def _find_end(text: str, start: int) -> int | None:
    """Return where the brace that opens at `start` is closed; None if it is not."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    return None
