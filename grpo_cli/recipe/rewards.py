"""The `rewards` list: what every reward has. The parameters of each kind belong to `grpo_cli.rewards`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import NAME, Number, Section


def _check_order(scores: tuple[float, float]) -> tuple[float, float]:
    if scores[0] >= scores[1]:
        raise PydanticCustomError("grpo_score_range", "should be [lowest, highest]")
    return scores


ScoreRange = Annotated[tuple[Number, Number], AfterValidator(_check_order)]
"""The lowest and the highest score."""


class RewardConfig(Section):
    """One entry of `rewards`; keys that are not listed here are parameters of its `kind`."""

    model_config = ConfigDict(extra="allow")

    kind: str
    """The kind of reward; `grpo rewards list` lists the kinds, `grpo rewards show KIND` their parameters."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in logs and metrics; by default the kind, or the function's name for `python`."""
    weight: Number = 1.0
    """Factor in the weighted sum."""
    when: str | None = None
    """Rows that the reward applies to: a Jinja expression over the dataset's columns, such as `task == "math"` or
    `level >= 3 and answer`; it does not score other rows. Leave out for all rows."""
    source: str | None = Field(default=None, pattern=NAME)
    """The one source of `dataset.sources` that the reward is for, as if it stood there under `rewards`."""
    timeout_s: Number | None = Field(default=None, gt=0)
    """Time limit per completion, in seconds. If set, completions are scored individually, several in parallel, in
    processes that are killed at the limit. Kinds that parse the completion (math, regex, reasoning_gym) have their
    own limit, and score 0 beyond it; for the others, `on_error` applies. Imports do not count, nor what
    scoring an empty completion loads, which each process does first. A `python` function then receives one
    completion at a time, and only plain values of `trainer_state`, such as `global_step`; what it logs is
    discarded."""
    on_error: Literal["raise", "zero", "skip"] = "raise"
    """What happens if scoring a completion fails: `raise` ends the run, `zero` scores 0, `skip` gives no score,
    so only the other rewards count. Failures are logged, and their share is a metric."""
    reads: Literal["last", "model", "all"] = "last"
    """Which messages of a completion with several turns are scored as its text: the model's `last` one, all of the
    `model`'s, or `all`, with the results of tools and environments."""
    accuracy: bool | None = None
    """Whether the best score, or 1 if there is none, means that an answer is correct: the share of such answers
    is then measured as `accuracy/NAME`. By default true for kinds that judge answers; set it for a `python`
    function or an `environment` that does."""
    clip: ScoreRange | None = None
    """Lowest and highest score; scores are clipped to this range."""

    @property
    def condition(self) -> str | None:
        """The rows that it applies to, by `source` and `when`, as one expression; None for all."""
        own = f'source == "{self.source}"' if self.source else None
        return f"{own} and ({self.when})" if own and self.when else own or self.when

    @property
    def params(self) -> dict[str, Any]:
        """The kind's own parameters, as written."""
        return dict(self.model_extra or {})
