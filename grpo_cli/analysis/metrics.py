"""From scored completions to metrics: one number a prompt, then a mean or a paired difference with its interval.

Names: `reward` (the weighted total), `rewards/NAME`, `accuracy/NAME` (share of right answers, for rewards that
judge them), `pass@K/NAME`, `maj@K/NAME`, `completion_length` (tokens), `clipped` (share); of episodes also
`EPISODE_METRICS`; of models trained on scored data also `accuracy/ranking` and `likelihood_gap`; of a mixture also
`reward@SOURCE` and `accuracy/NAME@SOURCE`.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from grpo_cli.analysis.estimates import (
    ALL_EQUAL,
    Interval,
    majority,
    mean_interval,
    pass_at_k,
    proportion_interval,
)
from grpo_cli.runs.files import write_text
from grpo_cli.runs.metrics import read_error_shares
from grpo_cli.units import count_noun, format_interval, format_value

if TYPE_CHECKING:
    from grpo_cli.analysis.samples import ScoredCompletion

Group = Sequence["ScoredCompletion"]
PerPrompt = dict[int, float]
"""Row of the data → the metric's value for its prompt; rows it does not apply to are left out."""
RANKING, GAP = "ranking", "likelihood_gap"
OF_ALL = ("completion_length", "clipped", GAP)
"""Held-out metrics that belong to no reward."""
_SHARES = ("accuracy/", "pass@", "maj@", "clipped", "valid_calls", "failed_calls", "cut_off_")
_NO_PROMPT = "it applies to no prompt"
LOGGED = "logged"
"""The entry of a measurement that holds the metrics that rewards log."""
_OVER_ALL = "a reward logs it of all completions together"


@dataclass(frozen=True)
class Metric:
    """A mean over prompts."""

    value: float | None
    """None if it applies to no prompt."""
    low: float | None
    high: float | None
    """95 % interval, clustered by prompt; None with a reason."""
    prompts: int
    reason: str | None = None

    @property
    def direction(self) -> int:
        """Of a difference: 1 if it is beyond doubt a rise, -1 if it is a fall, else 0."""
        value = self.value or 0.0
        if self.reason == ALL_EQUAL:
            return (value > 0) - (value < 0)
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)

    def say(self, sign: str = "") -> str:
        """Return the value with its interval, such as `0.810 (0.722 to 0.875)`; `+` is the sign of differences."""
        interval = self.say_interval(sign) if self.value is not None else ""
        return f"{format_value(self.value, sign)}{f' ({interval})' if interval else ''}"

    def say_interval(self, sign: str = "") -> str:
        """Return the ends of the interval, such as `0.100 to 0.300`; empty if there is none."""
        return format_interval(self.low, self.high, sign)

    def as_json(self) -> dict[str, Any]:
        """Return the metric as plain values."""
        return asdict(self)


def group_reasons(pairs: Iterable[tuple[str, str | None]]) -> dict[str, list[str]]:
    """Return each reason with what it is the reason of, without repeats."""
    reasons: dict[str, dict[str, None]] = {}
    for name, reason in pairs:
        if reason:
            reasons.setdefault(reason, {})[name] = None
    return {reason: list(names) for reason, names in reasons.items()}


def say_metric(metric: Metric | None, sign: str = "") -> str:
    """Return what `Metric.say` does; a dash if there is none."""
    return metric.say(sign) if metric else "–"


def per_prompt(
    groups: Sequence[Group], right: Mapping[str, float], sources: Collection[str] = ()
) -> dict[str, PerPrompt]:
    """Return every metric's value for every prompt.

    Args:
        right: For each reward that judges answers, the score of a right one.
        sources: Those of a mixture, for which the reward and accuracies are given apart.
    """
    size = min(map(len, groups), default=0)
    names = list(groups[0][0].rewards) if size else []
    values: dict[str, Callable[[Group], float | None]] = {
        "reward": lambda group: _mean_known(each.total for each in group)
    }
    values |= {f"rewards/{name}": _reward(name) for name in names}
    for name, score in right.items():
        values[f"accuracy/{name}"] = _pass(name, score, 1)
        values |= {f"pass@{k}/{name}": _pass(name, score, k) for k in _powers(size)}
        if size > 2 and any(one.answers.get(name) is not None for group in groups for one in group):
            values[f"maj@{size}/{name}"] = _majority(name, score)
    values["completion_length"] = lambda group: fmean(each.tokens for each in group)
    values["clipped"] = lambda group: fmean(each.clipped for each in group)
    if size and groups[0][0].episode:
        values |= {name: _of_episodes(estimate) for name, estimate in EPISODE_METRICS.items()}
    found = {
        metric: {group[0].row: number for group in groups if (number := value(group)) is not None}
        for metric, value in values.items()
    }
    sources_of = {group[0].row: group[0].source for group in groups}
    for metric, source in _by_source(right, sources):
        own = {row: each for row, each in found[metric].items() if sources_of[row] == source}
        if own:
            found[f"{metric}@{source}"] = own
    return found


def _by_source(right: Iterable[str], sources: Iterable[str]) -> list[tuple[str, str]]:
    metrics = [*(f"accuracy/{name}" for name in right), "reward"]
    return [(metric, source) for source in sources for metric in metrics]


def flatten_summary(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a measurement's summary, such as `eval/before.json`, by metric."""
    values = {name: summary[name] for name in ("reward", *OF_ALL) if name in summary}
    for kind in ("accuracy", "rewards"):
        values |= {f"{kind}/{name}": value for name, value in summary.get(kind, {}).items()}
    return {**summary.get(LOGGED, {}), **values}


def metric_names(
    rewards: Sequence[str],
    right: Collection[str],
    size: int,
    *,
    episodes: bool,
    sources: Collection[str] = (),
) -> list[str]:
    """Return the metrics that `per_prompt` gives; majority votes only if a reward can read answers."""
    more = EPISODE_METRICS if episodes else ()
    votes = [f"maj@{size}"] if size > 2 else []
    of_answers = ["accuracy", *(f"pass@{k}" for k in _powers(size)), *votes]
    judged = [f"{metric}/{name}" for name in right for metric in of_answers]
    shared = ["reward", *(f"rewards/{name}" for name in rewards)]
    apart = [f"{metric}@{source}" for metric, source in _by_source(right, sources)]
    return [*shared, *judged, "completion_length", "clipped", *more, *apart]


Record = Mapping[str, Any]
"""What became of an episode, as `Episode.as_json` gives it."""


def _share_of_calls(*failures: str) -> Callable[[Sequence[Record]], float | None]:
    def estimate(records: Sequence[Record]) -> float | None:
        calls = [failure for record in records for _, failure, _ in record["calls"]]
        return fmean(failure in failures for failure in calls) if calls else None

    return estimate


EPISODE_METRICS: dict[str, Callable[[Sequence[Record]], float | None]] = {
    "turns": lambda records: fmean(each["turns"] for each in records),
    "calls": lambda records: fmean(len(each["calls"]) for each in records),
    # Of all calls: those that could be read and named a tool, and those that raised or were late.
    "valid_calls": _share_of_calls("", "failed", "late"),
    "failed_calls": _share_of_calls("failed", "late"),
    # Of episodes: those that end because a turn, or all of them, had too many tokens.
    "cut_off_turns": lambda records: fmean(each["end"] == "cut_off" for each in records),
    "cut_off_episodes": lambda records: fmean(each["end"] == "tokens" for each in records),
    "tool_seconds": lambda records: fmean(each["tool_s"] for each in records),
}
"""Metrics of the episodes of a prompt: means over episodes, and shares of calls or episodes."""


def _of_episodes(
    estimate: Callable[[Sequence[Record]], float | None],
) -> Callable[[Group], float | None]:
    return lambda group: estimate([each.episode for each in group if each.episode])


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _known(name: str, group: Group) -> list[float]:
    return [value for each in group if (value := each.rewards[name]) is not None]


def _reward(name: str) -> Callable[[Group], float | None]:
    return lambda group: _mean_known(each.rewards[name] for each in group)


def _pass(name: str, right: float, k: int) -> Callable[[Group], float | None]:
    def estimate(group: Group) -> float | None:
        known = _known(name, group)
        return pass_at_k(len(known), known.count(right), k) if len(known) >= k else None

    return estimate


def _majority(name: str, right: float) -> Callable[[Group], float | None]:
    def vote(group: Group) -> float | None:
        if not _known(name, group):
            return None
        chosen = majority([each.answers.get(name) for each in group])
        return float(chosen is not None and group[chosen].rewards[name] == right)

    return vote


def _powers(size: int) -> list[int]:
    """Return 2, 4, 8, … up to `size`, and `size` itself."""
    powers = {2**power for power in range(1, size.bit_length()) if 2**power <= size}
    return sorted({*powers, size} - {0, 1})


def summarize(values: Mapping[str, PerPrompt], size: int) -> dict[str, Metric]:
    """Return the mean of each metric over prompts.

    A share has Wilson's interval: an accuracy, and a reward that is the same as one for every prompt.
    """
    shares = [rows for name, rows in values.items() if name.startswith("accuracy/")]
    return {
        name: _mean(list(rows.values()), size, share=name.startswith(_SHARES) or rows in shares)
        for name, rows in values.items()
    }


def add_logged(
    metrics: Mapping[str, Metric], logged: Mapping[str, float], prompts: int
) -> dict[str, Metric]:
    """Return metrics, and those that rewards log of a whole evaluation: one number each, without an interval."""
    own = {name: Metric(value, None, None, prompts, _OVER_ALL) for name, value in logged.items()}
    return {**metrics, **{name: each for name, each in own.items() if name not in metrics}}


def _mean(values: list[float], size: int, *, share: bool) -> Metric:
    if not values:
        return Metric(None, None, None, 0, _NO_PROMPT)
    if share:
        return _metric(fmean(values), proportion_interval(values, size), len(values))
    return _metric(fmean(values), mean_interval(values), len(values))


def _metric(value: float, interval: Interval, prompts: int) -> Metric:
    return Metric(value, interval.low, interval.high, prompts, interval.reason)


def compare(before: Mapping[str, PerPrompt], after: Mapping[str, PerPrompt]) -> dict[str, Metric]:
    """Return the paired difference `after - before` of each metric that both have, over the same prompts."""
    return {name: _compare(before[name], after[name]) for name in before if name in after}


def subtract_logged(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the difference `after - before` of each metric that rewards log in both."""
    return {name: after[name] - before[name] for name in before if name in after}


def _compare(before: PerPrompt, after: PerPrompt) -> Metric:
    rows = sorted(before.keys() & after.keys())
    if not rows:
        return Metric(None, None, None, 0, _NO_PROMPT)
    then, now = [before[row] for row in rows], [after[row] for row in rows]
    interval = mean_interval([after[row] - before[row] for row in rows])
    return _metric(fmean(now) - fmean(then), interval, len(rows))


def say_failures(measured: Mapping[str, Any]) -> str:
    """Return how many completions of a measurement timed out or failed in scoring; empty if none did."""
    total = measured.get("completions")
    said = [
        f"{count:,}{f' of {total:,}' if total else ''} answers {what} in scoring ({name})"
        for key, what in (("timeouts", "timed out"), ("failures", "failed"))
        for name, count in (measured.get(key) or {}).items()
    ]
    return ", ".join(said)


def say_error_shares(record: Mapping[str, Any], split: str = "") -> list[str]:
    """Return on which share of answers each reward failed or timed out, in training or in its `eval_` metrics."""
    return [
        f"{share:.1%} of answers failed or timed out in scoring ({name})"
        for name, share in read_error_shares(record, split).items()
    ]


def primary_metric(right: Iterable[str]) -> str:
    """Return the metric of a verdict: accuracy of the first reward that judges answers, else the total."""
    return next((f"accuracy/{name}" for name in right), "reward")


def say_difference(metric: str, change: Metric, name: str, baseline: str) -> str:
    """Return a paired difference as a sentence."""
    on = f"on the same {count_noun(change.prompts, 'prompt')}"
    if change.value is None:
        return f"{name} and {baseline} have no prompt with a score of {metric} in common"
    gain = f"{format_value(change.value, '+')} in {metric}"
    if change.reason == ALL_EQUAL:
        if not change.value:
            return f"no difference: {metric} is the same for {name} and {baseline} {on}"
        sense = "better" if change.value > 0 else "worse"
        return f"{sense}: {gain} against {baseline} on each of the same {change.prompts} prompts"
    if not (interval := change.say_interval("+")):
        gain = f"{gain} over {baseline}"
        if not change.value:
            gain = f"no difference: {metric} is the same on average for {name} and {baseline}"
        return f"{gain} {on}; no interval, since {change.reason}"
    sense, beside = {1: ("better", "over"), -1: ("worse", "against")}.get(
        change.direction, ("no clear difference", "from")
    )
    return f"{sense}: {gain} (95 % interval {interval}) {beside} {baseline} {on}"


@dataclass(frozen=True)
class RankedGroup:
    """The scored responses of one prompt, with their rewards and how likely the model finds them."""

    row: int
    rewards: list[float]
    log_probabilities: list[float]
    """Mean over the tokens of each response, in nats."""


def write_ranked(path: Path, groups: Sequence[RankedGroup]) -> None:
    """Write one group a line, as JSON."""
    write_text(path, "".join(json.dumps(asdict(group)) + "\n" for group in groups))


def read_ranked(path: Path) -> list[RankedGroup]:
    """Read what `write_ranked` wrote; empty if there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [RankedGroup(**json.loads(line)) for line in lines]


def rank_by_prompt(groups: Sequence[RankedGroup]) -> dict[str, PerPrompt]:
    """Return `RANKING` and `GAP` of every prompt in which two rewards differ."""
    estimates = {RANKING: ranking_accuracy, GAP: likelihood_gap}
    return {
        name: {
            group.row: value
            for group in groups
            if (value := estimate(group.log_probabilities, group.rewards)) is not None
        }
        for name, estimate in estimates.items()
    }


def ranking_accuracy(log_probabilities: Sequence[float], rewards: Sequence[float]) -> float | None:
    """Return the share of pairs of answers of which the better rewarded is likelier; None if all are equal.

    Pairs of equal reward do not count; a tie in likelihood is half right. Log-probabilities are per token.
    Source: "reward accuracy" of preference training (Rafailov et al. 2023), here of the policy itself.
    """
    pairs = combinations(zip(log_probabilities, rewards, strict=True), 2)
    ranked = [
        0.5 if first == second else float((first > second) == (better > worse))
        for (first, better), (second, worse) in pairs
        if better != worse
    ]
    return fmean(ranked) if ranked else None


def likelihood_gap(log_probabilities: Sequence[float], rewards: Sequence[float]) -> float | None:
    """Return the mean log-probability a token of answers above the mean reward, less that of those below."""
    middle, pairs = fmean(rewards), list(zip(log_probabilities, rewards, strict=True))
    above = [value for value, reward in pairs if reward > middle]
    below = [value for value, reward in pairs if reward < middle]
    return fmean(above) - fmean(below) if above and below else None
