"""What the panel of a run shows, line by line, in the room that a terminal has at that moment.

Owns the layout. What is shown comes from a `Follower`; the newest sample is drawn by `sample.py`.
"""

import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.text import Text

from grpo_cli.analysis.diagnosis.symptom import Symptom
from grpo_cli.report.live.drawing import (
    PART_MARKS,
    Mark,
    draw_bar,
    draw_course,
    draw_parts,
    draw_sparkline,
)
from grpo_cli.report.live.following import Follower
from grpo_cli.report.live.sample import draw_sample
from grpo_cli.report.live.terminal import clean_text
from grpo_cli.report.live.wording import LEVEL_MARKS, seconds_of, short_path, telling_rewards
from grpo_cli.runs.series import PHASES, StepRecord
from grpo_cli.units import format_duration

_FRAME = 4
"""Columns of the frame and the space beside it; its lines are two."""
_LABEL, _VALUE = 9, 8
_FEWEST_BARS = 6
_MOST_BARS = 40
"""Of the small sparklines."""
_ROOMY = 32
"""Lines of a terminal from which on every reward has a line of its own."""
_LONGEST_BAR = 36
_SYMPTOMS = 2
"""Shown at a time."""


class PanelView:
    """The panel; draws itself anew each time, as large as the terminal allows."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.notice = ""
        """A line at the end, for as long as it is not empty."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines that fit."""
        width, height = options.max_width - _FRAME, console.size.height - 3
        folder, status = self._follower.folder.path, self._follower.status
        lines = self._draw(console, max(width, 10), max(height, 1))
        body = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
        body.no_wrap, body.overflow = True, "ellipsis"
        title = Text.assemble((f"{folder.parent.name}", "bold"), f" · {clean_text(status.phase)}")
        yield Panel(body, title=title, subtitle=Text(short_path(folder)), padding=(0, 1))

    def _draw(self, console: Console, width: int, height: int) -> list[Text]:
        follower, roomy = self._follower, console.size.height >= _ROOMY
        lines = [draw_progress(follower, width)]
        if follower.steps:
            lines += draw_metrics(follower.steps, width, roomy=roomy)
        last = [draw_symptom(each) for each in follower.fresh_symptoms()[:_SYMPTOMS]]
        if self.notice:
            last.append(Text(self.notice, style="yellow"))
        room = height - len(lines) - len(last) - 1
        if follower.newest_sample and room >= 2:
            sample = draw_sample(follower.newest_sample, follower.weights, console, width, room)
            lines += [Text(), *sample]
        # What is wrong comes before what is merely going on.
        return [*lines[: max(height - len(last), 1)], *last][:height]


def draw_progress(follower: Follower, width: int) -> Text:
    """How far the run is, and how long it takes on."""
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
        told = f"{status.phase} {status.detail or '…'}"
        return Text.assemble((clean_text(told), "cyan"), f"   {elapsed}")
    if left_s is not None:
        words.append(f"left {format_duration(left_s)}")
    said = "  ".join(words)
    bar = min(width - len(said) - 2, _LONGEST_BAR)
    return Text.assemble(draw_bar(share, bar), "  ", said) if bar >= _FEWEST_BARS else Text(said)


def draw_metrics(steps: Sequence[StepRecord], width: int, *, roomy: bool) -> list[Text]:
    """The newest step's numbers with the course of the important ones.

    Args:
        steps: All so far, one at least.
        width: Columns.
        roomy: Whether each reward may have a line of its own.
    """
    last = steps[-1]
    reward = [
        ("std", last.reward_std, "{:.3f}"),
        ("zero-signal", last.zero_signal, "{:.0%}"),
        ("left", last.zero_signal_left, "{:.0%}"),
    ]
    length = [("clipped", last.clipped, "{:.0%}")]
    return [
        *_draw_row("reward", [each.reward for each in steps], "{:.3f}", reward, width),
        *_draw_rewards(steps, width, roomy=roomy),
        *_draw_row("tokens", [each.completion_length for each in steps], "{:.1f}", length, width),
        *_draw_small(steps, width),
        *_draw_pace(last, width),
    ]


def draw_symptom(symptom: Symptom) -> Text:
    """What is wrong, in one line."""
    mark, style = LEVEL_MARKS[symptom.level]
    told = f"{mark} {symptom.rule}: {symptom.seen}. Fix: {symptom.fix}"
    return Text(clean_text(told), style=style)


def _draw_row(
    name: str,
    values: Sequence[float | None],
    form: str,
    more: Sequence[tuple[str, float | None, str]],
    width: int,
) -> list[Text]:
    """A number, its course in the room that is left, and what belongs to it."""
    if all(value is None for value in values):
        return []
    now = "–" if values[-1] is None else form.format(values[-1])
    cells = [f"{label} {shape.format(value)}" for label, value, shape in more if value is not None]
    said = "  ".join(cells)
    head = f"{name:<{_LABEL - 1}} "
    room = width - len(head) - max(len(now) + 1, _VALUE) - (len(said) + 2 if said else 0)
    line = Text.assemble((head, "dim"), (f"{now:<{_VALUE - 1}} ", "bold"))
    if room >= _FEWEST_BARS:
        line.append(f"{draw_course(values, room):<{room}}", style="cyan")
        line.append("  " if said else "")
    return [line.append(said)]


def _draw_rewards(steps: Sequence[StepRecord], width: int, *, roomy: bool) -> list[Text]:
    """The mean of each reward function: a line each where there is room, together otherwise."""
    told = telling_rewards(steps[-1])
    if not roomy:
        cells = [f"{name} {value:.3f}" for name, value in told.items()]
        return _flow("rewards", cells, width, lines=2)
    longest = max((len(name) for name in told), default=0)
    rows = []
    for name, value in told.items():
        head = f"  {name:<{longest}} "
        line = Text.assemble((head, "dim"), f"{value:<{_VALUE - 1}.3f} ")
        course = draw_course([each.rewards.get(name) for each in steps], width - len(line))
        rows.append(line.append(course, style="cyan"))
    return rows


def _draw_small(steps: Sequence[StepRecord], width: int) -> list[Text]:
    """Entropy, KL and gradient norm, those that were logged, side by side."""
    last = steps[-1]
    told = [
        ("entropy", "entropy", "{:.2f}"),
        ("kl", "kl", "{:.4f}"),
        ("grad_norm", "grad", "{:.3g}"),
    ]
    cells = [
        (f"{label} {form.format(value)}", [getattr(each, name) for each in steps])
        for name, label, form in told
        if (value := getattr(last, name)) is not None
    ]
    if not cells:
        return []
    room = (width - sum(len(said) + 4 for said, _ in cells)) // len(cells)
    line = Text()
    for said, values in cells:
        label, _, number = said.partition(" ")
        line.append("   " if line else "").append(f"{label} ", style="dim").append(number)
        if room >= _FEWEST_BARS:
            line.append(f" {draw_sparkline(values, min(room, _MOST_BARS))}", style="cyan")
    return [line]


def _draw_pace(step: StepRecord, width: int) -> list[Text]:
    """Seconds of a step, what they are spent on, and tokens a second."""
    cells = []
    seconds = seconds_of(step)
    if seconds is not None:
        cells.append(f"{seconds:.2f} s/step")
    if step.tokens_per_s is not None:
        cells.append(f"{step.tokens_per_s:.0f} tokens/s")
    if step.learning_rate is not None:
        cells.append(f"learning rate {step.learning_rate:.2g}")
    lines = [Text("  ".join(cells))] if cells else []
    spent = [
        (name, value, mark)
        for name, mark in zip(PHASES, PART_MARKS, strict=True)
        if (value := step.phases_s.get(name, 0)) > 0
    ]
    if not spent:
        return lines
    parts = [(value, mark) for _, value, mark in spent]
    legend = _draw_legend(spent, width)
    room = min(width - len(legend) - 2, _LONGEST_BAR)
    if room >= _FEWEST_BARS:
        return [*lines, Text.assemble(draw_parts(parts, room), "  ", legend)]
    return [*lines, draw_parts(parts, width), legend]


def _draw_legend(spent: Sequence[tuple[str, float, Mark]], width: int) -> Text:
    """What the parts of a bar stand for; where there is no room for all, the smallest are left out."""
    cells = [
        (value, Text.assemble((f"{mark} ", style), (f"{name} ", "dim"), _say_seconds(value)))
        for name, value, (mark, style) in spent
    ]
    while len(cells) > 1 and sum(len(cell) + 2 for _, cell in cells) - 2 > width:
        cells.remove(min(cells, key=lambda each: each[0]))
    return Text("  ").join(cell for _, cell in cells)


def _say_seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def _flow(label: str, cells: Sequence[str], width: int, *, lines: int) -> list[Text]:
    """Cells one behind the other on as few lines as they need; a mark for those that do not fit."""
    rows: list[str] = []
    for cell in cells:
        if rows and len(rows[-1]) + 2 + len(cell) <= width:
            rows[-1] += f"  {cell}"
        elif len(rows) < lines:
            rows.append(f"{'' if rows else label:<{_LABEL}}{cell}")
        else:
            rows[-1] = f"{rows[-1][: width - 2]} …"
            break
    return [Text(row, style="dim") for row in rows]
