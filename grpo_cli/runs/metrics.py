"""`metrics.jsonl`: append records, follow the file while it grows, and read its metrics as series."""

import json
import os
import re
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from math import isnan, nan
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

from grpo_cli.runs.files import SCHEMA_VERSION, finite, parse_json

STEP = "step"
"""How an episode's record counts an answer to a text environment, which is not a call of a tool."""

PHASES = ("sampling", "tools", "sync", "scoring", "learning")
"""What a training step spends its time on, in that order; `time/PHASE` in `metrics.jsonl`, in seconds."""
When = Literal["before", "warmup", "after"]
STAGES: dict[When, str] = {
    "before": "before training",
    "warmup": "after the warm-up",
    "after": "after training",
}
"""When the held-out rows are measured, in words."""
DURING = "during"
"""Folder in `eval/` of what held-out sets came to during training: `NAME/STEP.json`, and the samples."""
LOWER = "lower_is_better"
"""Where such a file names the metrics that are better the lower they are."""
Point = tuple[int, float | None]
"""Optimizer step and the value logged there; None for NaN and infinities."""
Step = dict[str, Any]
"""The numbers of one logged training step: `step`, `time`, `total_steps` and TRL's metrics."""
_FINGERPRINT_BYTES = 256
"""Records bear their time, so no two of a run's files have the same bytes at the same place."""
_BLOCK_BYTES, _BLOCK_RECORDS = 2**18, 250
"""Read, and added to the series, at once."""
_SKIMMED_BYTES = 2**24
"""A larger file is skimmed."""
_END_BYTES, _BETWEEN = 2**21, 1000
"""Bytes at its start and at its end that are read, and lines in between."""
_MOST_STEPS, _NEWEST_STEPS = 8192, 1024
"""Training steps that are kept with all their numbers, and the newest of them, which are never left out."""
_NOT_METRICS = frozenset({"schema_version", "event", "time", "step", "total_steps"})
_HUGE = 1e300
_NUMBERS = frozenset({float, int, type(None)})
_REWARD_PREFIX, _MEAN = "rewards/", "/mean"
ERROR_SHARE = "/error_share"
"""How the names of the shares of completions end that a reward failed on."""
_FAILED = re.compile(rb'%s": (?!0\.0\b|0[,}]|null)' % ERROR_SHARE.encode())
"""Such a share that is not 0, as `append_record` writes it."""


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record as a line; NaN and infinities become null, since JSON has neither."""
    stamped = {"schema_version": SCHEMA_VERSION, "time": round(time.time(), 3), **record}
    line = json.dumps(finite(stamped), ensure_ascii=False, allow_nan=False, default=str)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{line}\n")


Reader = Callable[[Any], dict[str, Any] | None]
"""Checks a parsed line; returns None if it is damaged."""


def parse_records(lines: Iterable[bytes], reader: Reader) -> Iterator[dict[str, Any]]:
    """Yield the records of some lines; passes over damaged ones, such as those that a killed process left torn."""
    for line in lines:
        try:
            record = reader(parse_json(line))
        except ValueError:
            continue
        if record is not None:
            yield record


def read_records(path: Path, reader: Reader) -> list[dict[str, Any]]:
    """Return the records of a file; none if it is not there."""
    if not path.is_file():
        return []
    # A file's lines end at line ends alone; `splitlines` also breaks at U+2028 and its kin inside a text.
    with path.open("rb") as lines:
        return list(parse_records(lines, reader))


class RecordTail:
    """Reads what was appended since the last call; a line that is still being written waits.

    A file that was cut or replaced meanwhile, because the run resumed from a checkpoint, is read from its start
    again; `rewinds` counts that.
    """

    def __init__(
        self,
        path: Path,
        reader: Reader = lambda value: value if isinstance(value, dict) else None,
        *,
        last_bytes: int | None = None,
        skims: bool = False,
    ) -> None:
        """Begin at the start of the file, or for one too large `last_bytes` before its end.

        `skims`: of a large file only the beginning, the end, and lines spread between them are read.
        """
        self._reader = reader
        self._skims = skims
        self.path = path
        self.rewinds = 0
        self._last_bytes = last_bytes
        self._offset = 0
        self._seen = b""
        """The last bytes read, which identify the file."""

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the records that came since the last call."""
        if not self.path.is_file():
            return
        try:
            with self.path.open("rb") as file:
                self._seek(file)
                yield from parse_records(self._read_lines(file), self._reader)
        except (FileNotFoundError, NotADirectoryError):
            return

    def _read_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the complete lines that follow; of a large file that is skimmed, some of them."""
        if self._skims and self._offset == 0:
            yield from self._skim(file)
        while lines := file.readlines(_BLOCK_BYTES):
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            block = b"".join(lines)
            self._offset += len(block)
            self._seen = (self._seen + block[-_FINGERPRINT_BYTES:])[-_FINGERPRINT_BYTES:]
            yield from lines

    def _skim(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the lines at the start of a large file and some in between; go to where its end begins."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size < _SKIMMED_BYTES:
            return
        yield from file.readlines(_END_BYTES)
        first, last = file.tell(), size - _END_BYTES
        for number in range(_BETWEEN):
            file.seek(first + (last - first) * number // _BETWEEN)
            file.readline()
            yield file.readline()
        file.seek(last)
        self._seen = file.readline()[-_FINGERPRINT_BYTES:]
        self._offset = file.tell()

    def _seek(self, file: BinaryIO) -> None:
        """Go to where reading ended, or to the start if this is another file now."""
        if self._offset == 0 and self._last_bytes is not None:
            size = file.seek(0, os.SEEK_END)
            # The first line may be cut, and is then skipped as torn.
            self._offset = max(size - self._last_bytes, 0)
        file.seek(max(self._offset - len(self._seen), 0))
        if file.read(len(self._seen)) != self._seen:
            self._offset, self._seen = 0, b""
            self.rewinds += 1
        file.seek(self._offset)


class Series(Sequence[Point]):
    """The steps and values of a metric, 16 bytes for each; a value that is not finite is None."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        """NaN for None."""

    def extend(self, steps: Iterable[int], values: Iterable[float | None]) -> None:
        """Add points; of values that are not finite, NaN is kept."""
        self.steps.extend(array("q", steps))
        numbers: list[Any] = list(values)
        try:
            finite = max(numbers, default=0.0) < _HUGE and min(numbers, default=0.0) > -_HUGE
        except TypeError:
            finite = False
        if not finite:
            # The comparison is false for NaN, infinities, and integers that no float holds.
            numbers = [v if v is not None and -_HUGE < v < _HUGE else nan for v in numbers]
        self.values.extend(array("d", numbers))

    def pop(self) -> None:
        """Remove the last point."""
        self.steps.pop()
        self.values.pop()

    def numbers(self) -> list[float]:
        """Return the values that are numbers, in order."""
        values = self.values.tolist()
        # The sum is NaN if one of them is.
        return [value for value in values if value == value] if isnan(sum(values)) else values

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @overload
    def __getitem__(self, place: int) -> Point: ...
    @overload
    def __getitem__(self, place: slice) -> list[Point]: ...
    def __getitem__(self, place: int | slice) -> Point | list[Point]:
        if isinstance(place, int):
            value = self.values[place]
            return self.steps[place], value if value == value else None
        values = [value if value == value else None for value in self.values[place]]
        return list(zip(self.steps[place], values, strict=True))

    def __iter__(self) -> Iterator[Point]:
        return iter(self[:])


@dataclass
class Metrics:
    """The records of `metrics.jsonl`; grows record by record, and keeps every value in little memory."""

    _steps: list[Step] = field(default_factory=list)
    """The records of `steps`."""
    _converted: int = 0
    """How many of them are numbers alone by now: of a long run, most are left out before anyone asks for them."""
    attempt: int = 0
    """Index in `steps` at which the newest attempt begins."""
    series: dict[str, Series] = field(default_factory=dict)
    """Metric → its values in training and evaluation, in order; `warmup/loss` and `warmup/eval_loss` by the
    warm-up's own steps."""
    measured: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """`before`, `warmup` and `after` → the record of the held-out measurement."""
    step: int = 0
    """Optimizer step of the newest record."""
    total_steps: int | None = None

    @property
    def steps(self) -> list[Step]:
        """Logged training steps with all their numbers: the first of each attempt, the newest ones, and of many
        others some, evenly spread."""
        self._steps[self._converted :] = map(read_numbers, self._steps[self._converted :])
        self._converted = len(self._steps)
        return self._steps

    def extend(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records of training, evaluation, warm-up and measurement; others are passed over."""
        records = iter(records)
        while block := list(islice(records, _BLOCK_RECORDS)):
            for record in block:
                self._add_event(record)
            logged = [record for record in block if record["event"] in ("train", "eval")]
            layouts = dict.fromkeys(map(tuple, logged))
            blank = dict.fromkeys(chain.from_iterable(layouts), False)
            # By metric, since there are millions of values. False is not a number, as what is not logged.
            alike = logged if len(layouts) == 1 else [blank | record for record in logged]
            rows = map(dict.values, alike)
            columns = dict(zip(blank, zip(*rows, strict=True), strict=True))
            steps = array("q", columns.get("step", ()))
            for name, values in columns.items():
                if name not in _NOT_METRICS:
                    self._add_column(name, steps, values)

    def _add_event(self, record: dict[str, Any]) -> None:
        """Add what a record says beside the values of its metrics."""
        event = record["event"]
        if event == "measure":
            self.measured[record["when"]] = record
        elif event == "resume":
            self.attempt = len(self._steps)
        elif event == "warmup":
            self._add_warmup(record)
        elif event in ("train", "eval"):
            self.step = record["step"]
            if type(total_steps := record.get("total_steps")) is int:
                self.total_steps = total_steps or self.total_steps
        if event == "train":
            self._steps.append(record)
            if len(self._steps) > _MOST_STEPS:
                self._thin_steps()

    def _add_column(self, name: str, steps: Sequence[int], values: Sequence[Any]) -> None:
        """Add the values of a metric; those that are not numbers are passed over."""
        if not _NUMBERS.issuperset(map(type, values)):
            are_numbers = [type(value) in _NUMBERS for value in values]
            steps, values = list(compress(steps, are_numbers)), list(compress(values, are_numbers))
        if values:
            self.series.setdefault(name, Series()).extend(steps, values)

    def _thin_steps(self) -> None:
        """Leave out every second step between the first and the newest ones."""
        end = len(self._steps) - _NEWEST_STEPS
        places = [*range(0, end, 2), *range(end, len(self._steps))]
        attempt = bisect_left(places, self.attempt)
        if attempt == len(places) or places[attempt] != self.attempt:
            places.insert(attempt, self.attempt)
        self._steps = [self._steps[place] for place in places if place < len(self._steps)]
        self.attempt = attempt
        self._converted = bisect_left(places, self._converted)

    def _add_warmup(self, record: Mapping[str, Any]) -> None:
        """Add the losses of a step of the warm-up; what an earlier attempt logged from there on is dropped."""
        numbers = read_numbers(record)
        for name in numbers.keys() & {"loss", "eval_loss"}:
            points = self.series.setdefault(f"warmup/{name}", Series())
            step = record["warmup_step"]
            while points and points.steps[-1] >= step:
                points.pop()
            points.extend((step,), (numbers[name],))

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric that are numbers, in order."""
        series = self.series.get(metric)
        return series.numbers() if series else []

    def window(self, metric: str, step: int, width: int) -> list[Point]:
        """Return the last `width` points of a metric at or before a step."""
        points = self.series.get(metric, Series())
        end = bisect_right(points.steps, step)
        return points[max(end - width, 0) : end]


def read_reward_ends(path: Path) -> tuple[list[float], list[float], bool]:
    """Return the first and the last training rewards, which are compared, and whether scoring ever failed.

    Only the records that are averaged are parsed, so that a thousand runs are listed in about a second.
    """
    # `grpo --help` needs no pydantic.
    from grpo_cli.runs.records import read_metrics

    if not path.is_file():
        return [], [], False
    data = path.read_bytes()
    lines = [line for line in data[: data.rfind(b"\n") + 1].splitlines() if _has_reward(line)]
    width = count_averaged(len(lines))
    first, last = (
        [value for record in records if (value := read_numbers(record).get("reward")) is not None]
        for records in (
            parse_records(part, read_metrics) for part in (lines[:width], lines[-width:])
        )
    )
    return first, last, _FAILED.search(data) is not None


def _has_reward(line: bytes) -> bool:
    """Return whether a line is a training record with a reward, as `append_record` writes it."""
    return b'"event": "train"' in line and b'"reward": ' in line and b'"reward": null' not in line


def read_numbers(record: Mapping[str, Any]) -> Step:
    """Return the numbers of a record; those that are not finite become None."""
    numbers = {
        # False for NaN, infinities, and integers that no float holds.
        name: value if value is not None and -_HUGE < value < _HUGE else None
        for name, value in record.items()
        if type(value) in _NUMBERS
    }
    numbers.pop("schema_version", None)
    return numbers


def read_rewards(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean of each reward function in a record, before its weight."""
    return {
        name[len(_REWARD_PREFIX) : -len(_MEAN)]: value
        for name, value in record.items()
        if name.startswith(_REWARD_PREFIX) and name.endswith(_MEAN) and _is_number(value)
    }


def read_error_shares(record: Mapping[str, Any], split: str = "") -> dict[str, float]:
    """Return the share of completions that each reward failed on in a record (`eval_`: an evaluation)."""
    prefix = f"{split}{_REWARD_PREFIX}"
    return {
        name[len(prefix) : -len(ERROR_SHARE)]: value
        for name, value in record.items()
        if name.startswith(prefix) and name.endswith(ERROR_SHARE) and value
    }


def count_averaged(records: int) -> int:
    """Return how many of these records the first and the last mean are taken over.

    A tenth of them, and at least 4 of each if there are 8: single steps are too noisy to compare.
    """
    return max(records // 10, min(4, records // 2), 1)


def numbers_of(points: Iterable[Point]) -> list[float]:
    """Return the values of points that are numbers, in order."""
    return [value for _, value in points if value is not None]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
