"""The end of a run in a few lines that a person can act on."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from grpo_cli.analysis.diagnosis.diagnosis import diagnose
from grpo_cli.analysis.diagnosis.history import read_history
from grpo_cli.analysis.diagnosis.symptom import Symptom
from grpo_cli.analysis.expectations.verdicts import Comparison, compare_with_own
from grpo_cli.errors import UsageError
from grpo_cli.report.reward_change import RewardChange, read_change
from grpo_cli.runs.files import read_object
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import read_records
from grpo_cli.runs.series import StepRecord, read_step
from grpo_cli.runs.status import Status, StatusFile
from grpo_cli.units import format_duration

_PARTS = {"rewards", "accuracy"}
"""Of a measurement: a number for each reward."""


@dataclass(frozen=True)
class RunSummary:
    """What a finished run has to show."""

    folder: RunFolder
    status: Status
    steps: tuple[StepRecord, ...]
    before: dict[str, Any] | None
    """The measurement before training, as in `eval/before.json`."""
    after: dict[str, Any] | None
    answers: tuple[tuple[str, str], ...] = ()
    """What a model trained on scored data answers to a few prompts: the end of each prompt, and the answer."""
    expected: Comparison | None = None
    """Beside what its recipe expects; None where that says nothing."""
    symptoms: tuple[Symptom, ...] = ()
    """What `grpo diagnose` finds."""

    @property
    def seconds(self) -> float:
        """From the start to the last sign of life."""
        return self.status.seconds

    def duration(self) -> str:
        """The same for people, such as `5m23s`."""
        return format_duration(self.seconds)

    def reward_change(self) -> RewardChange | None:
        """Mean reward over the first and the last records."""
        return read_change([step.reward for step in self.steps if step.reward is not None])

    def warnings(self) -> list[str]:
        """What a person should know before believing the run: that it could not learn, say."""
        return [f"{each.rule}: {each.seen}. Fix: {each.fix}" for each in self.problems()]

    def problems(self) -> tuple[Symptom, ...]:
        """The symptoms that are more than notes, the worst first; what ended the run is its reason already."""
        told = self.status.stopped_by or ("nan_loss" if self.status.state == "failed" else None)
        return tuple(each for each in self.symptoms if each.level != "note" and each.rule != told)

    def as_json(self) -> dict[str, Any]:
        """The summary as plain values."""
        change = self.reward_change()
        return {
            "run": str(self.folder.path),
            "state": self.status.state,
            "reason": self.status.reason,
            "steps": self.status.step,
            "total_steps": self.status.total_steps,
            "seconds": round(self.seconds, 1),
            "reward_first": change.first if change else None,
            "reward_last": change.last if change else None,
            "reward_within_noise": change.is_noise if change else None,
            "before": self.before,
            "after": self.after,
            "answers": [list(pair) for pair in self.answers],
            "expected": self.expected.as_json() if self.expected else None,
            "warnings": self.warnings(),
            "model": str(self.folder.model) if self.folder.model.is_dir() else None,
        }


def read_summary(folder: RunFolder) -> RunSummary:
    """Reads what a run has left behind."""
    steps = tuple(step for record in read_records(folder.metrics) if (step := read_step(record)))
    return RunSummary(
        folder,
        StatusFile(folder.status).read(),
        steps,
        _read_measurement(folder, "before"),
        _read_measurement(folder, "after"),
        tuple(_read_answers(folder)),
        compare_with_own(folder),
        _find_symptoms(folder),
    )


def _find_symptoms(folder: RunFolder) -> tuple[Symptom, ...]:
    """What the rules find; nothing where the recipe cannot be read."""
    try:
        return tuple(diagnose(read_history(folder)))
    except UsageError:
        return ()


def _read_measurement(folder: RunFolder, when: str) -> dict[str, Any] | None:
    path = folder.evaluations / f"{when}.json"
    told = read_object(path)
    for part in _PARTS & told.keys():
        values = told[part] if isinstance(told[part], dict) else {}
        told[part] = {name: each for name, each in values.items() if _is_score(each)}
    return told or None


def _is_score(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _read_answers(folder: RunFolder) -> Iterator[tuple[str, str]]:
    for sample in read_records(folder.evaluations / "answers.jsonl"):
        with suppress(KeyError, TypeError, IndexError, AttributeError):
            prompt = sample["prompt"]
            asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            yield " ".join(asked.split()), " ".join(sample["text"].split())
