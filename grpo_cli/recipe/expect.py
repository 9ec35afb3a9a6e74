"""The `expect` section: where a normal run of the recipe lies, and by which runs that is known.

Owns the form of the block. Working bands out, and comparing a run with them, is `expectations`'.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

from grpo_cli.recipe.base import Integer, Number, OneOrMany, Section


def _check_pair(band: Any) -> Any:
    if not isinstance(band, list | tuple) or len(band) != 2:
        raise PydanticCustomError("grpo_band", "should be [low, high]")
    return band


def _check_band(band: tuple[float, float]) -> tuple[float, float]:
    if band[0] > band[1]:
        raise PydanticCustomError("grpo_band", "should be [low, high], the lower value first")
    return band


def _refuse_number(version: Any) -> Any:
    """Has `1.10` written in quotes, which would lose its zero."""
    if isinstance(version, int | float):
        raise PydanticKnownError("string_type")
    return version


class ExpectedMetric(Section):
    """One number of a run, and the band that normal runs lie in."""

    metric: str = Field(min_length=1)
    """What is compared.
    A name of `metrics.jsonl` (`reward`, `kl`, `completions/mean_length`, …), or one of the held-out
    measurement after training (`accuracy/NAME`, `rewards/NAME`, `completion_length`, `clipped`)."""
    step: Integer = Field(ge=1)
    """The optimizer step at which it is read.
    For a held-out metric it is the last one."""
    band: Annotated[
        tuple[Number, Number], BeforeValidator(_check_pair), AfterValidator(_check_band)
    ]
    """Lowest and highest normal value, both included."""
    window: Integer = Field(default=1, ge=1)
    """The mean of so many logged records up to the step is compared; no part in held-out metrics."""


class MeasuredConfig(Section):
    """What the bands come from, so that a run under other conditions is told so."""

    runs: OneOrMany[str] = ()
    """The runs, as `<name>/<timestamp>`."""
    seeds: tuple[Integer, ...] = ()
    """Their seeds."""
    hardware: OneOrMany[str] = ()
    """What they ran on."""
    versions: dict[str, Annotated[OneOrMany[str], BeforeValidator(_refuse_number)]] = Field(
        default_factory=dict
    )
    """Versions of the packages that decide what is trained."""
    date: str | None = None
    """When the last of them began."""
    settings: dict[str, str] = Field(default_factory=dict)
    """A short hash for each section of the recipe, over the settings that training depends on: not the
    seed, names, folders, and where it is logged."""
    data: str | None = None
    """The beginning of the data's fingerprint, where it is the same for all seeds."""


class ExpectConfig(Section):
    """What a normal run gives; `grpo expect RUN …` writes it, and `grpo train` ends by comparing."""

    metrics: tuple[ExpectedMetric, ...] = Field(min_length=1)
    """The numbers to compare."""
    measured: MeasuredConfig | None = None
    """How the bands were found."""
