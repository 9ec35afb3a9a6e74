"""Records of a run in words: the line of a training step, those of other events, and what is wrong."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from grpo_cli.analysis.diagnosis.symptom import Symptom
from grpo_cli.report.live.terminal import clean_text
from grpo_cli.runs.series import StepRecord
from grpo_cli.units import format_duration

LEVEL_MARKS: dict[str, tuple[str, str]] = {
    "note": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "error": ("✗", "bold red"),
}
"""How bad something is → its mark and its style, wherever it is shown."""
_EQUAL = 1e-9


def format_step(step: StepRecord, left_s: float | None) -> str:
    """A training step in one line."""
    total = f"/{step.total_steps}" if step.total_steps else ""
    facts = (f"{name} {value}" for name, value in list_facts(step))
    left = [f"left {format_duration(left_s)}"] if left_s is not None else []
    return "  ".join([f"step {step.step}{total}", *facts, *left])


def list_facts(step: StepRecord) -> list[tuple[str, str]]:
    """What a step logged, by the names that people read."""
    facts: list[tuple[str, float | None, str]] = [
        ("reward", step.reward, "{:.3f}"),
        ("reward_std", step.reward_std, "{:.3f}"),
        # Under TRL's names: a reward may be called `length` too.
        *((f"rewards/{name}", value, "{:.3f}") for name, value in telling_rewards(step).items()),
        ("zero-signal", step.zero_signal, "{:.0%}"),
        ("zero-signal left", step.zero_signal_left, "{:.0%}"),
        ("tokens", step.completion_length, "{:.1f}"),
        ("clipped", step.clipped, "{:.0%}"),
        ("entropy", step.entropy, "{:.2f}"),
        ("kl", step.kl, "{:.4f}"),
        ("grad", step.grad_norm, "{:.3g}"),
        ("tokens/s", step.tokens_per_s, "{:.0f}"),
        ("s/step", seconds_of(step), "{:.2f}"),
    ]
    return [(name, form.format(value)) for name, value, form in facts if value is not None]


def seconds_of(step: StepRecord) -> float | None:
    """What a step took: all of its phases, where they were logged; TRL's time lacks the optimizer."""
    return sum(step.phases_s.values()) if step.phases_s else step.step_time_s


def say_sampling(temperature: Any) -> str:
    """How answers were drawn; nothing where that was not written down."""
    if not isinstance(temperature, int | float):
        return ""
    return "greedy" if temperature == 0 else f"at temperature {temperature:g}"


def format_symptom(symptom: Symptom) -> Text:
    """What is wrong in one line, under the mark of its level."""
    mark, style = LEVEL_MARKS[symptom.level]
    return Text(f"{mark} {clean_text(symptom)}", style=style)


def telling_rewards(step: StepRecord) -> dict[str, float]:
    """The mean of each reward; none where a single one is the total, which says it already."""
    values = list(step.rewards.values())
    alone = len(values) == 1 and step.reward is not None and abs(values[0] - step.reward) < _EQUAL
    return {} if alone else step.rewards


def format_event(record: Mapping[str, Any], temperature: float | None = None) -> str | None:
    """A record that is no training step in one line; None for those that say nothing to people.

    Args:
        record: Of `metrics.jsonl`.
        temperature: That the training samples at, and its evaluations in between; None where it is unknown.
    """
    words = _WORDS.get(str(record.get("event")))
    if words is None:
        return None
    try:
        told = words({"sampled_at": temperature, **record})
    except (KeyError, TypeError, ValueError, AttributeError):
        # Damage: it is passed over, as torn lines are.
        return None
    return None if told is None else clean_text(told)


def _say_measurement(record: Mapping[str, Any]) -> str:
    accuracy = record.get("accuracy", {})
    scored = [(f"{name} accuracy", value) for name, value in accuracy.items()]
    # Where every score is 0 or 1, the mean says nothing more.
    scored += [item for item in record["rewards"].items() if item not in accuracy.items()]
    scores = ", ".join(f"{name} {value:.3f}" for name, value in scored if value is not None)
    scores = scores or "nothing to compare"
    drawn = _after_comma(say_sampling(record.get("temperature")))
    return f"{record['when']} training, {record['prompts']} held-out prompts{drawn}: {scores}"


def _after_comma(text: str) -> str:
    return f", {text}" if text else ""


def _say_evaluation(record: Mapping[str, Any]) -> str | None:
    if record.get("eval_reward") is not None:
        drawn = say_sampling(record["sampled_at"])
        drawn = f", sampled {drawn}" if drawn else ""
        return f"step {record['step']}  eval reward {record['eval_reward']:.3f}{drawn}"
    if record.get("eval_ranking") is not None:
        gap = f"{record['eval_likelihood_gap']:+.3f}"
        return f"step {record['step']}  pairs ranked right {record['eval_ranking']:.3f}  likelihood gap {gap}"
    return None


def _say_server(record: Mapping[str, Any]) -> str:
    return f"step {record['step']}  the vLLM server is back, and gets the weights again"


def _say_resumption(record: Mapping[str, Any]) -> str:
    return f"going on from step {record['step']} (attempt {record['attempt']})"


def _say_fast(record: Mapping[str, Any]) -> str:
    parts = "; ".join(f"no {part}, since {why}" for part, why in record["left_off"].items())
    return f"training.fast: {parts}"


_WORDS = {
    "fast": _say_fast,
    "measure": _say_measurement,
    "eval": _say_evaluation,
    "server": _say_server,
    "resume": _say_resumption,
}


def short_path(path: Path) -> str:
    """A path as a person would type it here: below the working directory, relative to it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
