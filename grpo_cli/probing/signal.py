"""Scores, lengths and episodes of sampled completions: statistics, and what is wrong with them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean, stdev

from grpo_cli.analysis.estimates import proportion_interval
from grpo_cli.analysis.metrics import EPISODE_METRICS, Metric, per_prompt, summarize
from grpo_cli.analysis.samples import ScoredCompletion, group_by_row
from grpo_cli.issues import Issue
from grpo_cli.recipe.episode import EpisodeConfig
from grpo_cli.rewards.scoring import are_equal

FLAT = 1e-9
"""Differences that are none."""


@dataclass(frozen=True)
class Spread:
    """Mean and spread of one reward, or of the weighted total."""

    mean: float | None
    """None where it gave no score at all."""
    std: float
    """Over all completions."""
    within: float
    """Mean over the groups of the standard deviation within a group: what advantages are made of."""


@dataclass(frozen=True)
class PassRate:
    """How often answers are right, for a reward that judges them."""

    reward: str
    rate: float
    low: float
    high: float
    """95 % interval, clustered by prompt."""
    too_hard: int
    """Prompts with no right answer."""
    learnable: int
    """Prompts with some right answers and some wrong ones."""
    too_easy: int
    """Prompts with right answers only."""
    by_prompt: tuple[float, ...]
    """Share of right answers of each prompt, in the order probed."""


@dataclass(frozen=True)
class Signal:
    """What a step would have to learn from."""

    prompts: int
    completions: int
    rewards: dict[str, Spread]
    total: Spread
    frac_reward_zero_std: float
    """Share of groups whose completions all have the same total; TRL logs it under this name."""
    cancelled_groups: float
    """Share of groups in which rewards differ, and the totals do not."""
    alike_groups: float
    """Share of groups whose completions are the same text."""
    pass_rates: tuple[PassRate, ...]


@dataclass(frozen=True)
class Lengths:
    """How long completions are; nearest-rank percentiles, in tokens."""

    median: int
    p95: int
    max: int
    clipped: float
    """Share cut off at the limit."""
    limit: int


def read_signal(scored: Sequence[ScoredCompletion], right: dict[str, float]) -> Signal:
    """Return what scores say of the signal; `right` has the score of a right answer of rewards that judge them."""
    groups = [list(group) for _, group in groupby(scored, key=lambda each: each.group)]
    rates = (_pass_rate(groups, name, value) for name, value in right.items())
    return Signal(
        prompts=len(groups),
        completions=len(scored),
        rewards={
            name: _spread([[c.rewards[name] for c in group] for group in groups])
            for name in scored[0].rewards
        },
        total=_spread([[c.total for c in group] for group in groups]),
        frac_reward_zero_std=fmean(are_equal([c.total for c in group]) for group in groups),
        cancelled_groups=fmean(_is_cancelled(group) for group in groups),
        alike_groups=fmean(len({c.text for c in group}) == 1 for group in groups),
        pass_rates=tuple(rate for rate in rates if rate is not None),
    )


def read_lengths(scored: Sequence[ScoredCompletion], limit: int) -> Lengths:
    """Return percentiles of lengths; `limit` is `max_completion_length`."""
    ordered = sorted(completion.tokens for completion in scored)
    median, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
    # An episode may also end with a turn that is cut off, which `episodes.py` judges.
    clipped = fmean(c.episode["end"] == "tokens" if c.episode else c.clipped for c in scored)
    return Lengths(median, p95, ordered[-1], clipped, limit)


def _is_cancelled(group: Sequence[ScoredCompletion]) -> bool:
    known = (
        [value for c in group if (value := c.rewards[name]) is not None]
        for name in group[0].rewards
    )
    return are_equal([c.total for c in group]) and not all(are_equal(values) for values in known)


def _spread(groups: Sequence[Sequence[float | None]]) -> Spread:
    known = [[value for value in group if value is not None] for group in groups]
    values = [value for group in known for value in group]
    if not values:
        return Spread(None, 0.0, 0.0)
    within = fmean(map(_deviation, filter(None, known)))
    return Spread(fmean(values), _deviation(values), within)


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation as TRL's `nanstd` (1.16) estimates it, by n - 1."""
    return stdev(values) if len(values) > 1 else 0.0


def _pass_rate(
    groups: Sequence[Sequence[ScoredCompletion]], name: str, right: float
) -> PassRate | None:
    judged = [
        [completion.rewards[name] == right for completion in group]
        for group in groups
        if all(completion.rewards[name] is not None for completion in group)
    ]
    if not judged:
        return None
    rates = [fmean(map(float, group)) for group in judged]
    interval = proportion_interval(rates, len(judged[0]))
    return PassRate(
        reward=name,
        rate=fmean(rates),
        low=interval.low or 0.0,
        high=interval.high or 0.0,
        too_hard=sum(rate == 0 for rate in rates),
        learnable=sum(0 < rate < 1 for rate in rates),
        too_easy=sum(rate == 1 for rate in rates),
        by_prompt=tuple(rates),
    )


DEAD, WEAK = 0.9, 0.75
"""Shares of groups without spread: from the first on nothing is learned, from the second on little."""
ENOUGH_PROMPTS = 8
"""Fewer prompts are no ground for an error: a poor sample of a good recipe looks the same."""
CLIPPED, MOSTLY_CLIPPED = 0.5, 0.9
"""Shares of completions cut off at the limit: worth a note, and nearly all of them."""
LOPSIDED = 0.8
"""Share of prompts that are all right, or all wrong, beyond which the data does not fit the model."""


def judge(
    signal: Signal, lengths: Lengths, *, masked: bool, room: int | None = None
) -> Iterator[Issue]:
    """Find what is wrong with completions and scores; `room` is what the context leaves for a completion."""
    few = signal.prompts < ENOUGH_PROMPTS
    for issue in _judge(signal, lengths, masked=masked, room=room):
        if few and issue.level == "error":
            seen = f"{issue.seen}; so few prompts prove little (--prompts 16)"
            yield replace(issue, level="warning", seen=seen)
        else:
            yield issue


def _judge(signal: Signal, lengths: Lengths, *, masked: bool, room: int | None) -> Iterator[Issue]:
    if lengths.clipped >= CLIPPED:
        yield _explain_clipping(lengths, signal.frac_reward_zero_std, masked=masked, room=room)
    if lengths.clipped >= MOSTLY_CLIPPED and signal.frac_reward_zero_std >= WEAK:
        # Nearly all are cut off: they show nothing else.
        return
    if signal.frac_reward_zero_std >= WEAK:
        yield _explain_silence(signal)
    for name, spread in signal.rewards.items():
        yield from _judge_reward(name, spread, signal)
    for rate in signal.pass_rates:
        yield from _judge_rate(rate)


def _explain_clipping(lengths: Lengths, silent: float, *, masked: bool, room: int | None) -> Issue:
    most = lengths.clipped >= MOSTLY_CLIPPED
    hopeless = most and (masked or silent >= DEAD)
    longer = min((4 if most else 2) * lengths.limit, room or 4 * lengths.limit)
    edit = f"set `max_completion_length: {longer}`, or " if longer > lengths.limit else ""
    why = (
        "a completion that is cut off before its answer scores nothing, whatever it would have said"
    )
    if masked:
        why = "completions that are cut off take no part in the loss (mask_truncated_completions)"
    seen = f"{lengths.clipped:.0%} of completions are cut off at {lengths.limit} tokens"
    if most and silent >= WEAK:
        seen += f", and {silent:.0%} of groups have no spread"
    return Issue(
        seen,
        f"{edit}ask for short answers in the prompt, and see that the model stops (stop tokens)",
        "generation.max_completion_length",
        level="error" if hopeless else "warning" if most or masked else "note",
        subject="length: cut off",
        why=why,
    )


def _explain_silence(signal: Signal) -> Issue:
    fix, path = _advise(signal)
    mean = "none" if signal.total.mean is None else f"{signal.total.mean:.3g}"
    groups = f"{signal.frac_reward_zero_std:.0%} of {signal.prompts} groups"
    return Issue(
        f"in {groups} every completion has the same total reward (mean {mean})",
        fix,
        path,
        level="error" if signal.frac_reward_zero_std >= DEAD else "warning",
        subject="signal: groups without spread",
        why="equal rewards give zero advantage, so these groups have no gradient",
    )


def _advise(signal: Signal) -> tuple[str, str]:
    """Return what to change, by what the completions look like, and where in the recipe."""
    if all(spread.mean is None for spread in signal.rewards.values()):
        fix = "correct `when`, or the golds: no reward gave any score (grpo rewards test)"
        return fix, "rewards"
    if signal.alike_groups >= WEAK:
        fix = "set `temperature: 1.0` and `top_k: 0`: the completions of a group are the same text"
        return fix, "generation.temperature"
    if signal.cancelled_groups > signal.frac_reward_zero_std / 2:
        fix = "correct the weights: rewards differ within groups, their weighted sum does not"
        return fix, "rewards"
    rate = signal.pass_rates[0] if signal.pass_rates else None
    if rate and rate.too_easy > rate.too_hard:
        return "take harder prompts: these are solved already", "dataset"
    if rate and rate.too_hard:
        fix = (
            "take easier prompts or a stronger model, show the wanted form in the prompt, teach it beforehand "
            "(`warmup`), or add a reward for a first step (a format, a partial answer)"
        )
        return fix, "dataset"
    return "add a reward in which the completions of a prompt differ", "rewards"


def _judge_reward(name: str, spread: Spread, signal: Signal) -> Iterator[Issue]:
    if spread.mean is None:
        seen = f"`{name}` gave no score to any of {signal.completions} completions"
        fix = "correct its `when`, or its gold column: grpo rewards test"
        subject, why = "signal: reward without a score", "it takes no part in training"
        yield Issue(seen, fix, "rewards", level="warning", subject=subject, why=why)
    elif spread.std <= FLAT and len(signal.rewards) > 1 and signal.frac_reward_zero_std < DEAD:
        seen = f"`{name}` gave {spread.mean:g} to all {signal.completions} completions"
        fix = "ask for it in the prompt, reward a first step towards it, or remove it"
        subject, why = "signal: constant reward", "a reward that never changes teaches nothing"
        yield Issue(seen, fix, "rewards", level="warning", subject=subject, why=why)


def _judge_rate(rate: PassRate) -> Iterator[Issue]:
    easier = "take easier prompts or a stronger model, or raise `num_generations`"
    interval = f"95 % interval {rate.low:.0%} to {rate.high:.0%}"
    why = "only prompts with right and wrong completions teach which is which"
    for count, result, fix in (
        (rate.too_hard, "no completion is right", easier),
        (rate.too_easy, "every completion is right", "take harder prompts"),
    ):
        if count > LOPSIDED * len(rate.by_prompt):
            seen = f"for {count} of {len(rate.by_prompt)} prompts {result} by `{rate.reward}` "
            seen += f"(pass rate {rate.rate:.0%}, {interval})"
            subject = "signal: difficulty"
            yield Issue(seen, fix, "dataset", level="warning", subject=subject, why=why)


_MOST_WRONG = 0.5
"""Share of calls that may be malformed, or may fail, before it is worth a warning."""


def read_episodes(scored: Sequence[ScoredCompletion]) -> dict[str, Metric]:
    """Return the metrics of episodes, by the names of `EPISODE_METRICS`."""
    groups = group_by_row(scored)
    values = per_prompt(groups, {})
    return summarize({name: values[name] for name in EPISODE_METRICS}, len(groups[0]))


def judge_episodes(episodes: Mapping[str, Metric], config: EpisodeConfig) -> Iterator[Issue]:
    """Find episodes that break off, and calls that are not made, cannot be read, or fail."""
    value = {name: metric.value or 0.0 for name, metric in episodes.items()}
    cut = value["cut_off_turns"]
    if cut >= CLIPPED:
        yield Issue(
            f"{cut:.0%} of episodes end with an answer that is cut off at {config.max_turn_tokens} tokens",
            "raise `episode.max_turn_tokens`, or see that the model ends its answers (stop tokens)",
            "episode.max_turn_tokens",
            level="warning",
            subject="episodes: cut off",
            why="an answer without its end is not acted on, and the episode ends with it",
        )
    elif not value["calls"] and value["cut_off_episodes"] < CLIPPED:
        yield Issue(
            "no episode has a call",
            "say in the prompt when to use which tool, or take a model that was trained to call tools",
            "dataset.prompt",
            level="warning",
            subject="episodes: tools unused",
            why="what is never sampled is never learned",
        )
    if value["calls"] and value["valid_calls"] < _MOST_WRONG:
        yield Issue(
            f"{1 - value['valid_calls']:.0%} of calls cannot be read, or name no tool",
            "show a call in the prompt, or add the reward `tool_use`",
            "episode.on_malformed_call",
            level="warning",
            subject="episodes: calls",
            why="these turns are lost",
        )
    if value["failed_calls"] >= _MOST_WRONG:
        yield Issue(
            f"{value['failed_calls']:.0%} of calls fail, or take longer than {config.tool_timeout_s:g} s",
            "try the tools without a model by `grpo env test`",
            "episode.on_tool_error",
            level="warning",
            subject="episodes: calls",
            why="the model learns from error messages instead of results",
        )
