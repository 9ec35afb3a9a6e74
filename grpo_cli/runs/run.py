"""A run, read lazily from its folder."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain, compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from grpo_cli.errors import UsageError
from grpo_cli.runs.checkpoints import find_best, whole_checkpoints
from grpo_cli.runs.completions import Group, find_groups, load_groups
from grpo_cli.runs.files import read_file
from grpo_cli.runs.folder import Life, RunFolder, Status, StatusFile, look_at_life
from grpo_cli.runs.metrics import (
    DURING,
    Metrics,
    RecordTail,
    Series,
    Step,
    When,
    read_numbers,
    read_records,
)
from grpo_cli.runs.records import Measurement, read_group, read_metrics, read_sample
from grpo_cli.runs.thumbnails import read_thumbnails

if TYPE_CHECKING:
    from grpo_cli.recipe.recipe import Recipe

_NEWEST_BYTES = 2**22
"""Read at the end of each file of completions, which may be large: enough for the newest group."""
_NEWEST_RECORDS = 10_000
"""The most new records that `refresh` returns of a run that is skimmed."""


class Run:
    """A run, read from its folder: each file when it is first asked for, and then kept.

    Records that a killed process left torn are passed over, and what is not there is empty. Asking for a file that
    is damaged raises `UsageError`.
    """

    def __init__(self, folder: RunFolder | Path | str, name: str | None = None) -> None:
        self.folder = (
            folder if isinstance(folder, RunFolder) else RunFolder(Path(folder).absolute())
        )
        self.name = name or "/".join(self.folder.path.absolute().parts[-2:])
        self._tail = RecordTail(self.folder.metrics, read_metrics)
        self._most_records: int | None = None
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._groups: dict[Path, RecordTail] = {}
        self._newest_group: dict[str, Any] | None = None

    def skim(self) -> Self:
        """Read of a large `metrics.jsonl` only the beginning, the end, and records spread between them.

        That is enough for a view of a run in progress, and takes no time. Call it before anything is read.
        """
        self._tail = RecordTail(self.folder.metrics, read_metrics, skims=True)
        self._most_records = _NEWEST_RECORDS
        return self

    @cached_property
    def recipe(self) -> "Recipe":
        """The resolved recipe; raises `UsageError` if it cannot be read."""
        return self.folder.read_recipe()

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The provenance of the newest attempt: command, versions, git, hardware, data, seed."""
        first, *later = self.attempt_manifests
        return {**first, **{key: each for key, each in (later or [{}])[-1].items() if each}}

    @cached_property
    def attempt_manifests(self) -> list[dict[str, Any]]:
        """The manifest of each attempt."""
        return self.folder.read_attempts()

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The launch plan of the newest attempt."""
        return self.folder.read_plan()

    @cached_property
    def status(self) -> Status:
        """Where the run stands, as `status.json` says; raises `UsageError` if it cannot be read."""
        return StatusFile(self.folder.status).read()

    @cached_property
    def life(self) -> Life:
        """Its state, which is `interrupted` if no process is left of a run that should be running."""
        return look_at_life(self.folder, self.status)

    @property
    def failure(self) -> str | None:
        """Why the run failed, with the fix if one is known; None if it did not."""
        return str(self.status.error) if self.status.state == "failed" else None

    def resume_command(self, path: Path | str | None = None) -> str:
        """Return the command that resumes the run at this path of it, although a rule may have stopped it."""
        path = path or self.folder.path
        overruled = " --set 'training.stop_when=[]'" if self.status.stopped_by else ""
        return f"grpo train {path}/{self.folder.resolved.name} --resume-from {path}{overruled}"

    @cached_property
    def metrics(self) -> Metrics:
        """All records of `metrics.jsonl`; `refresh` adds those that came since."""
        metrics = Metrics()
        metrics.extend(self._tail.read_new())
        return metrics

    @property
    def steps(self) -> list[Step]:
        """Each logged training step, by TRL's names of the metrics; read again each time."""
        records = RecordTail(self.folder.metrics, read_metrics).read_new()
        return [read_numbers(each) for each in records if each["event"] == "train"]

    @property
    def series(self) -> dict[str, Series]:
        """Metric → the steps and values at which it was logged."""
        return self.metrics.series

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return max(self.status.step, self.metrics.step)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps planned."""
        return self.status.total_steps or self.metrics.total_steps

    def values(self, metric: str) -> list[float]:
        """Return the logged values of a metric that are numbers, in order."""
        return self.metrics.values(metric)

    def measured(self, when: When) -> dict[str, Any]:
        """Return the held-out measurement before or after training, as in `eval/`; empty if there is none."""
        return read_file(self.folder.evaluations / f"{when}.json", Measurement) or {}

    @cached_property
    def before(self) -> dict[str, Any]:
        """The held-out measurement before training."""
        return self.measured("before")

    @cached_property
    def after(self) -> dict[str, Any]:
        """The held-out measurement after training."""
        return self.measured("after")

    @cached_property
    def during(self) -> dict[str, dict[int, dict[str, Any]]]:
        """The measurements of each set of `evaluation.during` by step, in order, as in `eval/during/`."""
        measured: dict[str, dict[int, dict[str, Any]]] = {}
        files = (self.folder.evaluations / DURING).glob("*/*.json")
        for path in sorted(files, key=lambda path: (path.parent.name, len(path.stem), path.stem)):
            if path.stem.isdecimal() and (read := read_file(path, Measurement)):
                measured.setdefault(path.parent.name, {})[int(path.stem)] = read
        return measured

    def samples(self, when: When | Literal["answers"]) -> list[dict[str, Any]]:
        """Return the completions of a measurement with their scores; none if they are not there.

        `answers` are those of a model trained on scored data.
        """
        if when not in self._samples:
            path = self.folder.evaluations / f"{when}.jsonl"
            self._samples[when] = read_records(path, read_sample)
        return self._samples[when]

    def completions(self) -> Iterator[Group]:
        """Yield the groups sampled in training and its evaluations, by step."""
        return load_groups(find_groups(self.folder))

    def failed_completions(self) -> dict[str, tuple[int, str]]:
        """Return on how many recorded completions of training each reward failed, and the first reason."""
        failures: dict[str, tuple[int, str]] = {}
        for path in sorted(self.folder.completions.glob("rank_*.jsonl")):
            for group in RecordTail(path, read_group).read_new():
                for name, failed in group["failed"].items() if group["split"] == "train" else ():
                    reasons = group["reasons"].get(name, ())
                    new = next(filter(None, compress(reasons, failed)), "")
                    count, first = failures.get(name, (0, ""))
                    failures[name] = count + sum(failed), first or new
        return failures

    @cached_property
    def thumbnails(self) -> dict[str, str]:
        """The small copies of images by their names in prompts, each as base64 of a JPEG file."""
        return read_thumbnails(self.folder)

    def newest_group(self) -> dict[str, Any] | None:
        """Return the group that was sampled last, as recorded by its process; None before the first."""
        for path in sorted(self.folder.completions.glob("rank_*.jsonl")):
            new = RecordTail(path, read_group, last_bytes=_NEWEST_BYTES)
            tail = self._groups.setdefault(path, new)
            for group in tail.read_new():
                if self._newest_group is None or group["time"] >= self._newest_group["time"]:
                    self._newest_group = group
        return self._newest_group

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """The complete checkpoints, by step."""
        return whole_checkpoints(self.folder)

    @property
    def best_checkpoint(self) -> int | None:
        """Step of the best checkpoint; None if the run did not evaluate while it trained."""
        with suppress(UsageError):
            name, _ = find_best(self.folder, self.checkpoints)
            return int(name.rpartition("-")[2])
        return None

    def refresh(self) -> list[dict[str, Any]]:
        """Read the status again and what was appended to the metrics since; return the new records.

        If the metrics were cut meanwhile, because the run resumed from a checkpoint, `metrics` is replaced, and
        the new records are those since it resumed.
        """
        # The status first: a record that was written before it is then never missed.
        self.status = StatusFile(self.folder.status).read()
        self.__dict__.pop("life", None)
        rewinds, new = self._tail.rewinds, self._tail.read_new()
        # Reading the first one tells whether the file was cut.
        first = list(islice(new, 1))
        if self._tail.rewinds > rewinds or "metrics" not in self.__dict__:
            self.metrics, self._newest_group = Metrics(), None
        records: deque[dict[str, Any]] = deque(maxlen=self._most_records)

        def keep(record: dict[str, Any]) -> dict[str, Any]:
            records.append(record)
            return record

        self.metrics.extend(map(keep, chain(first, new)))
        listed = list(records)
        if self._tail.rewinds > rewinds:
            resumed = [at for at, each in enumerate(listed) if each["event"] == "resume"]
            return listed[resumed[-1] :] if resumed else listed
        return listed
