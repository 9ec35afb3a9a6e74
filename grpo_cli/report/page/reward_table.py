"""The reward functions of a run in a table: what the recipe says of each, and what became of it."""

from dataclasses import dataclass
from statistics import fmean

from grpo_cli.errors import GrpoError
from grpo_cli.report.page.material import Material
from grpo_cli.rewards.building import name_rewards


@dataclass(frozen=True)
class RewardRow:
    """One reward function."""

    name: str
    kind: str
    weight: float
    first: float | None
    """Mean over the first tenth of the records."""
    last: float | None
    spread: float | None
    """Mean standard deviation over the last tenth."""
    error_share: float | None
    seconds: float | None
    """Mean time of scoring."""


def list_rewards(run: Material) -> list[RewardRow]:
    """The recipe's rewards with what became of them."""
    try:
        names = name_rewards(run.recipe.rewards)
    except GrpoError:
        return []
    return [
        _reward_row(run, name, config.kind, config.weight)
        for name, config in zip(names, run.recipe.rewards, strict=True)
    ]


def _reward_row(run: Material, name: str, kind: str, weight: float) -> RewardRow:
    means, stds = (run.values(f"rewards/{name}/{part}") for part in ("mean", "std"))
    width = max(len(means) // 10, 1)
    errors, seconds = (run.values(f"rewards/{name}/{part}") for part in ("error_share", "seconds"))
    return RewardRow(
        name,
        kind,
        weight,
        _mean(means[:width]),
        _mean(means[-width:]),
        _mean(stds[-width:]),
        _mean(errors),
        _mean(seconds),
    )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None
