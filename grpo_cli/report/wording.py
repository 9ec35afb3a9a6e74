"""Records of a run in words, and text that a terminal may show."""

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from grpo_cli.runs.metrics import (
    PHASES,
    STAGES,
    STEP,
    Step,
    read_error_shares,
    read_numbers,
    read_rewards,
)
from grpo_cli.units import count_noun, format_duration, format_value

if TYPE_CHECKING:
    from grpo_cli.analysis.diagnosis.rule import Symptom

LEVEL_MARKS: dict[str, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "error": ("✗", "bold red"),
}
"""Level of an issue → its mark and its style, wherever it is shown."""
_OBEYED = {"Cc", "Cf", "Cs"}
"""Unicode's categories of characters that are not text."""
_KEPT = "\n\t\u200c\u200d"
"""Of these, what text needs: line ends, tabs, and what joins or parts letters in Persian, Hindi and emoji."""


def clean_text(text: object) -> str:
    """Text of a model or a file on one line; line ends and tabs become spaces."""
    return clean_lines(" ".join(str(text).split()))


def clean_lines(text: str) -> str:
    """Return text without control, bidirectional and invisible characters; lines and their indentation stay."""
    if text.isprintable():
        return text
    return "".join(
        each for each in text if each in _KEPT or unicodedata.category(each) not in _OBEYED
    )


_EQUAL = 1e-9
_TOTALS = (("reward", "reward", "{:.3f}"), ("reward_std", "reward_std", "{:.3f}"))
_FACTS = (
    ("zero-signal", "frac_reward_zero_std", "{:.0%}"),
    ("zero-signal left", "dynamic_sampling/frac_reward_zero_std", "{:.0%}"),
    ("tokens", "completions/mean_length", "{:.1f}"),
    ("clipped", "completions/clipped_ratio", "{:.0%}"),
    ("turns", "episode/turns", "{:.1f}"),
    ("calls", "tools/call_frequency", "{:.1f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("grad", "grad_norm", "{:.3g}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
)
"""What a step's line says: our word, TRL's name, and the format."""


def format_step(step: Step, left_s: float | None) -> str:
    """Return a training step in one line."""
    total = f"/{step['total_steps']}" if step.get("total_steps") else ""
    left = [f"left {format_duration(left_s)}"] if left_s is not None else []
    return "  ".join([f"step {step['step']}{total}", *_list_facts(step), *left])


def _list_facts(step: Step) -> Iterator[str]:
    yield from _format(step, _TOTALS)
    # Under TRL's names: a reward may be called `length` too.
    yield from (f"rewards/{name} {value:.3f}" for name, value in telling_rewards(step).items())
    yield from (f"failed {name} {share:.0%}" for name, share in read_error_shares(step).items())
    yield from _format(step, _FACTS)
    seconds = seconds_of(step)
    if seconds is not None:
        yield f"s/step {seconds:.2f}"


def _format(step: Step, facts: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [
        f"{word} {form.format(step[name])}"
        for word, name, form in facts
        if step.get(name) is not None
    ]


def phases_of(step: Step) -> dict[str, float]:
    """Return the seconds of each phase that was logged."""
    spent = {phase: step.get(f"time/{phase}") for phase in PHASES}
    return {phase: seconds for phase, seconds in spent.items() if seconds is not None}


def seconds_of(step: Step) -> float | None:
    """Return what a step took: all of its phases if they were logged; TRL's time lacks the optimizer."""
    phases = phases_of(step)
    return sum(phases.values()) if phases else step.get("step_time")


def telling_rewards(step: Step) -> dict[str, float]:
    """Return the mean of each reward; none if a single one is the total, which says it already."""
    rewards, total = read_rewards(step), step.get("reward")
    values = list(rewards.values())
    alone = len(values) == 1 and total is not None and abs(values[0] - total) < _EQUAL
    return {} if alone else rewards


def say_sampling(temperature: Any, greedy: str = "greedy") -> str:
    """Return how answers were sampled; empty if that was not recorded."""
    if not isinstance(temperature, int | float):
        return ""
    return f"at temperature {temperature:g}" if temperature else greedy


def format_symptom(symptom: "Symptom") -> Text:
    """Return what is wrong in one line, under the mark of its level."""
    mark, style = LEVEL_MARKS[symptom.level]
    return Text(f"{mark} {clean_text(symptom)}", style=style)


def format_event(record: Mapping[str, Any], temperature: float | None = None) -> str | None:
    """Return a record other than of training in one line; None if it says nothing to people.

    `temperature` is that of training and its evaluations; None if it is unknown.
    """
    words = _WORDS.get(record["event"])
    line = words({"sampled_at": temperature, **record}) if words else None
    return None if line is None else clean_text(line)


def _say_measurement(record: Mapping[str, Any]) -> str:
    # `grpo --help` reads no metrics.
    from grpo_cli.analysis.metrics import say_failures

    accuracy = record.get("accuracy", {})
    scored = [(f"{name} accuracy", value) for name, value in accuracy.items()]
    # If every score is 0 or 1, the mean says nothing more.
    scored += [item for item in record.get("rewards", {}).items() if item not in accuracy.items()]
    scores = ", ".join(f"{name} {value:.3f}" for name, value in scored if value is not None)
    sampling = say_sampling(record.get("temperature"))
    measured = [f"{record.get('prompts', 0)} held-out prompts", *([sampling] if sampling else [])]
    when = STAGES[record["when"]]
    if not scores and (length := record.get("completion_length")) is not None:
        scores = f"completions of {length:.1f} tokens"
    failures = say_failures(record)
    return f"{when}, {', '.join(measured)}: {scores or 'no rewards'}{f'; {failures}' if failures else ''}"


def _say_warmup(record: Mapping[str, Any]) -> str:
    losses = (("loss", "loss"), ("eval_loss", "held-out loss"))
    said = "  ".join(
        f"{what} {format_value(record[name])}" for name, what in losses if name in record
    )
    return f"warm-up step {record['warmup_step']}/{record['total_steps']}  {said}"


def _say_evaluation(record: Mapping[str, Any]) -> str | None:
    said = []
    if record.get("eval_reward") is not None:
        sampling = say_sampling(record["sampled_at"])
        sampled = f", sampled {sampling}" if sampling else ""
        said.append(f"eval reward {record['eval_reward']:.3f}{sampled}")
    if record.get("eval_ranking") is not None:
        gap = format_value(record.get("eval_likelihood_gap"), "+")
        said.append(f"pairs ranked right {record['eval_ranking']:.3f}  likelihood gap {gap}")
    failed = read_error_shares(record, "eval_").items()
    said += [f"failed {name} {share:.0%}" for name, share in failed]
    said += list(_say_held_out_sets(record))
    return f"step {record['step']}  {'  '.join(said)}" if said else None


def _say_held_out_sets(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the accuracies of each set of `evaluation.during`, or its first metric if it has none."""
    for each in record:
        prefix, _, metric = each.partition("/")
        if metric == "runtime":
            own = [name for name in record if name.startswith(f"{prefix}/") and name != each]
            right = [name for name in own if name.startswith(f"{prefix}/accuracy/")]
            for name in [name for name in right if "@" not in name] or own[:1]:
                if (value := record.get(name)) is not None:
                    said = name.removeprefix("eval_").replace("/", " ")
                    yield f"{said} {value:.3f}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "fast": lambda record: (
        "training.fast: "
        + "; ".join(f"no {part}, since {why}" for part, why in record["left_off"].items())
    ),
    "measure": _say_measurement,
    "warmup": _say_warmup,
    "eval": lambda record: _say_evaluation(read_numbers(record)),
    "server": lambda record: (
        f"step {record['step']}  the vLLM server is back, and gets the weights again"
    ),
    "resume": lambda record: f"going on from step {record['step']} (attempt {record['attempt']})",
}


class Turn(NamedTuple):
    """One message of an episode, as it is shown."""

    role: str
    text: str
    is_own: bool
    """Whether the model wrote it; nothing else is learned from."""


def list_turns(messages: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """Return the messages of an episode after its prompt."""
    return list(map(_read_turn, messages))


def _read_turn(message: Mapping[str, Any]) -> Turn:
    # `grpo --help` reads no run.
    from grpo_cli.runs.completions import show_content

    role, parts = str(message.get("role", "")), [message.get("content")]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("thinking")
        parts = [reasoning, *parts, *map(_say_call, message.get("tool_calls") or ())]
    elif message.get("name"):
        role = f"{role} {message['name']}"
    texts = [show_content(each) for each in parts if each]
    return Turn(role, "\n".join(texts), message.get("role") == "assistant")


def _say_call(call: Mapping[str, Any]) -> str:
    if not isinstance(function := call.get("function"), Mapping):
        return json.dumps(call, ensure_ascii=False)
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"→ {function.get('name')} {arguments}"


_ENDS = {
    "answer": "answered",
    "done": "done",
    "turns": "out of turns",
    "tokens": "out of tokens",
    "cut_off": "last turn cut off",
    "malformed": "ended by a malformed call",
    "failed": "ended by a failed call",
}


def say_episode(record: Mapping[str, Any]) -> str:
    """Return how an episode went: why it ended, its turns, its calls and how many of these failed."""
    calls = record["calls"]
    failures = Counter(call[1] for call in calls if call[1])
    parts = [_ENDS.get(str(record.get("end")), str(record.get("end")))]
    parts.append(count_noun(record.get("turns", 0), "turn"))
    # Each answer to a text environment is a call of `step`, which the turns tell already.
    if not calls or any(call[0] != STEP for call in calls):
        parts.append(count_noun(len(calls), "call"))
    parts += [f"{count} {failure}" for failure, count in failures.items()]
    if record.get("shortened"):
        parts.append(f"{record['shortened']} shortened")
    return ", ".join(parts)


def short_path(path: Path) -> str:
    """Return a path as one would type it here: relative if it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
