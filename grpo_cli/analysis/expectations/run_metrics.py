"""What a run shows of each of its metrics: logged records, and the held-out measurement at its end.

Owns which names there are and where they are read. Judges nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_cli.runs.files import parse_json, read_object
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import read_records
from grpo_cli.runs.status import Status, StatusFile

_MOST = 1e100
ACCURACY = "accuracy/"
"""What the names of held-out accuracies begin with."""
_NOT_METRICS = {"schema_version", "time", "event", "step", "total_steps"}
GAP = "likelihood_gap"
"""How much likelier the better of scored responses are; see `analysis.ranking`."""
_OF_ALL = ("completion_length", "clipped", GAP)
"""Numbers of the measurement that belong to no reward."""
MEASURED = (ACCURACY, "rewards/", *_OF_ALL)
"""What the names of held-out metrics begin with."""


@dataclass(frozen=True)
class RunMetrics:
    """What one run has left behind."""

    run: RunFolder
    status: Status
    records: tuple[Mapping[str, Any], ...]
    """Those of training steps and of evaluations meanwhile, in their order."""
    after: Mapping[str, Any]
    """The measurement after training, as in `eval/after.json`; empty where there is none."""

    @property
    def name(self) -> str:
        """`<name>/<timestamp>`."""
        return "/".join(self.run.path.absolute().parts[-2:])

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return max(self.status.step, max((int(each["step"]) for each in self.records), default=0))

    def series(self, metric: str) -> list[tuple[int, float | None]]:
        """Step and value of each record that has the metric; None where it was no number."""
        if metric in _NOT_METRICS:
            return []
        found = [(each["step"], each[metric]) for each in self.records if metric in each]
        return [(int(step), value) for step, value in found if value is None or _is_number(value)]

    def window(self, metric: str, step: int, width: int) -> list[tuple[int, float | None]]:
        """The last `width` records up to a step that have the metric, fewer where there are not so many."""
        return [each for each in self.series(metric) if each[0] <= step][-width:]

    def held_out(self) -> dict[str, float | None]:
        """Every metric of the measurement after training."""
        found = {name: self.after[name] for name in _OF_ALL if name in self.after}
        for kind in ("accuracy", "rewards"):
            values = self.after.get(kind)
            if isinstance(values, dict):
                found |= {f"{kind}/{name}": value for name, value in values.items()}
        return {name: value for name, value in found.items() if value is None or _is_number(value)}

    def held_out_samples(self, metric: str) -> list[float]:
        """Each held-out prompt's mean of a metric; nothing where the samples are not there.

        Accuracy is not among them: which answers are right, the rewards alone know.
        """
        groups: dict[int, list[float]] = {}
        for sample in _read_lines(self.run.evaluations / "after.jsonl"):
            value = _read_sample(sample, metric)
            if _is_number(value):
                groups.setdefault(int(sample.get("row", 0)), []).append(float(value))
        return [fmean(values) for values in groups.values()]

    def names(self) -> list[str]:
        """Every metric the run has, in the order of first sight."""
        logged = dict.fromkeys(
            name
            for record in self.records
            for name, value in record.items()
            if name not in _NOT_METRICS and _is_number(value)
        )
        return list(logged | dict.fromkeys(self.held_out()))


def read_evidence(run: RunFolder) -> RunMetrics:
    """Reads what a run has left behind.

    Raises:
        UsageError: Its status is damaged.
    """
    records = tuple(
        each
        for each in read_records(run.metrics)
        if each.get("event") in ("train", "eval") and _is_number(each.get("step"))
    )
    return RunMetrics(run, StatusFile(run.status).read(), records, _read_after(run))


def _read_after(run: RunFolder) -> dict[str, Any]:
    return read_object(run.evaluations / "after.json")


def _read_lines(path: Any) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                sample = parse_json(line)
            except ValueError:
                continue
            if isinstance(sample, dict):
                yield sample


def _read_sample(sample: Mapping[str, Any], metric: str) -> Any:
    if metric in _OF_ALL:
        return sample.get("tokens" if metric == "completion_length" else metric)
    kind, _, name = metric.partition("/")
    return (sample.get("rewards") or {}).get(name) if kind == "rewards" else None


def _is_number(value: Any) -> bool:
    # Beyond that it is damage: no metric of a training is as large.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
