"""The reward functions of a run in a table: what the recipe says of each, and what became of it."""

from dataclasses import dataclass
from statistics import fmean

from grpo_cli.errors import GrpoError
from grpo_cli.report.page.run_data import Course, RunData
from grpo_cli.rewards.building import name_rewards


@dataclass(frozen=True)
class RewardRow:
    """One reward function."""

    name: str
    kind: str
    weight: float
    course: Course | None
    """Of its mean score."""
    spread: float | None
    """Mean standard deviation over the last tenth."""
    error_share: float | None
    seconds: float | None
    """Mean time of scoring."""


def list_rewards(run: RunData) -> list[RewardRow]:
    """The recipe's rewards with what became of them."""
    try:
        names = name_rewards(run.recipe.rewards)
    except GrpoError:
        return []
    return [
        _reward_row(run, name, config.kind, config.weight)
        for name, config in zip(names, run.recipe.rewards, strict=True)
    ]


def _reward_row(run: RunData, name: str, kind: str, weight: float) -> RewardRow:
    stds, errors, seconds = (
        run.values(f"rewards/{name}/{part}") for part in ("std", "error_share", "seconds")
    )
    width = max(len(stds) // 10, 1)
    return RewardRow(
        name,
        kind,
        weight,
        run.course(f"rewards/{name}/mean"),
        _mean(stds[-width:]),
        _mean(errors),
        _mean(seconds),
    )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None
