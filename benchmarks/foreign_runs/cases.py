"""The runs that are made, as `cases.yaml` lists them."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Case:
    """A run to make."""

    label: str
    cause: str
    task: str
    """Prompts: `sum`, `think`, `long` or `talk`."""
    reward: str
    """Names of reward functions, one or several with spaces between."""
    truth: str = ""
    """The reward that tells whether the answers are good; the first one by default."""
    base: str = "modest"
    """The model to start from."""
    evaluated: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of `GRPOConfig`."""


def load_cases() -> list[Case]:
    """Return all cases in the order of their numbers."""
    groups = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
    own = {each.name for each in fields(Case)}
    return [
        Case(
            label,
            **{key: value for key, value in row.items() if key in own},
            arguments={key: value for key, value in row.items() if key not in own},
        )
        for label, rows in groups.items()
        for row in rows
    ]
