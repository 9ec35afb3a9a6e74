"""One HTML page of a run, or of several over each other, for people: no network, light and dark.

Owns what stands on the page; charts are plotly's, whose script is put into the page. Text of runs is escaped.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_cli.errors import SetupError, UsageError
from grpo_cli.expectations.verdicts import BandAt, bands_of
from grpo_cli.report.summary import RunSummary, read_summary
from grpo_cli.runs.files import write_text
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import read_records

_FIRST = ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length")
"""Metrics that are looked at first; the others follow by name."""
_NOT_SHOWN = frozenset({"event", "step", "total_steps", "epoch", "num_tokens", "schema_version"})
_COLOURS = ("#1f6feb", "#e5534b", "#2da44e", "#bf8700", "#8250df", "#0aa2c0")
_BAND = "rgba(45, 164, 78, 0.25)"
_CHART_HEIGHT = 300

Series = dict[str, list[tuple[int, float]]]
"""Metric → step and value of each record."""


def write_report(runs: Sequence[Path], output: Path | None, *, force: bool = False) -> Path:
    """Writes the page.

    Args:
        runs: Run folders; the charts lie over each other.
        output: The file; None is `report.html` in the run, or for several in the working directory.
        force: Whether a file that is there already may be replaced; a run's own report always may.

    Raises:
        UsageError: A folder is no run, or the file is there or cannot be written.
        SetupError: plotly is not installed.
    """
    folders = [_open(path) for path in runs]
    own = folders[0].path / "report.html"
    target = output or (own if len(folders) == 1 else Path("report.html"))
    if target.exists() and target.resolve() != own.resolve() and not force:
        raise UsageError(f"{target} exists. Fix: another --output, or --force to replace it")
    try:
        write_text(target, _render(folders))
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written ({error.strerror}). Fix: another --output"
        ) from None
    return target


def _open(path: Path) -> RunFolder:
    run = RunFolder(path)
    if not run.resolved.is_file():
        raise UsageError(
            f"{path} is not a run folder: it has no resolved.json. Fix: name a folder under runs/<name>/"
        )
    return run


def read_series(run: RunFolder) -> Series:
    """Every number that training logged, in the order in which metrics are worth looking at."""
    found: Series = {}
    for record in read_records(run.metrics):
        if record.get("event") not in ("train", "eval"):
            continue
        for name, value in record.items():
            if name not in _NOT_SHOWN and isinstance(value, int | float):
                found.setdefault(name, []).append((int(record["step"]), float(value)))
    first = [name for name in _FIRST if name in found]
    return {name: found[name] for name in [*first, *sorted(found.keys() - set(_FIRST))]}


def _render(folders: Sequence[RunFolder]) -> str:
    from jinja2 import Environment, StrictUndefined

    source = resources.files("grpo_cli.report").joinpath("page.html.jinja").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, autoescape=True, trim_blocks=True)
    return environment.from_string(source).render(
        title=", ".join(_name(folder) for folder in folders),
        runs=[_describe(read_summary(folder)) for folder in folders],
        charts=_draw(folders),
        script=_library().offline.get_plotlyjs(),
    )


def _name(folder: RunFolder) -> str:
    path = folder.path.resolve()
    return f"{path.parent.name}/{path.name}"


def _describe(summary: RunSummary) -> dict[str, Any]:
    status, change = summary.status, summary.reward_change()
    total = f"/{status.total_steps}" if status.total_steps else ""
    facts = [("steps", f"{status.step}{total} in {summary.duration()}")]
    if change and not summary.answers:
        facts.append(("reward", f"{change[0]:.3f} → {change[1]:.3f}"))
    before, after = summary.before or {}, summary.after or {}
    for name, value in (before.get("accuracy") or {}).items():
        reached = (after.get("accuracy") or {}).get(name)
        facts.append((f"held-out accuracy ({name})", f"{_say(value)} → {_say(reached)}"))
    return {
        "name": _name(summary.folder),
        "state": status.state,
        "reason": status.reason,
        "facts": facts,
        "verdicts": summary.expected.verdicts if summary.expected else (),
        "warnings": summary.warnings(),
    }


def _say(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _draw(folders: Sequence[RunFolder]) -> list[dict[str, str]]:
    """One chart a metric: every run's line, and the band of the first run's recipe."""
    every = [read_series(folder) for folder in folders]
    names = list(dict.fromkeys(name for series in every for name in series))
    return [
        {
            "metric": name,
            "html": _chart(
                {
                    _name(folder): series[name]
                    for folder, series in zip(folders, every, strict=True)
                    if name in series
                },
                bands_of(folders[0], name),
            ),
        }
        for name in names
    ]


def _chart(lines: dict[str, list[tuple[int, float]]], bands: Sequence[BandAt]) -> str:
    objects = _library().graph_objects
    figure = objects.Figure()
    for (name, points), colour in zip(lines.items(), _COLOURS * len(lines), strict=False):
        steps, values = zip(*points, strict=True)
        figure.add_scatter(
            x=steps, y=values, name=name, mode="lines+markers", line={"color": colour, "width": 1.5}
        )
    for band in bands:
        # As wide as can be seen, where it stands for a single record.
        left, right = min(band.first_step, band.last_step - 1), band.last_step
        figure.add_shape(
            type="rect", x0=left, x1=right, y0=band.low, y1=band.high, fillcolor=_BAND, line_width=0
        )
        figure.add_annotation(x=right, y=band.high, text="expected", showarrow=False, yshift=8)
    figure.update_layout(
        height=_CHART_HEIGHT,
        margin={"l": 50, "r": 10, "t": 16, "b": 40},
        xaxis_title="optimizer step",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font_color="#7d8590",
        showlegend=len(lines) > 1,
        legend={"orientation": "h", "y": 1.15},
    )
    figure.update_xaxes(gridcolor="rgba(125,133,144,0.25)")
    figure.update_yaxes(gridcolor="rgba(125,133,144,0.25)")
    return str(
        figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            config={"displayModeBar": False, "responsive": True},
        )
    )


def _library() -> Any:
    try:
        import plotly
        import plotly.graph_objects
        import plotly.offline
    except ImportError as error:
        raise SetupError('plotly is not installed. Fix: pip install "grpo-cli[report]"') from error
    return plotly
