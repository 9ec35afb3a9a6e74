"""README.md and the pages of docs/, taken apart: fenced blocks, and the commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SLOW = {
    "train",
    "probe",
    "eval",
    "expect",
    "report",
    "export",
    "serve",
    "chat",
    "doctor",
    "runs",
    "watch",
}
_COMMENT = re.compile(r"\s+# .*$")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    """Of its first line of content, from 1."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command that a page shows, and what it shows of the output."""

    page: str
    line: int
    text: str
    """As a shell takes it, without a comment."""
    shown: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def is_slow(self) -> bool:
        """Whether it takes more than a second or two: imports heavy libraries, loads a model, or waits."""
        words = self.text.split()
        # What `make.py` makes is there only after it ran.
        if words[0] == "python" or "recipes/offline/" in self.text:
            return True
        if words[0] != "grpo" or words[1:3] == ["doctor", "--quick"]:
            return False
        # A removal needs the runs that are made for the slow ones, though it removes nothing.
        if "--dry-run" in words:
            return words[1] == "runs"
        return words[1] in _SLOW or words[1:3] in (["rewards", "test"], ["env", "test"])


def read_blocks(*languages: str) -> list[Block]:
    """The fenced blocks of all pages in these languages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            if match[1] in languages:
                found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found


def read_commands() -> list[Command]:
    """The commands of all console blocks, in order."""
    return [command for block in read_blocks("console") for command in _commands_of(block)]


def _commands_of(block: Block) -> list[Command]:
    found: list[Command] = []
    lines = iter(enumerate(block.text.splitlines(), start=block.line))
    for number, line in lines:
        if not line.startswith("$ "):
            last = found.pop()
            found.append(Command(last.page, last.line, last.text, (*last.shown, line)))
            continue
        text = _COMMENT.sub("", line[2:])
        while text.endswith("\\"):
            text = f"{text[:-1]} {_COMMENT.sub('', next(lines)[1]).strip()}"
        found.append(Command(block.page, number, " ".join(text.split()), ()))
    return found
