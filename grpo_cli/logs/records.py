"""Turns records as they were logged into records as `Run` has them: names, numbers, steps, attempts."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import isfinite, isnan, nan
from typing import Any

from grpo_cli.logs.completions import CompletionTable
from grpo_cli.logs.console import Raw
from grpo_cli.logs.names import Layout, Sources, find_layout, read_table
from grpo_cli.runs.metrics import Metrics, Series

_FRACTION = re.compile(r"(\d+)\s*/\s*(\d+)")
_ROUNDED = re.compile(r"0\.0{2,6}")
"""A zero that may be a small number, printed with few decimals."""
_SMALL = frozenset({"learning_rate", "kl"})
"""Metrics that are so small that it matters."""
_GRPO = frozenset(
    "reward reward_std frac_reward_zero_std kl clip_ratio/region_mean completions/mean_length "
    "completions/clipped_ratio".split()
)
_HUGE = 1e300
_NUMBERS = frozenset({float, int})
_CENTRED = 1e-4
"""A reward that never leaves 0 by more is centred in its group."""
_FLAT = 1e-8
"""A spread below it is none."""
_SPREADS = (("reward_std",), ("critic/advantages/max", "critic/advantages/min"))
"""Metrics that are 0 if the rewards of every group are equal."""
_BLOCK, _MOST_OTHERS = 250, 200


class Reader:
    """Collects the records of a log as metrics, and counts what was not taken."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.records = 0
        """Records of GRPO training."""
        self.rewarded = 0
        """Those with a reward."""
        self.evaluations = 0
        self.supervised = 0
        """Records of supervised training."""
        self.preferences = 0
        """Records of preference training."""
        self.copies = 0
        """Records that stood there already."""
        self.attempts = 1
        self.superseded = 0
        """Records of earlier attempts, from the step on that a later one began with."""
        self.counted = False
        """Whether steps were counted, since none is logged."""
        self.rounded: set[str] = set()
        """Metrics that are printed with so few decimals that they are always 0."""
        self.remarks: dict[str, str] = {}
        """How metrics that are not logged as such came about."""
        self.others: list[Raw] = []
        """Dicts that are no records, the first of them; they may name settings."""
        self.completions = ""
        """What the newest completions are, in words, if the log is a table of them."""
        self._table = CompletionTable()
        self._counts: dict[Layout, int] = {}
        """How many records each has."""
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._block: list[dict[str, Any]] = []
        self._last: dict[str, dict[str, Any]] = {}
        """The newest record of training and of evaluation."""
        self._raw: Raw = {}

    def read(self, raws: Iterable[Raw]) -> None:
        """Add all records."""
        for raw in raws:
            names = tuple(raw)
            layout = self._layouts.get(names)
            if layout is None:
                # Of sparse rows there may be many.
                layout = self._layouts[names] = find_layout(filter(None, names))
            self._add(raw, layout)
        if not self.records:
            for step, values, words in self._table.records():
                self.completions = words
                self._put("train", step, values)
        self._flush()
        self.remarks = derive(self.metrics, self.rounded)

    @property
    def names(self) -> frozenset[str]:
        """All names, as the table has them."""
        return frozenset(name for each in self._counts for name in each.marks)

    def _add(self, raw: Raw, layout: Layout) -> None:
        if layout.is_completion and self._table.add(raw, self._find_step(raw, layout) or 0):
            return
        train = _pick(raw, layout.train, self.rounded)
        evaluated = _pick(raw, layout.evaluation, set()) if layout.evaluation.parts else {}
        if not train and not evaluated:
            if len(self.others) < _MOST_OTHERS:
                self.others.append(raw)
            return
        if layout.is_preference:
            self.preferences += 1
            return
        is_grpo = "reward" in train or is_training(train)
        if not is_grpo and len(self.others) < _MOST_OTHERS:
            self.others.append(raw)
        if not is_grpo and train and (not self.records or layout.is_supervised):
            self.supervised += "loss" in train or layout.is_supervised
            return
        if (
            "loss" not in train
            and not is_grpo
            and not any(name.endswith("reward") for name in evaluated)
        ):
            return
        step = self._find_step(raw, layout)
        if step is None and raw == self._raw:
            self.copies += 1
            return
        self._raw = raw
        self._counts[layout] = self._counts.get(layout, 0) + 1
        if train:
            self._put("train", step, train)
        if evaluated and self.records:
            self._put("eval", step, evaluated)

    def _find_step(self, raw: Raw, layout: Layout) -> int | None:
        text = raw.get(layout.step) if layout.step else None
        if isinstance(text, str) and (match := _FRACTION.match(text)):
            self.metrics.total_steps = int(match[2])
            text = match[1]
        if isinstance(total := _number(raw.get("max_steps")), float) and isfinite(total):
            self.metrics.total_steps = int(total)
        number = _number(text)
        return int(number) if number is not None and isfinite(number) else None

    def _put(self, event: str, step: int | None, values: dict[str, Any]) -> None:
        """Add a record: a new one, more of the newest one, a copy, or the first of another attempt."""
        last = self._last.get(event)
        if step is None and last is not None and not self.counted and "reward" not in values:
            # What is logged beside a record that has a step.
            step = last["step"]
        if step is None:
            self.counted = True
            step = last["step"] + (event == "train") if last else 1
            if event == "eval":
                step = self.metrics.step if not self._block else self._block[-1]["step"]
        if last is not None and step == last["step"]:
            # slime logs a step on several lines; another process may log the same.
            new = {name: value for name, value in values.items() if name not in last}
            last.update(new)
            self.copies += not new
            self.rewarded += event == "train" and "reward" in new
            return
        if last is not None and step < last["step"] and event == "train":
            self._rewind(step)
        record = {"event": event, "step": step, **values}
        self._last[event] = record
        self._block.append(record)
        self.records += event == "train"
        self.rewarded += event == "train" and "reward" in values
        self.evaluations += event == "eval"
        if len(self._block) >= _BLOCK:
            self._flush(keep=2)

    def _rewind(self, step: int) -> None:
        """Drop what an earlier attempt logged from a step on."""
        self._flush()
        self.attempts += 1
        before = self._count()
        rewind(self.metrics, step)
        self.superseded += before - self._count()
        self.records -= before - self._count()
        self._last.pop("eval", None)

    def _count(self) -> int:
        return max(map(len, self.metrics.series.values()), default=0)

    def _flush(self, keep: int = 0) -> None:
        """Hand records on, all but the newest, which may still get more values."""
        end = len(self._block) - keep
        self.metrics.extend(self._block[:end])
        del self._block[:end]


def rewind(metrics: Metrics, step: int) -> None:
    """Drop what was logged from a step on, and begin another attempt."""
    for each in metrics.series.values():
        end = bisect_left(each.steps, step)
        del each.steps[end:], each.values[end:]
    metrics.steps[:] = [each for each in metrics.steps if each["step"] < step]
    metrics.attempt = len(metrics.steps)


def is_training(values: Mapping[str, Any]) -> bool:
    """Return whether a record is of GRPO: it has a reward, or several metrics; settings have no more than one."""
    if "reward" in values or any(name.startswith("rewards/") for name in values):
        return True
    measured = [name for name in read_table()["metrics"] if name in values]
    return len(measured) > 2 and not _GRPO.isdisjoint(values)


def _pick(raw: Raw, sources: Sources, rounded: set[str]) -> dict[str, float | None]:
    """Return the metrics of a record; None for NaN and infinities."""
    if sources.get is not None:
        values = sources.get(raw)
        if _NUMBERS.issuperset(map(type, values)) and -_HUGE < sum(values) < _HUGE:
            return dict(zip(sources.metrics, values, strict=True))
    picked: dict[str, float | None] = {}
    for names, metric in sources.parts:
        numbers = [_number(raw[name]) for name in names]
        if None in numbers:
            continue
        total, text = sum(filter(None, numbers)), raw[names[0]]
        if total == 0 and metric in _SMALL and isinstance(text, str) and _ROUNDED.fullmatch(text):
            rounded.add(metric)
        # The comparison is false for NaN.
        picked[metric] = total if -_HUGE < total < _HUGE else None
    return picked


def _number(value: Any) -> float | None:
    """Return a number that may be text; None if it is none, as `No Log` and an empty cell."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | str):
        try:
            # Such as `np.float64(0.5)`.
            wrapped = isinstance(value, str) and value.endswith(")")
            return float(str(value).partition("(")[2][:-1].partition(",")[0] if wrapped else value)
        except (ValueError, OverflowError):
            return None
    return None


def derive(metrics: Metrics, rounded: Iterable[str]) -> dict[str, str]:
    """Complete metrics by what follows from others, and drop those that were not measured; return remarks."""
    series, remarks = metrics.series, {}
    lost = any(None in map(_value, series.get(name, ())) for name in ("loss", "reward"))
    for name in [*series]:
        values = series[name].values
        if (not lost and all(map(isnan, values))) or (name in rounded and not any(values)):
            del series[name]
    if "reward" in series and _is_centred(series):
        del series["reward"]
        remarks["reward"] = "the logged reward is always about 0, as it is centred in its group"
    parts = [name for name in series if name.startswith("rewards/") and name.endswith("/mean")]
    if "reward" not in series and parts:
        _add_up(series, parts)
        names = ", ".join(name.removeprefix("rewards/").removesuffix("/mean") for name in parts)
        remarks["reward"] = (
            f"{remarks.get('reward', 'no total is logged')}: the sum of {names} is taken"
        )
    for pair in _SPREADS:
        if "frac_reward_zero_std" in series or not all(name in series for name in pair):
            continue
        spreads = zip(*(series[name].values for name in pair), strict=False)
        silent = [float(all(abs(value) < _FLAT for value in values)) for values in spreads]
        if any(silent):
            series["frac_reward_zero_std"] = Series()
            series["frac_reward_zero_std"].extend(series[pair[0]].steps[: len(silent)], silent)
            remarks["frac_reward_zero_std"] = (
                f"groups count as equal in records whose `{'` and `'.join(pair)}` "
                f"{'are' if len(pair) > 1 else 'is'} 0"
            )
    return remarks


def _value(point: tuple[int, float | None]) -> float | None:
    return point[1]


def _is_centred(series: Mapping[str, Series]) -> bool:
    rewards = series["reward"].numbers()
    others = [
        abs(value)
        for name, each in series.items()
        if name == "reward_std" or (name.startswith("rewards/") and name.endswith("/mean"))
        for value in each.numbers()
    ]
    return bool(
        len(set(rewards)) > 1
        and max(map(abs, rewards)) < _CENTRED
        and max(others, default=0.0) > 100 * _CENTRED
    )


def _add_up(series: dict[str, Series], parts: list[str]) -> None:
    totals: dict[int, float] = {}
    for name in parts:
        for step, value in series[name]:
            totals[step] = totals.get(step, 0.0) + (nan if value is None else value)
    series["reward"] = Series()
    series["reward"].extend(totals, totals.values())
