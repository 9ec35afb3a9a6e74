"""What a run is doing right now, followed from its folder alone.

Owns the live view in a terminal and the plain lines elsewhere. Draws what `status.json`,
`metrics.jsonl` and `completions/` say; knows nothing of the processes behind them.
"""

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_cli.report.terminal import without_control_echo
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import RecordTail
from grpo_cli.runs.series import StepRecord, read_step
from grpo_cli.runs.status import Status, StatusFile
from grpo_cli.units import format_duration

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 200


class ProgressView(Protocol):
    """Shows a run while it goes on."""

    def refresh(self) -> None:
        """Looks at the folder and shows what is new."""

    def stopping(self) -> None:
        """Says that a stop has been asked for."""

    def tell(self, text: str) -> None:
        """Says what a person should know now."""

    def close(self) -> None:
        """Ends the view."""


class _Follower:
    """Reads what is new in a run folder and keeps what a view needs.

    Args:
        folder: The run's.
        from_now: Whether what is there already is not new: an earlier attempt has shown it.
    """

    def __init__(self, folder: RunFolder, *, from_now: bool = False) -> None:
        self.folder = folder
        self.steps: deque[StepRecord] = deque(maxlen=_HISTORY)
        self.status = Status()
        self._tail = RecordTail(folder.metrics)
        if from_now:
            self.read()

    def read(self) -> list[dict[str, Any]]:
        """New records; the status and the steps are kept."""
        # The status first: a record that came before it is then never missed.
        self.status = StatusFile(self.folder.status).read()
        fresh = list(self._tail.read_new())
        self.steps.extend(step for record in fresh if (step := read_step(record)))
        return fresh

    def seconds_left(self) -> float | None:
        """Time left, from the pace of the last 20 records."""
        recent = [step.step_time_s for step in list(self.steps)[-20:] if step.step_time_s]
        total = self.status.total_steps
        if not recent or total is None or not self.steps:
            return None
        return sum(recent) / len(recent) * max(total - self.steps[-1].step, 0)


class SilentView:
    """Shows nothing."""

    def refresh(self) -> None:
        """Nothing to show."""

    def stopping(self) -> None:
        """Nothing to say."""

    def tell(self, text: str) -> None:
        """Nothing to say."""

    def close(self) -> None:
        """Nothing to undo."""


class PlainView:
    """One line for each phase and each logged step; for pipes, files and CI."""

    def __init__(self, folder: RunFolder, console: Console, *, from_now: bool = False) -> None:
        self._follower = _Follower(folder, from_now=from_now)
        self._console = console
        self._phase = ""

    def refresh(self) -> None:
        """Prints the lines of what came since the last call."""
        for record in self._follower.read():
            step = read_step(record)
            left_s = self._follower.seconds_left()
            line = format_step(step, left_s) if step else _format_event(record)
            if line:
                self._say(line)
        status = self._follower.status
        if status.phase != self._phase and status.state == "running":
            self._phase = status.phase
            self._say(f"· {status.phase}")

    def stopping(self) -> None:
        """Says that a stop has been asked for."""
        self._say("· stopping after this step; once more ends it now")

    def tell(self, text: str) -> None:
        """Prints a line."""
        self._say(f"! {text}")

    def close(self) -> None:
        """Nothing to undo."""

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A panel that redraws itself in a terminal."""

    def __init__(self, folder: RunFolder, console: Console, *, from_now: bool = False) -> None:
        self._follower = _Follower(folder, from_now=from_now)
        self._sample: dict[str, Any] | None = None
        self._samples = RecordTail(folder.completions / "rank_0.jsonl")
        self._notice = ""
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(without_control_echo())
        self._opened.enter_context(self._live)

    def refresh(self) -> None:
        """Redraws the panel; the clock moves even when nothing is new."""
        for record in self._follower.read():
            line = _format_event(record)
            if line:
                # Above the panel, where it stays when the panel goes.
                self._live.console.print(line, markup=False, highlight=False)
        for sample in self._samples.read_new():
            self._sample = sample
        self._live.update(self._draw(), refresh=True)

    def stopping(self) -> None:
        """Says that a stop has been asked for."""
        self._notice = "stopping after this step; Ctrl-C once more ends it now"

    def tell(self, text: str) -> None:
        """Prints a line above the panel, where it stays."""
        self._live.console.print(f"! {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Takes the panel away."""
        self._opened.close()

    def _draw(self) -> RenderableType:
        follower, status = self._follower, self._follower.status
        parts: list[RenderableType] = [_draw_bar(status, follower.seconds_left())]
        if follower.steps:
            parts.append(_draw_metrics(follower))
        if self._sample:
            parts.append(_draw_sample(self._sample))
        if self._notice:
            parts.append(Text(self._notice, style="yellow"))
        folder = follower.folder.path
        return Panel(
            Group(*parts),
            title=f"[bold]{folder.parent.name}[/] · {status.phase}",
            subtitle=_short_path(folder),
            padding=(0, 1),
        )


def format_step(step: StepRecord, left_s: float | None) -> str:
    """A training step in one line."""
    total = f"/{step.total_steps}" if step.total_steps else ""
    parts = [f"step {step.step}{total}", *(f"{name} {value}" for name, value in _facts(step))]
    if left_s is not None:
        parts.append(f"left {format_duration(left_s)}")
    return "  ".join(parts)


def _facts(step: StepRecord) -> list[tuple[str, str]]:
    facts: list[tuple[str, float | None, str]] = [
        ("reward", step.reward, "{:.3f}"),
        ("reward_std", step.reward_std, "{:.3f}"),
        # Under TRL's names: a reward may be called `length` too.
        *((f"rewards/{name}", value, "{:.3f}") for name, value in step.rewards.items()),
        ("zero-signal", step.zero_signal, "{:.0%}"),
        ("length", step.completion_length, "{:.1f}"),
        ("clipped", step.clipped, "{:.0%}"),
        ("entropy", step.entropy, "{:.2f}"),
        ("kl", step.kl, "{:.4f}"),
        ("grad", step.grad_norm, "{:.3g}"),
        ("tokens/s", step.tokens_per_s, "{:.0f}"),
        ("s/step", step.step_time_s, "{:.2f}"),
    ]
    return [(name, form.format(value)) for name, value, form in facts if value is not None]


def _format_event(record: dict[str, Any]) -> str | None:
    if record.get("event") == "measure":
        accuracy = record.get("accuracy", {})
        scored = [(f"{name} accuracy", value) for name, value in accuracy.items()]
        # Where every score is 0 or 1, the mean says nothing more.
        scored += [item for item in record["rewards"].items() if item not in accuracy.items()]
        scores = "  ".join(f"{name} {value:.3f}" for name, value in scored if value is not None)
        scores = scores or "nothing to compare"
        return f"{record['when']} training, {record['prompts']} held-out prompts: {scores}"
    if record.get("event") == "eval" and record.get("eval_reward") is not None:
        return f"step {record['step']}  eval reward {record['eval_reward']:.3f}"
    if record.get("event") == "eval" and record.get("eval_ranking") is not None:
        gap = f"{record['eval_likelihood_gap']:+.3f}"
        return f"step {record['step']}  pairs ranked right {record['eval_ranking']:.3f}  likelihood gap {gap}"
    if record.get("event") == "server":
        return f"step {record['step']}  the vLLM server is back, and gets the weights again"
    return None


def _draw_bar(status: Status, left_s: float | None) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    elapsed = format_duration(time.time() - status.started_at)
    if status.total_steps and status.phase == "training":
        bar = ProgressBar(total=status.total_steps, completed=status.step, width=36)
        left = f"left {format_duration(left_s)}" if left_s is not None else ""
        grid.add_row(bar, f"step {status.step}/{status.total_steps}", f"elapsed {elapsed}", left)
    else:
        grid.add_row(
            Text(f"{status.phase} {status.detail or '…'}", style="cyan"), f"elapsed {elapsed}"
        )
    return grid


def _draw_metrics(follower: _Follower) -> RenderableType:
    steps = list(follower.steps)
    table = Table.grid(padding=(0, 3))
    histories = {
        "reward": [step.reward for step in steps],
        "length": [step.completion_length for step in steps],
    }
    facts = _facts(steps[-1])
    for index in range(0, len(facts), 2):
        row: list[str] = []
        for name, value in facts[index : index + 2]:
            row += [
                f"[dim]{name}[/]",
                f"[bold]{value}[/] {draw_sparkline(histories.get(name, []))}",
            ]
        table.add_row(*row)
    return table


def draw_sparkline(values: list[float | None], width: int = 24) -> str:
    """The last values as a row of bars; empty for fewer than two."""
    known = [value for value in values if value is not None][-width:]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in known)


def _draw_sample(sample: dict[str, Any]) -> RenderableType:
    prompt, completion = sample["prompt"], sample["completions"][0]
    if isinstance(prompt, list):
        prompt = prompt[-1]["content"]
    scores = "  ".join(
        f"{name} {values[0]:.2f}"
        for name, values in sample["rewards"].items()
        if values[0] is not None
    )
    return Group(
        Text(f"newest sample (step {sample['step']})  {scores}", style="dim"),
        Text(f"» {_shorten(prompt)}", style="cyan", overflow="ellipsis", no_wrap=True),
        Text(f"« {_shorten(completion)}", overflow="ellipsis", no_wrap=True),
    )


def _shorten(text: str, length: int = 300) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= length else f"{flat[: length - 1]}…"


def _short_path(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
