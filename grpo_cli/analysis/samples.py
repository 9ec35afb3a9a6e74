"""Sampled completions with the scores of every reward."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from grpo_cli.recipe.dataset import IMAGES, SOURCE
from grpo_cli.rewards.contract import EPISODE, Batch, Gold
from grpo_cli.rewards.scoring import Reward, as_float, weighted_sum

if TYPE_CHECKING:
    from grpo_cli.fast.completions import Completion


@dataclass(frozen=True)
class ScoredCompletion:
    """One sampled completion with its scores."""

    group: int
    row: int
    prompt: Any
    text: str
    tokens: int
    clipped: bool
    """Whether it was cut off at the longest length."""
    rewards: dict[str, float | None]
    """None if a reward does not apply."""
    reasons: dict[str, str]
    """Why, by reward that gives a reason."""
    failed: list[str]
    """Rewards whose scoring failed within its time limit, so that `on_error` gave the score."""
    answers: dict[str, str | None]
    """What it answers, by reward that can say so; for majority votes."""
    total: float | None
    """The weighted sum, as TRL forms it; None if no reward gives a score."""
    messages: tuple[dict[str, Any], ...] = ()
    """All messages of an episode; empty if the answer is the only one."""
    episode: dict[str, Any] | None = None
    source: str | None = None
    late: list[str] = field(default_factory=list)
    """Rewards whose scoring exceeded its time limit, which gave the score."""


class MetricLog:
    """Collects the metrics that rewards log of completions, as TRL's `log_metric` does."""

    def __init__(self) -> None:
        self.rewards: set[str] = set()
        self.batches: list[Batch] = []
        self._values: dict[str, list[float]] = {}

    def add(self, reward: str, name: str, value: Any) -> None:
        """Take a value; other values than numbers count nothing, as NaN does in TRL."""
        self.rewards.add(reward)
        number = as_float(value)
        values = self._values.setdefault(name, [])
        if number is not None and not math.isnan(number):
            values.append(number)

    def means(self) -> dict[str, float]:
        """Return each metric: the mean of its values, as in TRL."""
        return {name: fmean(values) for name, values in self._values.items() if values}


def score_batch(
    rewards: Sequence[Reward], batch: Batch, seed: int, log: MetricLog | None = None
) -> list[list[Any]]:
    """Return the `Score`s of a batch by reward; `log` collects the metrics that rewards log of it."""
    if log is not None:
        log.batches.append(batch)
    by_reward = []
    for reward in rewards:
        extra = {} if log is None else {"log_metric": partial(log.add, reward.name)}
        own = replace(batch, seed=f"{seed}:{reward.name}", extra={**batch.extra, **extra})
        by_reward.append(reward.score(own))
    return by_reward


def log_over_all(
    rewards: Sequence[Reward], names: Collection[str], batches: Sequence[Batch], seed: int
) -> dict[str, float]:
    """Return the metrics that the named rewards log of a whole evaluation, in one call with all completions."""
    log = MetricLog()
    logging = [reward for reward in rewards if reward.name in names]
    if logging and batches:
        score_batch(logging, Batch.join(batches), seed, log)
    return log.means()


def score_samples(
    rewards: Sequence[Reward],
    columns: dict[str, list[Any]],
    sampled: "Sequence[Sequence[Completion]]",
    seed: int = 0,
    log: MetricLog | None = None,
) -> list[ScoredCompletion]:
    """Score the completions of each row of a dataset, with `prompt` and `row_id` among its columns."""
    batch, prompts = make_batch(columns, sampled), columns["prompt"]
    by_reward = score_batch(rewards, batch, seed, log)
    weights = [each.weight for each in rewards]
    judges = [each for each in rewards if each.right_answer is not None]
    flat = [(index, completion) for index, group in enumerate(sampled) for completion in group]
    scored = []
    for at, (group, completion) in enumerate(flat):
        scores = {each.name: values[at] for each, values in zip(rewards, by_reward, strict=True)}
        scored.append(
            ScoredCompletion(
                group=group,
                row=batch.columns["row_id"][at],
                prompt=completion.prompt or prompts[group],
                text=completion.text,
                tokens=len(completion.token_ids),
                clipped=completion.clipped,
                rewards={name: score.value for name, score in scores.items()},
                reasons={name: score.reason for name, score in scores.items() if score.reason},
                failed=[name for name, score in scores.items() if score.failed and not score.late],
                late=[name for name, score in scores.items() if score.late],
                answers={each.name: _vote(each, batch, at, completion.text) for each in judges},
                total=weighted_sum(weights, [score.value for score in scores.values()]),
                messages=completion.messages,
                episode=completion.episode,
                source=batch.columns[SOURCE][at] if SOURCE in batch.columns else None,
            )
        )
    return scored


def make_batch(
    columns: Mapping[str, list[Any]], sampled: "Sequence[Sequence[Completion]]"
) -> Batch:
    """Return completions of the rows of a dataset as rewards get them."""
    rows = [row for row, group in enumerate(sampled) for _ in group]
    flat = [completion for group in sampled for completion in group]
    own, prompts = _repeat(columns, rows, [each.episode for each in flat])
    if any(each.images is not None for each in flat):
        own[IMAGES] = [list(each.images or ()) for each in flat]
    return Batch(
        prompts=[each.prompt or prompt for each, prompt in zip(flat, prompts, strict=True)],
        completions=_wrap(prompts, [(each.messages, each.text) for each in flat]),
        completion_ids=[list(each.token_ids) for each in flat],
        columns=own,
    )


def _repeat(
    columns: Mapping[str, Sequence[Any]], rows: Sequence[int], episodes: Sequence[Any]
) -> tuple[dict[str, list[Any]], list[Any]]:
    """Return the columns of each completion's row, with its episode if there are any, and the prompts."""
    own = {name: [values[row] for row in rows] for name, values in columns.items()}
    prompts = own.pop("prompt")
    return own | ({EPISODE: list(episodes)} if any(episodes) else {}), prompts


def _wrap(prompts: Sequence[Any], answers: Sequence[tuple[Sequence[Any], str]]) -> list[Any]:
    """Return messages and texts as rewards get them: as messages if prompts are."""
    chat = bool(prompts) and isinstance(prompts[0], list)
    return [
        list(messages) or ([{"role": "assistant", "content": text}] if chat else text)
        for messages, text in answers
    ]


def _vote(reward: Reward, batch: Batch, row: int, text: str) -> str | None:
    """Return a completion's answer in one spelling; None if it has none, or the row no gold answer."""
    gold = reward.params.gold(batch, row)
    return gold.vote(text) if isinstance(gold, Gold) else None


def batch_of_scored(
    records: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]
) -> Batch:
    """Return completions that were written with `asdict` as rewards get them, with the columns of all rows."""
    index_of = {row: index for index, row in enumerate(columns["row_id"])}
    rows = [index_of[each["row"]] for each in records]
    own, prompts = _repeat(columns, rows, [each["episode"] for each in records])
    ids = [each["token_ids"] for each in records if "token_ids" in each]
    return Batch(
        prompts=[
            each["prompt"] if each["episode"] else prompt
            for each, prompt in zip(records, prompts, strict=True)
        ],
        completions=_wrap(prompts, [(each["messages"], each["text"]) for each in records]),
        completion_ids=ids if len(ids) == len(records) else None,
        columns=own,
    )


def as_scored(record: Mapping[str, Any]) -> ScoredCompletion:
    """Return a completion as it was before it was written, from a checked record."""
    values = {each.name: record[each.name] for each in fields(ScoredCompletion)}
    if all(value is None for value in record["rewards"].values()):
        # Earlier versions wrote a total of 0.
        values["total"] = None
    return ScoredCompletion(**{**values, "messages": tuple(record["messages"])})


def count_failures(scored: Iterable[ScoredCompletion]) -> dict[str, dict[str, int]]:
    """Return how many completions a reward did not score, because it failed or timed out, as JSON holds it."""
    failures: Counter[str] = Counter()
    timeouts: Counter[str] = Counter()
    for each in scored:
        failures.update(each.failed)
        timeouts.update(each.late)
    return {"failures": dict(failures), "timeouts": dict(timeouts)}


def group_by_row(scored: Iterable[ScoredCompletion]) -> list[list[ScoredCompletion]]:
    """Return the completions of each prompt together, in the order of the data's rows."""
    groups: dict[int, list[ScoredCompletion]] = {}
    for each in scored:
        groups.setdefault(each.row, []).append(each)
    return [groups[row] for row in sorted(groups)]
