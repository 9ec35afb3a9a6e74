"""The numbers that are reported of a run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from grpo_cli.analysis.diagnosis.diagnosis import RULES, Diagnosis, examine
from grpo_cli.analysis.diagnosis.history import LIKELY, History, change_between, read_history
from grpo_cli.analysis.diagnosis.rule import Skip, Symptom
from grpo_cli.analysis.expectations import Comparison, compare_with_own
from grpo_cli.analysis.metrics import Metric, say_error_shares, say_failures
from grpo_cli.data.rows import say_dropped
from grpo_cli.errors import GrpoError
from grpo_cli.recipe.evaluation import EvaluationConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.wording import say_sampling
from grpo_cli.runs.completions import show_content
from grpo_cli.runs.files import measure_bytes
from grpo_cli.runs.metrics import ERROR_SHARE, LOWER, STAGES, count_averaged
from grpo_cli.runs.run import Run
from grpo_cli.runs.trackers import read_trackers
from grpo_cli.units import format_duration

if TYPE_CHECKING:
    from grpo_cli.analysis.held_out import HeldOut

_PARTS = ("checkpoints", "warmup", "model", "completions", "eval", "logs", "tensorboard")
"""Folders whose sizes are listed one by one."""
REST = "the rest"


@dataclass(frozen=True)
class Trend:
    """Where a logged metric began and ended, each the mean of `width` records."""

    first: float
    last: float
    width: int
    error: float | None = None
    """Standard error of the difference; None if there are too few records to know."""
    best: float | None = None
    """The highest mean of as many records; None for metrics of which the highest is not the best."""
    best_step: int | None = None

    @property
    def difference(self) -> float:
        """From the first to the last."""
        return self.last - self.first

    @property
    def margin(self) -> float | None:
        """How much difference noise alone may well make."""
        return None if self.error is None else LIKELY * self.error

    @property
    def is_noise(self) -> bool | None:
        """True if the difference may be chance; None if there are too few records to know."""
        return None if self.margin is None else abs(self.difference) <= self.margin

    def describe(self) -> str:
        """Return what was averaged, and whether the difference is only noise."""
        # Short: it stands in a table of a narrow terminal.
        if self.is_noise:
            return f"within noise (means of {self.width})"
        if self.width == 1:
            return "the first and the last record"
        return f"mean of the first and last {self.width} records"

    def as_json(self) -> dict[str, Any]:
        """Return the trend as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "error"}


@dataclass(frozen=True)
class HeldOutSetSeries:
    """What a set of `evaluation.during` came to."""

    points: Mapping[int, Mapping[str, Metric]]
    """Step → every metric with its interval, in order."""
    newest: Mapping[str, Any]
    """Its last measurement during training, as recorded."""
    repeats: bool = False
    """Whether it is what is measured before and after training too."""
    decides: str | None = None
    """Its metric that decides which checkpoint is the final model; None if none does."""
    greater_is_better: bool | None = None
    """Whether that metric is better the higher it is, if the recipe says so."""

    @property
    def sampling(self) -> str:
        """How its prompts were answered."""
        return say_sampling(self.newest.get("temperature"), "greedily")

    @property
    def primary(self) -> str:
        """The metric that tells most; empty if there is none."""
        from grpo_cli.analysis.held_out import find_primary

        # A task of lm-eval has other metrics, of which the first is the main one.
        return find_primary(self._names) or next(iter(self._names), "")

    @property
    def shown(self) -> list[str]:
        """The metrics that a summary lists: the one that decides or tells most, and pass@k of the largest k."""
        metric = self.decides if self.decides in self._names else self.primary
        reward = re.escape(metric.partition("/")[2])
        passes = [one for one in self._names if reward and re.fullmatch(rf"pass@\d+/{reward}", one)]
        return [each for each in (metric, *passes[-1:]) if each]

    @property
    def _names(self) -> dict[str, None]:
        # Rewards of other sources have no value in this set.
        names = dict.fromkeys(name for metrics in self.points.values() for name in metrics)
        return {name: None for name in names if self.values(name)}

    def find_best(self, metric: str) -> tuple[int, float]:
        """Return the step at which a metric was best, and its value; it has one."""
        greater = self.greater_is_better if metric == self.decides else None
        if greater is None:
            greater = metric not in self.newest.get(LOWER, ())
        choose = max if greater else min
        return choose(self.values(metric).items(), key=lambda point: point[1])

    def values(self, metric: str) -> dict[int, float]:
        """Return a metric by step, where it applies to a prompt."""
        known = {step: metrics.get(metric) for step, metrics in self.points.items()}
        return {step: each.value for step, each in known.items() if each and each.value is not None}

    def as_json(self) -> list[dict[str, Any]]:
        """Return the points as plain values."""
        return [
            {"step": step, "metrics": {name: each.as_json() for name, each in metrics.items()}}
            for step, metrics in self.points.items()
        ]


def find_trend(first: Sequence[float], last: Sequence[float]) -> Trend | None:
    """Return the trend from the first records to the last; None if there are none."""
    if not first or not last:
        return None
    change = change_between(first, last)
    width = min(len(first), len(last))
    return Trend(fmean(first), fmean(last), width, change.error if change else None)


class RunReport(Run):
    """A run with the numbers that are reported of it, each computed when first asked for."""

    known_settings: frozenset[str] | None = None
    """The settings that are known of a run of another tool; None of one of ours, whose recipe has all."""

    @property
    def described(self) -> str:
        """How far the run came, in a few words."""
        status = self.status
        return f"{status.state}, {status.progress} steps in {format_duration(status.seconds)}"

    @property
    def known_recipe(self) -> Recipe | None:
        """The resolved recipe; None if it cannot be read, as that of another version."""
        try:
            return self.recipe
        except GrpoError:
            return None

    def history(self) -> History:
        """Return what the rules of `grpo diagnose` read."""
        return read_history(self)

    def brief_history(self) -> History:
        """Return what rules read of a run in progress: its records alone."""
        return History(self.recipe, self.metrics, source=str(self.folder.resolved))

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The findings of `grpo diagnose`; no rule is checked if the recipe cannot be read."""
        if self.known_recipe:
            return examine(self.history())
        unread = Skip("the recipe cannot be read")
        return Diagnosis(skipped=dict.fromkeys((rule.name for rule in RULES), unread))

    @property
    def dropped(self) -> str:
        """How many rows were dropped, and why; empty if none was."""
        return say_dropped(self.manifest["data"].get("dropped", {}))

    @cached_property
    def expected(self) -> Comparison | None:
        """The run compared with what its recipe expects; None if that says nothing."""
        return compare_with_own(self)

    @cached_property
    def held_out(self) -> "HeldOut":
        """The held-out measurements before and after, with intervals."""
        from grpo_cli.analysis.held_out import read_held_out

        return read_held_out(self)

    @property
    def sampling(self) -> str:
        """How held-out prompts were answered; empty if that was not recorded."""
        return say_sampling({**self.before, **self.after}.get("temperature"), "greedily")

    @cached_property
    def held_out_sets(self) -> dict[str, HeldOutSetSeries]:
        """Each set of `evaluation.during` by its name, with its metrics before, during and after training."""
        evaluation, best, greater = self._held_out_settings()
        series = {}
        for name, measured in self.during.items():
            config = next((each for each in evaluation.during if each.label == name), None)
            repeats = config is not None and evaluation.repeats(config)
            points = {
                step: {metric: Metric(**each) for metric, each in result["metrics"].items()}
                for step, result in measured.items()
            }
            if repeats:
                points = self._add_ends(points)
            newest = measured[max(measured)]
            prefix = f"eval_{name}/"
            decides = best.removeprefix(prefix) if best.startswith(prefix) else None
            series[name] = HeldOutSetSeries(points, newest, repeats, decides, greater)
        return series

    def _held_out_settings(self) -> tuple[EvaluationConfig, str, bool | None]:
        """Return how held-out rows are evaluated, what decides on the final model, and `greater_is_better`."""
        if (recipe := self.known_recipe) is None:
            return EvaluationConfig(), "", None
        best = (recipe.best_metric or "") if recipe.loads_best else ""
        return recipe.evaluation, best, recipe.setting("greater_is_better")

    @property
    def chosen(self) -> str:
        """Which checkpoint became the final model, and by which metric; empty if it is simply the last."""
        metric = self._held_out_settings()[1]
        step = self.best_checkpoint if metric and self.folder.model.is_dir() else None
        return f"step {step}, best {metric}" if step else ""

    @property
    def final_step(self) -> int:
        """The step that the final model is of."""
        return (self.best_checkpoint if self.chosen else None) or self.step

    def _add_ends(self, points: dict[int, dict[str, Metric]]) -> dict[int, dict[str, Metric]]:
        """Add the measurements before and after training, which are of the same set."""
        held_out = self.held_out
        first = {0: held_out.warmup or held_out.before}
        # The best model is of an earlier step.
        last = {} if self.recipe.loads_best or self.step in points else {self.step: held_out.after}
        return {step: each for step, each in {**first, **points, **last}.items() if each}

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """Each reward's weight by its name; empty if the recipe cannot be read."""
        # It imports what scores completions, which views that show no sample need not wait for.
        from grpo_cli.rewards.building import name_rewards

        rewards = self.known_recipe.rewards if self.known_recipe else ()
        return dict(zip(name_rewards(rewards), (each.weight for each in rewards), strict=True))

    @property
    def learned(self) -> tuple[str, str]:
        """The metric that training is to improve, and its name in words."""
        if self.known_recipe and not self.known_recipe.learns_from_rewards:
            return "kl", "KL to the teacher"
        return "reward", "reward"

    @property
    def is_over(self) -> bool:
        """True if nothing more is to come."""
        return self.life.state not in ("pending", "running")

    @property
    def can_resume(self) -> bool:
        """True if an attempt left something to resume from: a checkpoint, or a warm-up."""
        return bool(self.checkpoints) or self.folder.warmup.is_dir()

    def trend(self, metric: str) -> Trend | None:
        """Return where a metric began and ended; None if it was logged less than twice."""
        values = self.values(metric)
        width = count_averaged(len(values))
        return find_trend(values[:width], values[-width:]) if len(values) > 1 else None

    def answers(self) -> list[tuple[str, str]]:
        """Return what a model trained on scored data answers: the end of each prompt, and the answer."""
        return [
            (" ".join(last_turn(each["prompt"]).split()), " ".join(each["text"].split()))
            for each in self.samples("answers")
        ]

    def scoring_failures(self) -> dict[str, str]:
        """Return how many answers timed out or failed in scoring, in training and in each measurement."""
        names = (name for name in self.series if name.endswith(ERROR_SHARE))
        means = {name: fmean(self.values(name) or [0.0]) for name in names}
        failures = {
            where: ", ".join(say_error_shares(means, split))
            for where, split in (("in training", ""), ("in evaluations during training", "eval_"))
        }
        measured = {f"held out {STAGES[stage]}": self.measured(stage) for stage in STAGES}
        for name, steps in self.during.items():
            measured |= {f"{name} at step {step}": each for step, each in steps.items()}
        failures |= {name: say_failures(each) for name, each in measured.items()}
        return {where: text for where, text in failures.items() if text}

    def problems(self) -> list[Symptom]:
        """Return the symptoms that are more than notes, but for the one that is the reason of the end."""
        reason = self.status.stopped_by or ("nan_loss" if self.status.state == "failed" else None)
        symptoms = self.diagnosis.symptoms
        return [each for each in symptoms if each.level != "note" and each.rule != reason]

    def lost(self) -> str | None:
        """Return what is known of a run that should be running and is not; None of other runs."""
        if self.life.state != "interrupted":
            return None
        here = "none of its processes is left on this machine"
        where = here if self.life.here else "it was started on another machine"
        return (
            f"interrupted while {self.status.phase}: {where}, and the last sign of life is "
            f"{format_duration(self.life.silent_s)} old. Fix: look at {self.folder.log}; "
            f"{self.resume_command()} resumes it"
        )

    def tracker_runs(self) -> dict[str, str]:
        """Return tracker → what finds the run there."""
        runs = {}
        for tracker, known in read_trackers(self.folder, "runs").items():
            parts = ("folder", "entity", "project", "name", "id")
            where = "/".join(str(known[part]) for part in parts if known.get(part))
            where = str(self.folder.path / where) if known.get("folder") else where
            runs[tracker] = str(known.get("url") or where)
            if tracker == "wandb" and (self.folder.path / "wandb").is_dir():
                runs[tracker] += f", files in {self.folder.path / 'wandb'}"
        return runs

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each part of the folder; links are counted as links."""
        folder = self.folder.path
        parts = [name for name in _PARTS if (folder / name).exists()]
        sizes = {name: measure_bytes(folder / name) for name in parts}
        return {**sizes, REST: max(measure_bytes(folder) - sum(sizes.values()), 0)}

    def summary_json(self) -> dict[str, Any]:
        """Return the end of the run as plain values, for `--json` of `grpo train` and `grpo watch`."""
        status, values = self.status, self.values("reward")
        width = count_averaged(len(values))
        reward = find_trend(values[:width], values[-width:])
        during = {name: each.as_json() for name, each in self.held_out_sets.items()}
        return {
            "run": str(self.folder.path),
            "state": status.state,
            "reason": status.reason,
            "fix": status.fix,
            "steps": status.step,
            "total_steps": status.total_steps,
            "seconds": round(status.seconds, 1),
            "reward_first": reward.first if reward else None,
            "reward_last": reward.last if reward else None,
            "reward_within_noise": reward.is_noise if reward else None,
            "before": self.before or None,
            **({"warmup": warmup} if (warmup := self.measured("warmup")) else {}),
            "after": self.after or None,
            **({"during": during} if during else {}),
            "answers": [list(pair) for pair in self.answers()],
            "expected": self.expected.as_json() if self.expected else None,
            "warnings": [f"{each.rule}: {each.seen}. Fix: {each.fix}" for each in self.problems()],
            "model": str(self.folder.model) if self.folder.model.is_dir() else None,
        }

    def overview_json(self) -> dict[str, Any]:
        """Return everything that `grpo runs show --json` prints."""
        parts = ("versions", "git", "hardware", "accelerator", "data")
        return {
            **self.summary_json(),
            "state": self.life.state,
            "name": self.folder.path.parent.name,
            "id": self.folder.path.name,
            "silent_s": round(self.life.silent_s, 1),
            "recipe": self.recipe.model_dump(mode="json"),
            **{part: self.manifest.get(part) for part in parts},
            "attempts": self.folder.attempts,
            "checkpoints": {str(step): str(path) for step, path in self.checkpoints.items()},
            "best_checkpoint": self.best_checkpoint,
            "bytes": self.sizes(),
        }


def last_turn(prompt: Any) -> str:
    """Return a prompt's text, or that of its last message."""
    if isinstance(prompt, list):
        last = prompt[-1] if prompt else ""
        prompt = show_content(last.get("content", "")) if isinstance(last, dict) else last
    return str(prompt)
