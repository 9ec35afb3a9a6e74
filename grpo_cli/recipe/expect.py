"""The `expect` section: the expected ranges of a run's metrics, and the runs that they come from."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

from grpo_cli.recipe.base import Integer, Number, OneOrMany, Section


def _check_pair(band: Any) -> Any:
    if not isinstance(band, list | tuple) or len(band) != 2:
        raise PydanticCustomError("grpo_band", "should be [low, high]")
    return band


def _check_order(band: tuple[float, float]) -> tuple[float, float]:
    if band[0] > band[1]:
        raise PydanticCustomError("grpo_band", "should be [low, high], the lower value first")
    return band


def _refuse_number(version: Any) -> Any:
    """Require quotes around `1.10`, which would lose its zero."""
    if isinstance(version, int | float):
        raise PydanticKnownError("string_type")
    return version


class ExpectedMetric(Section):
    """One metric of a run, and its expected range."""

    metric: str = Field(min_length=1)
    """Name of the metric.
    A name in `metrics.jsonl` (`reward`, `kl`, `completions/mean_length`, …), or in the held-out
    evaluation (`accuracy/NAME`, `rewards/NAME`, `completion_length`, `clipped`)."""
    step: Integer = Field(ge=0)
    """The optimizer step at which the metric is read.
    For a held-out metric, the last step, or 0: before GRPO, and after the warm-up if there is one."""
    band: Annotated[
        tuple[Number, Number], BeforeValidator(_check_pair), AfterValidator(_check_order)
    ]
    """Lowest and highest expected value, both included."""
    window: Integer = Field(default=1, ge=1)
    """Compare the mean of this many logged records up to the step; ignored for held-out metrics."""


class MeasuredConfig(Section):
    """The runs that the ranges come from, so that a comparison can report different conditions."""

    runs: OneOrMany[str] = ()
    """The runs, as `<name>/<timestamp>`."""
    seeds: tuple[Integer, ...] = ()
    """Their seeds."""
    hardware: OneOrMany[str] = ()
    """What they ran on."""
    versions: dict[str, Annotated[OneOrMany[str], BeforeValidator(_refuse_number)]] = Field(
        default_factory=dict
    )
    """Versions of the packages that training depends on."""
    date: str | None = None
    """When the last of them started."""
    settings: dict[str, str] = Field(default_factory=dict)
    """A short hash for each section of the recipe, over the settings that affect training: not the
    seed, names, folders or logging."""
    data: str | None = None
    """The beginning of the data's fingerprint, if it is the same for all seeds."""


class ExpectConfig(Section):
    """What a normal run gives; `grpo expect RUN …` writes it, and `grpo train` compares its result with it."""

    metrics: tuple[ExpectedMetric, ...] = Field(min_length=1)
    """The metrics to compare."""
    measured: MeasuredConfig | None = None
    """The runs that the ranges come from."""
