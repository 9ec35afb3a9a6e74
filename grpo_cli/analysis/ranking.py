"""Whether a model finds better answers likelier than worse ones to the same prompt.

Owns the two numbers. Likelihoods come from `fast.likelihood`, rewards from scored data.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

from grpo_cli.runs.files import write_text

RANKING, GAP = "ranking", "likelihood_gap"


@dataclass(frozen=True)
class RankedGroup:
    """The responses of one prompt, with what they are worth and how likely the model finds them."""

    row: int
    """The row of the data the prompt is of, from 0."""
    rewards: list[float]
    log_probabilities: list[float]
    """Mean over the tokens of each response, in nats."""

    @property
    def ranking(self) -> float | None:
        """Share of pairs ranked right."""
        return ranking_accuracy(self.log_probabilities, self.rewards)

    @property
    def gap(self) -> float | None:
        """How much likelier the better responses are."""
        return likelihood_gap(self.log_probabilities, self.rewards)


def write_ranked(path: Path, groups: Sequence[RankedGroup]) -> None:
    """Writes one group a line, as JSON."""
    write_text(path, "".join(json.dumps(asdict(group)) + "\n" for group in groups))


def rank_by_prompt(groups: Sequence[RankedGroup]) -> dict[str, dict[int, float]]:
    """`RANKING` and `GAP` of every prompt in which two rewards differ."""
    return {
        RANKING: {group.row: value for group in groups if (value := group.ranking) is not None},
        GAP: {group.row: value for group in groups if (value := group.gap) is not None},
    }


def read_ranked(path: Path) -> list[RankedGroup]:
    """Reads what `write_ranked` wrote; empty where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [RankedGroup(**json.loads(line)) for line in lines]


def ranking_accuracy(log_probabilities: Sequence[float], rewards: Sequence[float]) -> float | None:
    """Share of pairs of answers to a prompt of which the better rewarded is the likelier one.

    Pairs of equal reward do not count; a tie in likelihood is half right.

    Args:
        log_probabilities: Of each answer, per token, so that length does not decide.
        rewards: Of each answer.

    Returns:
        None where no two rewards differ.

    Source: "reward accuracy" of preference training (Rafailov et al. 2023), here of the policy itself.
    """
    judged = [
        0.5 if likelier == 0 else float((likelier > 0) == (better > 0))
        for first, second in combinations(range(len(rewards)), 2)
        if (better := rewards[first] - rewards[second])
        for likelier in (log_probabilities[first] - log_probabilities[second],)
    ]
    return fmean(judged) if judged else None


def likelihood_gap(log_probabilities: Sequence[float], rewards: Sequence[float]) -> float | None:
    """Mean log-probability of the answers above their group's mean reward, less that of those below.

    In nats a token; None where no two rewards differ.
    """
    middle = fmean(rewards)
    above = [
        value for value, reward in zip(log_probabilities, rewards, strict=True) if reward > middle
    ]
    below = [
        value for value, reward in zip(log_probabilities, rewards, strict=True) if reward < middle
    ]
    return fmean(above) - fmean(below) if above and below else None
