"""The reward of a run as a picture. Owns the drawing; the numbers are the run's and its recipe's own."""

from collections.abc import Sequence
from pathlib import Path

from grpo_cli.analysis.expectations.verdicts import BandAt, bands_of
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import read_records
from grpo_cli.runs.series import StepRecord, read_step

_SHARE = 0.1
"""Part of the steps over which the line is averaged."""


def draw_curve(run: RunFolder, target: Path) -> bool:
    """Draws the mean reward over the steps, and the bands that the recipe expects it in.

    Returns:
        Whether there was anything to draw.
    """
    steps = [step for record in read_records(run.metrics) if (step := read_step(record))]
    known = [step for step in steps if step.reward is not None]
    if len(known) < 2:
        return False
    _draw(known, bands_of(run, "reward"), target)
    return True


def _draw(steps: list[StepRecord], bands: Sequence[BandAt], target: Path) -> None:
    # Without pyplot, which would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = [step.step for step in steps]
    rewards = [step.reward or 0.0 for step in steps]
    figure = Figure(figsize=(7, 3.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(places, rewards, ".", color="#9aa7b5", markersize=4, label="step")
    axes.plot(places, smooth(rewards), color="#1f6feb", linewidth=2, label="running mean")
    for index, band in enumerate(bands):
        # A window of one record would have no width to be seen.
        edges = [band.first_step - 0.5, band.last_step + 0.5]
        axes.fill_between(
            edges,
            band.low,
            band.high,
            color="#2da44e",
            alpha=0.25,
            label="" if index else "expected",
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(target))


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and those shortly before it."""
    width = max(round(_SHARE * len(values)), 1)
    return [
        sum(values[max(place - width + 1, 0) : place + 1]) / min(width, place + 1)
        for place in range(len(values))
    ]
