"""The panel of a run in progress, line by line, in the room that a terminal has at that moment."""

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.text import Text

from grpo_cli.analysis.diagnosis.rule import Symptom
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
from grpo_cli.runs.metrics import PHASES, Step, read_rewards
from grpo_cli.units import format_duration

if TYPE_CHECKING:
    from grpo_cli.report.live import Follower

_FRAME = 4
"""Columns of the frame and the space beside it; its lines are two."""
_LABEL, _VALUE = 9, 8
_LEAST_BARS = 6
"""Of a sparkline that shares its line."""
_STABILITY = (
    ("entropy", "entropy", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("grad", "grad_norm", "{:.3g}"),
)
_LEAST_WITH_RANGE = 12
"""Bars beside which there is room for the range."""
_LONGEST_BAR = 36
_ROOMY = 32
"""Lines of a terminal from which on every reward has a line of its own."""
_SYMPTOMS = 2
"""Shown at a time."""
_LONGEST_TEXT = 4_000
"""Characters of a sample; a terminal has room for no more."""
_LAST_LINES = 2
"""Of an answer that does not fit: they hold what is scored most often."""
_RESULT_LINES = 3
"""Of what the model was told in an episode."""
_PROMPT_SHARE = 3
"""A prompt may have one line in so many."""
_BARS = "▁▂▃▄▅▆▇█"
Mark = tuple[str, str]
"""A character and its colour."""
PART_MARKS: tuple[Mark, ...] = (
    ("█", "blue"),
    ("▚", "cyan"),
    ("▓", "magenta"),
    ("▒", "yellow"),
    ("░", "green"),
)
"""Of the parts of a bar; distinct without colour too."""


class PanelView:
    """The panel; draws itself anew each time, as large as the terminal allows."""

    def __init__(self, follower: "Follower") -> None:
        self._follower = follower
        self.notice = ""
        """A line at the end, for as long as it is not empty."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the panel, with lines that fit."""
        width, height = options.max_width - _FRAME, console.size.height - 3
        folder, status = self._follower.run.folder.path, self._follower.status
        lines = self._draw(console, max(width, 10), max(height, 1))
        body = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
        body.no_wrap, body.overflow = True, "ellipsis"
        title = Text.assemble((f"{folder.parent.name}", "bold"), f" · {clean_text(status.phase)}")
        yield Panel(body, title=title, subtitle=Text(short_path(folder)), padding=(0, 1))

    def _draw(self, console: Console, width: int, height: int) -> list[Text]:
        follower, run = self._follower, self._follower.run
        lines = [_draw_progress(follower, width)]
        if run.steps:
            lines += _draw_metrics(run.steps, width, roomy=console.size.height >= _ROOMY)
        last = [_draw_symptom(each) for each in follower.fresh_symptoms()[:_SYMPTOMS]]
        if self.notice:
            last.append(Text(self.notice, style="yellow"))
        room = height - len(lines) - len(last) - 1
        group = run.newest_group()
        if group and room >= 2:
            lines += [Text(), *_draw_sample(group, run.weights, console, width, room)]
        # What is wrong comes before what is merely going on.
        return [*lines[: max(height - len(last), 1)], *last][:height]


def _draw_progress(follower: "Follower", width: int) -> Text:
    status, left_s = follower.status, follower.seconds_left()
    elapsed = f"elapsed {format_duration(max(time.time() - status.started_at, 0))}"
    progress = follower.phase_progress()
    if status.phase == "training" and status.total_steps:
        share = status.step / status.total_steps
        words = [f"step {status.step}/{status.total_steps}", elapsed]
    elif progress is not None:
        share, left_s = progress[0] / progress[1], follower.phase_left()
        words = [clean_text(status.detail), elapsed]
    else:
        doing = f"{status.phase} {status.detail or '…'}"
        return Text.assemble((clean_text(doing), "cyan"), f"   {elapsed}")
    if left_s is not None:
        words.append(f"left {format_duration(left_s)}")
    line = "  ".join(words)
    bar = min(width - len(line) - 2, _LONGEST_BAR)
    return Text.assemble(draw_bar(share, bar), "  ", line) if bar >= _LEAST_BARS else Text(line)


def _draw_metrics(steps: Sequence[Step], width: int, *, roomy: bool) -> list[Text]:
    last = steps[-1]
    signal = [
        ("std", last.get("reward_std"), "{:.3f}"),
        ("zero-signal", last.get("frac_reward_zero_std"), "{:.0%}"),
        ("left", last.get("dynamic_sampling/frac_reward_zero_std"), "{:.0%}"),
    ]
    clipped = [("clipped", last.get("completions/clipped_ratio"), "{:.0%}")]
    rewards, lengths = (
        [each.get(name) for each in steps] for name in ("reward", "completions/mean_length")
    )
    return [
        *_draw_row("reward", rewards, "{:.3f}", signal, width),
        *_draw_rewards(steps, width, roomy=roomy),
        *_draw_row("tokens", lengths, "{:.1f}", clipped, width),
        *_draw_turns(steps, width),
        *_draw_stability(steps, width),
        *_draw_pace(last, width),
    ]


def _draw_turns(steps: Sequence[Step], width: int) -> list[Text]:
    """Draw the turns of episodes; nothing of a run without them."""
    last = steps[-1]
    calls = [
        ("calls", last.get("tools/call_frequency"), "{:.1f}"),
        ("failed", last.get("tools/failure_frequency"), "{:.0%}"),
    ]
    turns = [each.get("episode/turns") for each in steps]
    return _draw_row("turns", turns, "{:.1f}", calls, width)


def _draw_symptom(symptom: Symptom) -> Text:
    mark, style = LEVEL_MARKS[symptom.level]
    line = f"{mark} {symptom.rule}: {symptom.seen}. Fix: {symptom.fix}"
    return Text(clean_text(line), style=style)


def _draw_row(
    name: str,
    values: Sequence[float | None],
    form: str,
    more: Sequence[tuple[str, float | None, str]],
    width: int,
) -> list[Text]:
    """Draw a number, its course in the room that is left, and what belongs to it."""
    if all(value is None for value in values):
        return []
    now = "–" if values[-1] is None else form.format(values[-1])
    cells = [f"{label} {shape.format(value)}" for label, value, shape in more if value is not None]
    end = "  ".join(cells)
    head = f"{name:<{_LABEL - 1}} "
    room = width - len(head) - max(len(now) + 1, _VALUE) - (len(end) + 2 if end else 0)
    line = Text.assemble((head, "dim"), (f"{now:<{_VALUE - 1}} ", "bold"))
    if room >= _LEAST_BARS:
        line.append(f"{draw_course(values, room):<{room}}", style="cyan")
        line.append("  " if end else "")
    return [line.append(end)]


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
        rows.append(line.append(draw_course(values, width - len(line)), style="cyan"))
    return rows


def _draw_stability(steps: Sequence[Step], width: int) -> list[Text]:
    """Draw entropy, KL and gradient norm, those that were logged, side by side."""
    cells = [
        (f"{label} ", form.format(steps[-1][name]), [each.get(name) for each in steps])
        for label, name, form in _STABILITY
        if steps[-1].get(name) is not None
    ]
    if not cells:
        return []
    room = (width - sum(len(label) + len(now) + 4 for label, now, _ in cells)) // len(cells)
    line = Text()
    for label, now, values in cells:
        line.append("   " if line else "").append(label, style="dim").append(now)
        if room >= _LEAST_BARS:
            line.append(f" {draw_sparkline(values, min(room, _LONGEST_BAR))}", style="cyan")
    return [line]


def _draw_pace(step: Step, width: int) -> list[Text]:
    """Draw the seconds of a step, what they are spent on, and tokens a second."""
    facts = (
        ("{:.2f} s/step", seconds_of(step)),
        ("{:.0f} tokens/s", step.get("tokens_per_s")),
        ("learning rate {:.2g}", step.get("learning_rate")),
    )
    cells = [form.format(value) for form, value in facts if value is not None]
    lines = [Text("  ".join(cells))] if cells else []
    phases, marks = phases_of(step), dict(zip(PHASES, PART_MARKS, strict=True))
    spent = [(name, value, marks[name]) for name, value in phases.items() if value > 0]
    if not spent:
        return lines
    parts = [(value, mark) for _, value, mark in spent]
    legend = Text("  ").join(
        Text.assemble(
            (f"{mark} ", style), (f"{name} ", "dim"), f"{value:.{1 if value >= 1 else 2}f} s"
        )
        for name, value, (mark, style) in spent
    )
    room = min(width - len(legend) - 2, _LONGEST_BAR)
    if room >= _LEAST_BARS:
        return [*lines, Text.assemble(draw_parts(parts, room), "  ", legend)]
    return [*lines, draw_parts(parts, width), legend]


def draw_sparkline(values: Sequence[float | None], width: int = 24) -> str:
    """Draw the whole course of values as a row of bars, each a mean if there are many; empty for one value."""
    known = _thin_out(values, width)
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in known)


def draw_course(values: Sequence[float | None], width: int) -> str:
    """Draw a sparkline, and what its lowest and its highest bar stand for: it may rise over very little."""
    known = _thin_out(values, width)
    ends = f"{min(known):.3g}…{max(known):.3g}" if len(set(known)) > 1 else ""
    room = width - len(ends) - 1
    if not ends or room < _LEAST_WITH_RANGE:
        return draw_sparkline(values, width)
    return f"{draw_sparkline(values, room)} {ends}"


def _thin_out(values: Sequence[float | None], width: int) -> list[float]:
    known = [value for value in values if value is not None]
    if width < 2:
        return []
    if len(known) <= width:
        return known
    edges = [round(place * len(known) / width) for place in range(width + 1)]
    return [fmean(known[edges[at] : edges[at + 1]]) for at in range(width)]


def draw_bar(share: float, width: int) -> Text:
    """Draw how much of something is done."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * done, "green"), ("─" * (width - done), "dim"))


def draw_parts(parts: Sequence[tuple[float, Mark]], width: int) -> Text:
    """Draw a bar whose parts are as long as their values; a part that is there at all is seen."""
    total = sum(value for value, _ in parts)
    if total <= 0 or width < len(parts):
        return Text()
    sizes = [max(round(value / total * width), 1 if value > 0 else 0) for value, _ in parts]
    # The longest part makes up for rounding.
    sizes[sizes.index(max(sizes))] += width - sum(sizes)
    marks = zip(sizes, (mark for _, mark in parts), strict=True)
    return Text.assemble(*((mark * max(size, 0), style) for size, (mark, style) in marks))


def _draw_sample(
    group: Mapping[str, Any], weights: Mapping[str, float], console: Console, width: int, room: int
) -> list[Text]:
    """Draw the first completion of a group in at least two lines, and others of it if there is room."""
    head = [Text(_say_place(group), style="dim"), Text(_say_scores(group, weights, 0))]
    room -= len(head)
    if room < 2:
        return head
    prompt = _wrap(f"» {last_turn(group['prompt'])}", console, width)
    answer = _draw_answer(group, 0, console, width)
    shown = min(len(prompt), max(room // _PROMPT_SHARE, room - len(answer), 1))
    # A question stands at the end of a long prompt.
    prompt = prompt if len(prompt) <= shown else [Text("» …"), *prompt[len(prompt) - shown + 1 :]]
    lines = [Text(line.plain, style="cyan") for line in prompt[:shown]]
    lines += _shorten(answer, room - shown)
    room -= len(lines)
    for place in range(1, len(group["completions"])):
        other = [Text(), Text(_say_scores(group, weights, place))]
        other += _draw_answer(group, place, console, width)
        if len(other) > room:
            break
        lines += other
        room -= len(other)
    return [*head, *lines]


def _draw_answer(group: Mapping[str, Any], place: int, console: Console, width: int) -> list[Text]:
    """Draw what the model wrote; of an episode also what it was told, dimmed."""
    if not group.get("messages"):
        return _wrap(f"« {group['completions'][place]}", console, width)
    lines = []
    for turn in list_turns(group["messages"][place]):
        wrapped = _wrap(f"{'«' if turn.is_own else '»'} {turn.text}", console, width)
        if not turn.is_own:
            wrapped = [Text(line.plain, "dim") for line in _shorten(wrapped, _RESULT_LINES)]
        lines += wrapped
    return lines


def _say_place(group: Mapping[str, Any]) -> str:
    parts = ["newest sample", f"step {group['step']}"]
    if group.get("split") == "eval":
        parts.append("held out")
    parts.append(f"{group['tokens'][0]} tokens")
    if group.get("episodes"):
        parts.append(say_episode(group["episodes"][0]))
    elif group["clipped"][0]:
        parts.append("cut off")
    return " · ".join(parts)


def _say_scores(group: Mapping[str, Any], weights: Mapping[str, float], place: int) -> str:
    """Return the scores of a completion; before several, their weighted sum."""
    scores = {name: values[place] for name, values in group["rewards"].items()}
    cells = [
        f"{name} –" if value is None else f"{name} {value:.2f}" for name, value in scores.items()
    ]
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
