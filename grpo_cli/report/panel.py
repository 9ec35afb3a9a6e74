"""The panel of a run in progress, line by line, in the room that a terminal has at that moment."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.text import Text

from grpo_cli.analysis.diagnosis.rule import Symptom
from grpo_cli.report.follower import Follower
from grpo_cli.report.summary import last_turn
from grpo_cli.report.wording import (
    LEVEL_MARKS,
    clean_text,
    list_turns,
    phases_of,
    say_episode,
    seconds_of,
    short_path,
    telling_rewards,
)
from grpo_cli.runs.metrics import Step, read_rewards
from grpo_cli.units import count_noun, format_duration

_FRAME = 4
"""Columns of the frame and the space beside it; its lines are two."""
_LABEL, _VALUE = 9, 8
_LEAST_BARS = 6
"""Of a sparkline that shares its line."""
_LONGEST_BAR = 36
_ROOMY = 32
"""In a terminal with this many lines, every reward has a line of its own."""
_SYMPTOMS = 2
"""Shown at a time."""
_LONGEST_TEXT = 4_000
"""Characters of a sample; a terminal has room for no more."""
_LAST_LINES = 2
"""Of an answer that does not fit: they hold what is scored most often."""
_PROMPT_SHARE = 3
"""Of this number of lines, a prompt may have one."""
_BARS = "▁▂▃▄▅▆▇█"
Cell = tuple[str, str, str]
"""Label, metric and format."""
_REWARD: tuple[Cell, ...] = (
    ("reward", "reward", "{:.3f}"),
    ("std", "reward_std", "{:.3f}"),
    ("zero-signal", "frac_reward_zero_std", "{:.0%}"),
    ("left", "dynamic_sampling/frac_reward_zero_std", "{:.0%}"),
)
_ROWS: tuple[tuple[Cell, ...], ...] = (
    (
        ("tokens", "completions/mean_length", "{:.1f}"),
        ("clipped", "completions/clipped_ratio", "{:.0%}"),
    ),
    (
        ("turns", "episode/turns", "{:.1f}"),
        ("calls", "tools/call_frequency", "{:.1f}"),
        ("failed", "tools/failure_frequency", "{:.0%}"),
    ),
    (("entropy", "entropy", "{:.2f}"), ("kl", "kl", "{:.4f}"), ("grad", "grad_norm", "{:.3g}")),
)
"""Rows of metrics: the course of the first is drawn."""


class PanelView:
    """The panel, drawn again each time as large as the terminal allows."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.notice = ""
        """A line at the end, for as long as it is not empty."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the panel, with lines that fit."""
        width, height = options.max_width - _FRAME, console.size.height - 3
        folder, status = self._follower.run.folder.path, self._follower.run.status
        lines = self._draw(console, max(width, 10), max(height, 1))
        body = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
        body.no_wrap, body.overflow = True, "ellipsis"
        title = Text.assemble((f"{folder.parent.name}", "bold"), f" · {clean_text(status.phase)}")
        yield Panel(body, title=title, subtitle=Text(short_path(folder)), padding=(0, 1))

    def _draw(self, console: Console, width: int, height: int) -> list[Text]:
        follower, run = self._follower, self._follower.run
        lines = [_draw_progress(follower, width)]
        if steps := run.metrics.steps:
            lines += _draw_metrics(steps, width, roomy=console.size.height >= _ROOMY)
        last = [_draw_symptom(each) for each in follower.fresh_symptoms()[:_SYMPTOMS]]
        if self.notice:
            last.append(Text(self.notice, style="yellow"))
        room = height - len(lines) - len(last) - 1
        group = run.newest_group()
        if group and room >= 2:
            lines += [Text(), *_draw_sample(group, run.weights, console, width, room)]
        # What is wrong comes before what is merely going on.
        return [*lines[: max(height - len(last), 1)], *last][:height]


def _draw_progress(follower: Follower, width: int) -> Text:
    status, left_s = follower.run.status, follower.seconds_left()
    elapsed = f"elapsed {format_duration(max(time.time() - status.started_at, 0))}"
    if status.phase == "training" and status.total_steps:
        share = status.step / status.total_steps
        words = [f"step {status.progress}", elapsed]
    elif status.planned:
        share, left_s = (status.done or 0) / status.planned, follower.phase_left()
        words = [clean_text(status.phase_progress), elapsed]
    else:
        doing = f"{status.phase} {status.detail or '…'}"
        return Text.assemble((clean_text(doing), "cyan"), f"   {elapsed}")
    if left_s is not None:
        words.append(f"left {format_duration(left_s)}")
    line = "  ".join(words)
    bar = min(width - len(line) - 2, _LONGEST_BAR)
    return Text.assemble(draw_bar(share, bar), "  ", line) if bar >= _LEAST_BARS else Text(line)


def _draw_metrics(steps: Sequence[Step], width: int, *, roomy: bool) -> list[Text]:
    rows = [_draw_row(steps, row, width) for row in _ROWS]
    lines = [_draw_row(steps, _REWARD, width), *_draw_rewards(steps, width, roomy=roomy), *rows]
    return [line for line in [*lines, *_draw_pace(steps[-1])] if line]


def _draw_symptom(symptom: Symptom) -> Text:
    mark, style = LEVEL_MARKS[symptom.level]
    line = f"{mark} {symptom.rule}: {symptom.seen}. Fix: {symptom.fix}"
    return Text(clean_text(line), style=style)


def _draw_row(steps: Sequence[Step], row: Sequence[Cell], width: int) -> Text:
    """Draw a number, its course in the room that is left, and what belongs to it; empty if none was logged."""
    known = [
        (label, form, values[-1], values)
        for label, name, form in row
        if (values := [each.get(name) for each in steps])[-1] is not None
    ]
    if not known:
        return Text()
    label, form, now, values = known[0]
    end = "  ".join(f"{label} {form.format(value)}" for label, form, value, _ in known[1:])
    line = Text.assemble(
        (f"{label:<{_LABEL - 1}} ", "dim"), (f"{form.format(now):<{_VALUE}}", "bold")
    )
    room = width - len(line) - (len(end) + 2 if end else 0)
    logged = [value for value in values if value is not None]
    span = f" {min(logged):.3g}…{max(logged):.3g}"
    if room >= 2 * _LEAST_BARS + len(span):
        line.append(f"{draw_sparkline(values, room - len(span)) + span:<{room}}", style="cyan")
    return line.append(f"  {end}" if end else "")


def _draw_rewards(steps: Sequence[Step], width: int, *, roomy: bool) -> list[Text]:
    """Draw the mean of each reward function: a line each if there is room, else together."""
    rewards = telling_rewards(steps[-1])
    if rewards and not roomy:
        cells = "  ".join(f"{name} {value:.3f}" for name, value in rewards.items())
        return [Text(f"{'rewards':<{_LABEL}}{cells}", style="dim")]
    longest = max(map(len, rewards), default=0)
    rows = []
    for name, value in rewards.items():
        line = Text.assemble((f"  {name:<{longest}} ", "dim"), f"{value:<{_VALUE - 1}.3f} ")
        values = [read_rewards(each).get(name) for each in steps]
        rows.append(line.append(draw_sparkline(values, width - len(line)), style="cyan"))
    return rows


def _draw_pace(step: Step) -> list[Text]:
    """Draw the seconds of a step, tokens a second, and what the seconds are spent on."""
    facts = (
        ("{:.2f} s/step", seconds_of(step)),
        ("{:.0f} tokens/s", step.get("tokens_per_s")),
        ("learning rate {:.2g}", step.get("learning_rate")),
    )
    phases = phases_of(step).items()
    spent = [f"{name} {value:.{1 if value >= 1 else 2}f} s" for name, value in phases if value > 0]
    cells = [form.format(value) for form, value in facts if value is not None]
    return [Text("  ".join(cells)), Text("  ".join(spent), style="dim")]


def draw_sparkline(values: Sequence[float | None], width: int = 24) -> str:
    """Draw the whole course of values as a row of bars, each a mean if there are many; empty for one value."""
    known = [value for value in values if value is not None]
    if width < 2 or len(known) < 2:
        return ""
    if len(known) > width:
        edges = [round(place * len(known) / width) for place in range(width + 1)]
        known = [fmean(known[start:end]) for start, end in pairwise(edges)]
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in known)


def draw_bar(share: float, width: int) -> Text:
    """Draw how much of something is done."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * done, "green"), ("─" * (width - done), "dim"))


def _draw_sample(
    group: Mapping[str, Any], weights: Mapping[str, float], console: Console, width: int, room: int
) -> list[Text]:
    """Draw the first completion of a group in at least two lines."""
    head = [Text(_say_place(group), style="dim"), Text(_say_scores(group, weights))]
    room -= len(head)
    if room < 2:
        return head
    prompt = _wrap(f"» {last_turn(group['prompt'])}", console, width)
    answer = _draw_answer(group, console, width)
    shown = min(len(prompt), max(room // _PROMPT_SHARE, room - len(answer), 1))
    # A question stands at the end of a long prompt.
    prompt = prompt if len(prompt) <= shown else [Text("» …"), *prompt[len(prompt) - shown + 1 :]]
    lines = [Text(line.plain, style="cyan") for line in prompt[:shown]]
    return [*head, *lines, *_shorten(answer, room - shown)]


def _draw_answer(group: Mapping[str, Any], console: Console, width: int) -> list[Text]:
    """Draw what the model wrote; of an episode also the messages it got, dimmed."""
    if not group.get("messages"):
        return _wrap(f"« {group['completions'][0]}", console, width)
    lines = []
    for turn in list_turns(group["messages"][0]):
        wrapped = _wrap(f"{'«' if turn.is_own else '»'} {turn.text}", console, width)
        lines += wrapped if turn.is_own else [Text(line.plain, "dim") for line in wrapped]
    return lines


def _say_place(group: Mapping[str, Any]) -> str:
    parts = ["newest sample", f"step {group['step']}"]
    if group.get("split") == "eval":
        parts.append("held out")
    parts.append(count_noun(group["tokens"][0], "token"))
    if group.get("episodes"):
        parts.append(say_episode(group["episodes"][0]))
    elif group["clipped"][0]:
        parts.append("cut off")
    return " · ".join(parts)


def _say_scores(group: Mapping[str, Any], weights: Mapping[str, float]) -> str:
    """Return the scores of the first completion; before several, their weighted sum."""
    scores = {name: values[0] for name, values in group["rewards"].items()}
    cells = [f"{name} {'–' if each is None else f'{each:.2f}'}" for name, each in scores.items()]
    known = {name: value for name, value in scores.items() if value is not None}
    if len(scores) > 1 and known and known.keys() <= weights.keys():
        total = sum(weights[name] * value for name, value in known.items())
        cells.insert(0, f"total {total:.2f}")
    return "  ".join(cells)


def _wrap(text: str, console: Console, width: int) -> list[Text]:
    """Break text into lines that fit; its own lines stay, empty ones go."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[: _LONGEST_TEXT // 2]}\n…\n{text[-_LONGEST_TEXT // 2 :]}"
    lines = [line for each in text.splitlines() if (line := clean_text(each))]
    return [part for line in lines for part in Text(line).wrap(console, max(width, 2))]


def _shorten(lines: Sequence[Text], room: int) -> list[Text]:
    """Keep the beginning and the end of lines of which there are too many."""
    if len(lines) <= room:
        return list(lines)
    if room <= _LAST_LINES + 1:
        return [*lines[: room - 1], Text("…")]
    return [*lines[: room - _LAST_LINES - 1], Text("…"), *lines[-_LAST_LINES:]]
