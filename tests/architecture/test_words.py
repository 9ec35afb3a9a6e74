"""What the project says of itself is true: every command it names exists."""

import re
from pathlib import Path

from grpo_cli.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("*.yaml")]
SOURCES = sorted((ROOT / "grpo_cli").rglob("*.py")) + sorted((ROOT / "grpo_cli").rglob("*.yaml"))
COMMAND = re.compile(r"(?:`|\$ |^#?\s*)grpo ([a-z][a-z-]*)", re.MULTILINE)


def test_every_command_named_anywhere_exists():
    for path in [*TEXTS, *SOURCES]:
        for name in COMMAND.findall(path.read_text(encoding="utf-8")):
            assert name in COMMANDS, f"{path.relative_to(ROOT)} names `grpo {name}`"


def test_the_readme_lists_every_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`grpo {name}" in readme, name
