"""The `rewards` list: what every reward has. The parameters of each kind belong to `grpo_cli.rewards`."""

from typing import Any

from pydantic import ConfigDict, Field

from grpo_cli.recipe.base import Number, Section


class RewardConfig(Section):
    """One entry of `rewards`; keys that are not listed here are parameters of its `kind`."""

    model_config = ConfigDict(extra="allow")

    kind: str
    """Which reward; every kind has a section of its own in the recipe reference."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in logs and metrics; where it is not given the kind, or the function's name for `python`."""
    weight: Number = 1.0
    """Factor in the weighted sum."""

    @property
    def params(self) -> dict[str, Any]:
        """The kind's own parameters, as written."""
        return dict(self.model_extra or {})
