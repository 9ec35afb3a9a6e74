"""Draws prompts by their difficulty: in the order of a column, or by how often their answers were right so far."""

import math
from collections.abc import Mapping, Sequence, Set
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_cli.data.mixing import SOURCE
from grpo_cli.errors import RunError
from grpo_cli.recipe.difficulty import (
    AdaptiveDifficulty,
    DifficultyConfig,
    OrderDifficulty,
    PoolsDifficulty,
)
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import right_scores

_EASY, _HARD = 0.8, 0.2
"""Estimated shares of right answers from which on prompts are logged as easy or hard; pools have their own."""
_NEWEST, _NEWEST_OF_ALIKE = 0.5, 0.1
"""Weights of the newest group in moving means: of a prompt, and (after some groups) of prompts that are alike."""


class SuccessEstimates:
    """Estimated shares of right answers of every prompt: moving means over its groups.

    A prompt begins with its `solve_rate`, or with the mean of prompts like it: one half and then their groups.
    """

    def __init__(self, known: torch.Tensor, like: torch.Tensor) -> None:
        """Begin with no group.

        Args:
            known: Solve rates from before, [prompts] float64; NaN if unknown.
            like: Equal for prompts that are alike, [prompts] int64, from 0.
        """
        self._own, self._like = known, like
        self._shared = torch.full((int(like.max()) + 1,), 0.5, dtype=torch.float64)
        self._groups = torch.zeros_like(self._shared)

    def add(self, prompt: int, share: float) -> None:
        """Add a group by its share of right answers."""
        before, like = self.all()[prompt], self._like[prompt]
        self._own[prompt] = before + _NEWEST * (share - before)
        # The mean of the first groups, then a moving one.
        self._groups[like] += 1
        newest = max(_NEWEST_OF_ALIKE, 1 / (self._groups[like].item() + 1))
        self._shared[like] += newest * (share - self._shared[like])

    def all(self) -> torch.Tensor:
        """Return the estimates, [prompts] float64."""
        return torch.where(self.known(), self._own, self._shared[self._like])

    def known(self) -> torch.Tensor:
        """Return of which prompts there is more than what others did, [prompts] bool."""
        return ~self._own.isnan()

    def state(self) -> dict[str, torch.Tensor]:
        """Return what changes in training."""
        return {"own": self._own, "shared": self._shared, "groups": self._groups}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""
        self._own, self._shared, self._groups = (
            state[name] for name in ("own", "shared", "groups")
        )


class DifficultySampler:
    """Draws the prompts of each generation batch, on all processes alike."""

    def __init__(self, config: DifficultyConfig, data: Any, recipe: Recipe) -> None:
        """Begin with no prompt drawn.

        Args:
            config: How prompts are drawn.
            data: The training data. In a mixture a prompt has as many rows as it comes up in an epoch.
            recipe: The whole recipe.
        """
        self._config, self._seed = config, recipe.seed
        rows = torch.tensor(data["row_id"])
        _, self._prompt_of, counts = rows.unique(return_inverse=True, return_counts=True)
        self._share = counts.double()
        # The first row of each.
        self._places = torch.full((len(counts),), len(rows)).scatter_reduce(
            0, self._prompt_of, torch.arange(len(rows)), "amin"
        )
        self._place_of = dict(zip(data["row_id"], range(len(rows)), strict=True))
        self._first = data.select(self._places.tolist())
        self._drawn = torch.zeros_like(counts)
        self._calls = 0
        self._latest: list[int] = []
        if isinstance(config, OrderDifficulty):
            self._values = self._column(config.column)
        else:
            known = self._column(config.solve_rate)
            _check_shares(config.solve_rate, known)
            self._estimates = SuccessEstimates(known, self._alike(config.by, recipe))
            right = right_scores(recipe.rewards)
            names = [config.reward] if config.reward else list(right)
            self._right = {name: right.get(name, 1.0) for name in names}

    def _column(self, name: str | None) -> torch.Tensor:
        """Return a column's numbers, [prompts] float64; NaN where it has none."""
        if name is None:
            return torch.full_like(self._share, torch.nan)
        numbers = [_read_number(name, value) for value in self._first[name]]
        return torch.tensor(numbers, dtype=torch.float64)

    def _alike(self, by: str | None, recipe: Recipe) -> torch.Tensor:
        by = by or (SOURCE if recipe.dataset.shares else None)
        if by is None:
            return torch.zeros_like(self._drawn)
        values = [str(value) for value in self._first[by]]
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        return torch.tensor([numbers[value] for value in values])

    @property
    def taken(self) -> int:
        """Prompts drawn so far."""
        return int(self._drawn.sum())

    def take(self, count: int, avoid: Set[int] = frozenset()) -> list[int]:
        """Return rows with so many different prompts, none of the rows to `avoid` while there are others."""
        ranks = self._rank(count)
        avoided = [self._prompt_of[place].item() for place in avoid]
        ranks[avoided] -= ranks.max() - ranks.min() + 1
        best = ranks.topk(min(count, len(ranks))).indices.tolist()
        self._latest = (best * (count // len(best) + 1))[:count]
        self._calls += 1
        self._drawn.index_add_(0, *(torch.tensor(each) for each in (self._latest, [1] * count)))
        return self._places[self._latest].tolist()

    def _rank(self, count: int) -> torch.Tensor:
        """Return in which order prompts are to be drawn, the highest first, [prompts] float64."""
        config = self._config
        if isinstance(config, OrderDifficulty):
            return -self._drawn * len(self._drawn) - self._order(config.descending)
        success = self._estimates.all()
        weights = self._share.clone()
        if isinstance(config, AdaptiveDifficulty):
            weights *= config.floor + (1 - config.floor) * 4 * success * (1 - success)
        # Prompts of equal weight come equally often, others as often as their weights say.
        ranks = -(self._drawn + self._chance(self._calls)) / weights
        if isinstance(config, PoolsDifficulty):
            self._keep_pools(config, ranks, success, count)
        return ranks

    def _order(self, descending: bool) -> torch.Tensor:
        """Return each prompt's place in the order of the column; those without a value come last."""
        by_chance = self._chance(0).argsort()
        values = self._values[by_chance]
        values = (-values if descending else values).nan_to_num(torch.inf)
        order = torch.empty_like(self._values)
        order[by_chance[values.argsort(stable=True)]] = torch.arange(len(order)).double()
        return order

    def _chance(self, number: int) -> torch.Tensor:
        """Return random numbers, the same in each process: [prompts] float64, from 0 to below 1."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        return torch.rand(len(self._drawn), dtype=torch.float64, generator=generator)

    def _keep_pools(
        self, config: PoolsDifficulty, ranks: torch.Tensor, success: torch.Tensor, count: int
    ) -> None:
        """Have as many easy and hard prompts drawn first as their shares ask for, and the others of them last."""
        far, known = ranks.max() - ranks.min() + 1, self._estimates.known()
        pools = [
            (known & (success >= config.easy), config.easy_share),
            (known & (success <= config.hard), config.hard_share),
        ]
        for pool, share in pools:
            # Rounded so that shares are right over many batches.
            wanted = int((self.taken + count) * share) - int(self.taken * share)
            members = pool.nonzero().flatten()
            first = members[ranks[members].topk(min(wanted, len(members))).indices]
            ranks[members] -= far
            ranks[first] += 2 * far

    def learn(self, rows: Sequence[Any], rewards: torch.Tensor, names: Sequence[str]) -> None:
        """Learn how often the answers to prompts are right.

        Args:
            rows: Of this process's completions.
            rewards: [completions, rewards] float32, of all processes in order; NaN if a reward gave none.
            names: Of the rewards.
        """
        if isinstance(self._config, OrderDifficulty):
            return
        places = [self._place_of[row] for row in gather_object([row["row_id"] for row in rows])]
        scores = [
            rewards[:, names.index(name)].double() / right for name, right in self._right.items()
        ]
        shares: dict[int, list[float]] = {}
        means = torch.stack(scores).clamp(0, 1).nanmean(dim=0).tolist()
        for place, mean in zip(places, means, strict=True):
            if not math.isnan(mean):
                shares.setdefault(self._prompt_of[place].item(), []).append(mean)
        for prompt, of_group in shares.items():
            self._estimates.add(prompt, fmean(of_group))

    def metrics(self) -> dict[str, float]:
        """Return where the prompts stand, and those that were drawn last."""
        seen = {"seen": (self._drawn > 0).double().mean().item()}
        if isinstance(self._config, OrderDifficulty):
            return seen | {"drawn": self._values[self._latest].nanmean().item()}
        success = self._estimates.all()
        easy, hard = _EASY, _HARD
        if isinstance(self._config, PoolsDifficulty):
            easy, hard = self._config.easy, self._config.hard
        return seen | {
            "drawn": success[self._latest].mean().item(),
            "success": success.mean().item(),
            "easy": (success >= easy).double().mean().item(),
            "hard": (success <= hard).double().mean().item(),
        }

    def state(self) -> dict[str, Any]:
        """Return what changes in training, for a checkpoint."""
        state = {"drawn": self._drawn, "calls": self._calls}
        if not isinstance(self._config, OrderDifficulty):
            state |= self._estimates.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._drawn, self._calls = state["drawn"], state["calls"]
        if not isinstance(self._config, OrderDifficulty):
            self._estimates.restore(state)


def _check_shares(column: str | None, values: torch.Tensor) -> None:
    wrong = values[(values < 0) | (values > 1)]
    if len(wrong):
        raise RunError(
            f"dataset.difficulty.solve_rate: the column `{column}` has {wrong[0]:g}, and shares are 0 to 1. Fix: "
            "divide it by its greatest value; if low values mean easy prompts, use `kind: order`"
        )


def _read_number(column: str, value: Any) -> float:
    try:
        return math.nan if value in (None, "") else float(value)
    except (TypeError, ValueError):
        raise RunError(
            f"dataset.difficulty: the column `{column}` has {value!r:.60}, which is no number. Fix: name a column "
            "of numbers, or take the number out of it under `dataset.columns` (`regex`)"
        ) from None
