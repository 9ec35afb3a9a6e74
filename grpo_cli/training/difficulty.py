"""Draws prompts by their difficulty: in the order of a column, or by how often their answers were right so far."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_cli.data.solve_rates import find_matches, read_solve_rates
from grpo_cli.data.tasks import LEVEL
from grpo_cli.errors import RunError
from grpo_cli.recipe.dataset import SOURCE
from grpo_cli.recipe.difficulty import (
    AdaptiveDifficulty,
    DifficultyConfig,
    OrderDifficulty,
    PoolsDifficulty,
    read_number,
)
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import right_answers

_EASY, _HARD = 0.8, 0.2
"""Estimated shares of right answers at which prompts are logged as easy or hard; pools have their own."""
_ROUNDING = 1e-5
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

    def __init__(self, data: Any, seed: int) -> None:
        """Begin with no prompt drawn.

        Args:
            data: The training data. In a mixture a prompt has one row for each time that it is drawn in an epoch.
        """
        self._seed = seed
        rows = torch.tensor(data["row_id"][:])
        _, self._prompt_of, counts = rows.unique(return_inverse=True, return_counts=True)
        # The first row of each.
        self._places = torch.full((len(counts),), len(rows)).scatter_reduce(
            0, self._prompt_of, torch.arange(len(rows)), "amin"
        )
        self._place_of = dict(zip(rows.tolist(), range(len(rows)), strict=True))
        self._first = data.select(self._places.tolist())
        self._share = self._mean_by_source(counts.double())
        self._drawn = torch.zeros_like(counts)
        self._calls = 0
        self._latest: list[int] = []

    @property
    def taken(self) -> int:
        """Prompts drawn so far."""
        return int(self._drawn.sum())

    def take(self, count: int, avoid: Set[int] = frozenset()) -> list[int]:
        """Return rows with `count` different prompts, none of the rows to `avoid` while there are others."""
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
        raise NotImplementedError

    def learn(self, rows: Sequence[Any], rewards: torch.Tensor, names: Sequence[str]) -> None:
        """Learn from completions how difficult prompts are.

        Args:
            rewards: [completions, rewards] float32, of all processes in order; NaN if a reward gave none.
        """

    def metrics(self) -> dict[str, float]:
        """Return where the prompts stand, and those that were drawn last."""
        return {"seen": (self._drawn > 0).double().mean().item()}

    def state(self) -> dict[str, Any]:
        """Return what changes in training, for a checkpoint."""
        return {"drawn": self._drawn, "calls": self._calls}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._drawn, self._calls = state["drawn"], state["calls"]

    def _mean_by_source(self, counts: torch.Tensor) -> torch.Tensor:
        """Return how often each prompt comes up in an epoch on average: where a pass ends is chance."""
        if SOURCE not in self._first.column_names:
            return counts
        source = _number(self._first[SOURCE][:])
        sums = torch.zeros_like(counts).index_add(0, source, counts)
        return (sums / source.bincount(minlength=len(sums)))[source]

    def _column(self, key: str, name: str | None) -> torch.Tensor:
        """Return the numbers of the column that a key names, [prompts] float64; NaN where it has none."""
        if name is None:
            return torch.full_like(self._share, torch.nan)
        numbers = [read_number(key, name, value) for value in self._first[name][:]]
        return torch.tensor(numbers, dtype=torch.float64)

    def _chance(self, number: int) -> torch.Tensor:
        """Return random numbers, the same in each process: [prompts] float64, from 0 to below 1."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        return torch.rand(len(self._drawn), dtype=torch.float64, generator=generator)


class _OrderSampler(DifficultySampler):
    """Draws prompts in the order of a column, pass after pass; those without a value come last."""

    def __init__(self, config: OrderDifficulty, data: Any, recipe: Recipe) -> None:
        super().__init__(data, recipe.seed)
        self._values = self._column("column", config.column)
        if self._values.isnan().all():
            raise RunError(
                f"dataset.difficulty: the column `{config.column}` has no value in any row",
                "name another",
            )
        by_chance = self._chance(0).argsort()
        values = self._values[by_chance]
        values = (-values if config.descending else values).nan_to_num(torch.inf)
        self._order = torch.empty_like(self._values)
        self._order[by_chance[values.argsort(stable=True)]] = torch.arange(len(values)).double()

    def _rank(self, count: int) -> torch.Tensor:
        return -self._drawn * len(self._drawn) - self._order

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"drawn": self._values[self._latest].nanmean().item()}


class _SuccessSampler(DifficultySampler):
    """Draws prompts as often as their weights say, which follow how often they are solved.

    Each draw of a prompt takes as much of its time as its weight says, and the prompt whose time comes first is
    drawn: those of equal weight come equally often. What was drawn less in the past is not made up for.

    Source: start-time fair queueing (Goyal, Vin and Cheng 1996), with shuffled ends.
    """

    def __init__(
        self, config: PoolsDifficulty | AdaptiveDifficulty, data: Any, recipe: Recipe
    ) -> None:
        super().__init__(data, recipe.seed)
        self._config = config
        self._right = right_answers(recipe.rewards, config.reward)
        known = self._column("solve_rate", config.solve_rate)
        if config.samples is not None:
            measured = self._measured(config.samples)
            known = torch.where(measured.isnan(), known, measured)
        self._estimates = SuccessEstimates(known, self._alike(config.by, recipe))
        # When each prompt is next ready to be drawn, in draws of a prompt of weight 1; and the time that it is.
        self._ready = torch.zeros_like(self._share)
        self._now = 0.0

    def _measured(self, path: str) -> torch.Tensor:
        """Return the shares of right answers in samples from before, [prompts] float64; NaN without any."""
        rates = find_matches(read_solve_rates(path, self._right), self._first["prompt"][:], path)
        values = [math.nan if rate is None else rate for rate in rates]
        return torch.tensor(values, dtype=torch.float64)

    def _alike(self, by: str | None, recipe: Recipe) -> torch.Tensor:
        own = LEVEL if getattr(recipe.dataset, "levels", ()) else None
        by = by or (SOURCE if recipe.dataset.shares else own)
        if by is None:
            return torch.zeros_like(self._drawn)
        return _number(str(value) for value in self._first[by][:])

    def take(self, count: int, avoid: Set[int] = frozenset()) -> list[int]:
        weights, begins = self._weights(), self._ready.clamp(min=self._now)
        places = super().take(count, avoid)
        self._ready[self._latest] = (begins + 1 / weights)[self._latest]
        self._now = max(self._now, begins[self._latest].min().item())
        return places

    def _weights(self) -> torch.Tensor:
        if isinstance(self._config, PoolsDifficulty):
            return self._share
        success, floor = self._estimates.all(), self._config.floor
        return self._share * (floor + (1 - floor) * 4 * success * (1 - success))

    def _rank(self, count: int) -> torch.Tensor:
        begins = self._ready.clamp(min=self._now)
        ranks = -(begins + self._chance(self._calls) / self._weights())
        if isinstance(self._config, PoolsDifficulty):
            self._keep_pools(self._config, ranks, count)
        return ranks

    def _keep_pools(self, config: PoolsDifficulty, ranks: torch.Tensor, count: int) -> None:
        """Order prompts so that the easy and hard pools keep their shares; put the surplus last."""
        success, known = self._estimates.all(), self._estimates.known()
        far = ranks.max() - ranks.min() + 1
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
        places = [self._place_of[row] for row in gather_object([row["row_id"] for row in rows])]
        scores = []
        for name, right in self._right.items():
            values = rewards[:, names.index(name)].double() / right
            _check_scores(name, right, values)
            scores.append(values)
        shares: dict[int, list[float]] = {}
        means = torch.stack(scores).clamp(min=0).nanmean(dim=0).tolist()
        for place, mean in zip(places, means, strict=True):
            if not math.isnan(mean):
                shares.setdefault(self._prompt_of[place].item(), []).append(mean)
        for prompt, of_group in shares.items():
            self._estimates.add(prompt, fmean(of_group))

    def metrics(self) -> dict[str, float]:
        success = self._estimates.all()
        easy, hard = _EASY, _HARD
        if isinstance(self._config, PoolsDifficulty):
            easy, hard = self._config.easy, self._config.hard
        return super().metrics() | {
            "drawn": success[self._latest].mean().item(),
            "success": success.mean().item(),
            "easy": (success >= easy).double().mean().item(),
            "hard": (success <= hard).double().mean().item(),
        }

    def state(self) -> dict[str, Any]:
        times = {"ready": self._ready, "now": self._now}
        return super().state() | times | self._estimates.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._ready, self._now = state["ready"], state["now"]
        self._estimates.restore(state)


def build_sampler(recipe: Recipe, config: DifficultyConfig, data: Any) -> DifficultySampler:
    """Return what draws the prompts of a recipe from its training data.

    Raises:
        RecipeError: A column that it needs has other values than numbers, or samples do not fit.
        RunError: The column of an order has no value at all.
    """
    if isinstance(config, OrderDifficulty):
        return _OrderSampler(config, data, recipe)
    return _SuccessSampler(config, data, recipe)


def _number(values: Iterable[str]) -> torch.Tensor:
    """Return a number for each value, [values] int64: equal ones have the same, from 0."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values])


def _check_scores(name: str, right: float, shares: torch.Tensor) -> None:
    """Refuse scores above that of a right answer: they are not shares."""
    highest = shares.nan_to_num(0.0).max().item()
    if highest > 1 + _ROUNDING:
        raise RunError(
            f"dataset.difficulty: the reward `{name}` gave {highest * right:g}, and a right answer counts as "
            f"{right:g}",
            "name a reward between 0 and 1 as `dataset.difficulty.reward`, or `clip` it",
        )
