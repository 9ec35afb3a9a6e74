"""The `rewards` list: what every reward has. The parameters of each kind belong to `grpo_cli.rewards`."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import Number, Section


class RewardConfig(Section):
    """One entry of `rewards`; keys that are not listed here are parameters of its `kind`."""

    model_config = ConfigDict(extra="allow")

    kind: str
    """Which reward; `grpo rewards list` names the kinds, `grpo rewards show KIND` their parameters."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in logs and metrics; where it is not given the kind, or the function's name for `python`."""
    weight: Number = 1.0
    """Factor in the weighted sum."""
    when: str | None = None
    """Rows it applies to: an expression on the dataset's columns in Jinja's language, such as
    `task == "math"` or `level >= 3 and answer`; other rows get no score from it. Leave out for all rows."""
    timeout_s: Number | None = Field(default=None, gt=0)
    """Seconds for one completion. With it, completions are scored one by one, several at a time, in
    processes that are killed when they take longer. Kinds that read what the model wrote (math, regex,
    reasoning_gym) have a limit of their own, and score 0 beyond it; elsewhere `on_error` decides.
    A `python` function then sees one completion at a time, and of `trainer_state` only plain values such
    as `global_step`; what it logs is lost."""
    on_error: Literal["raise", "zero", "skip"] = "raise"
    """What a completion gets whose scoring fails: `raise` ends the run, `zero` scores 0, `skip` gives no
    score, so that the other rewards decide. Failures are logged and their share is a metric."""
    accuracy: bool | None = None
    """Whether its best score, or 1 where it has none, means that an answer is right: the share of such answers is
    then measured as `accuracy/NAME`. Left out, this is so for kinds that judge answers, and for a `python`
    function whose scores are all 0 or 1."""
    clip: tuple[Number, Number] | None = None
    """Lowest and highest score; what lies beyond is moved to the nearer of the two."""

    @field_validator("clip")
    @classmethod
    def _check_clip(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and clip[0] >= clip[1]:
            raise PydanticCustomError("grpo_clip", "should be [lowest, highest]")
        return clip

    @property
    def params(self) -> dict[str, Any]:
        """The kind's own parameters, as written."""
        return dict(self.model_extra or {})
