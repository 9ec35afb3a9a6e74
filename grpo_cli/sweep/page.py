"""The page of a sweep: its cells, the best first, and their learning curves; each curve is the mean over seeds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_cli.analysis.metrics import Metric, group_reasons, say_metric
from grpo_cli.report.charts import make_line
from grpo_cli.report.page import read_plotly, render_page
from grpo_cli.report.summary import RunReport
from grpo_cli.runs.files import write_text
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import Point
from grpo_cli.units import count_noun, format_value

_SCRIPTS = ("unpacking.js", "charts.js", "page.js")
_CHARTS = (
    "reward",
    "completions/mean_length",
    "frac_reward_zero_std",
    "entropy",
    "grad_norm",
    "kl",
)


def rank_cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a sweep's result, the best first, with their numbers in words."""
    cells = sorted(
        result["cells"], key=lambda cell: -(cell["mean"] or {"value": float("-inf")})["value"]
    )
    best = [cell["mean"]["value"] for cell in cells if cell["cell"] == result["best"]]
    # A best cell is not shown as good if its answers became the same, or are worse than before.
    faults = [cell for cell in cells if cell.get("fault") and cell["cell"] == result["best"]]
    tied = sum(bool(cell["mean"]) and cell["mean"]["value"] in best for cell in cells) > 1
    return [
        {
            **cell,
            "is_best": bool(cell["mean"]) and cell["mean"]["value"] in best,
            "standing": "tied" if tied else "best",
            "before_text": " → ".join(
                format_value(each)
                for each in (cell["before"], cell.get("warmup"))
                if each is not None
            )
            or "–",
            "finished": f"{sum(run['state'] == 'completed' for run in cell['runs'])}/{len(cell['runs'])}",
            "mean_text": _say(cell["mean"]),
            "difference_text": _say(cell["difference"], "+"),
            "tone": "good"
            if cell["difference"] and not faults and Metric(**cell["difference"]).direction > 0
            else "",
        }
        for cell in cells
    ]


def list_reasons(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why means have no interval, each reason once, with its cells."""
    ordered = sorted((cell for cell in cells if cell["mean"]), key=lambda cell: cell["cell"])
    reasons = group_reasons((str(cell["cell"]), cell["mean"]["reason"]) for cell in ordered)
    return [
        f"no interval of {'cell' if len(own) == 1 else 'cells'} {', '.join(own)}: {reason}"
        for reason, own in reasons.items()
    ]


def say_measured(result: Mapping[str, Any]) -> str:
    """Return of how many prompts the means are, and how they were answered; empty if none was measured."""
    prompts = {cell["mean"]["prompts"] for cell in result["cells"] if cell["mean"]}
    if not prompts or result["sampling"] is None:
        return ""
    return (
        f"{' or '.join(map(str, sorted(prompts)))} held-out prompts, answered {result['sampling']}"
    )


def say_progress(result: Mapping[str, Any]) -> str:
    """Return how many runs are under way; empty if none is."""
    states = [run["state"] for cell in result["cells"] for run in cell["runs"]]
    under_way = [f"{states.count(one)} {one}" for one in ("running", "waiting") if one in states]
    done = f"{states.count('completed')} of {len(states)} runs completed"
    return ", ".join([done, *under_way]) if under_way else ""


def _say(metric: Mapping[str, Any] | None, sign: str = "") -> str:
    return say_metric(Metric(**metric) if metric else None, sign)


def write_sweep_page(
    path: Path, result: Mapping[str, Any], runs: Mapping[int, Sequence[RunReport]]
) -> Path:
    """Write the page of a sweep from its result as JSON and the runs of each cell."""
    ranked = rank_cells(result)
    charts = _build_charts(ranked, runs)
    page = render_page(
        "sweep",
        _SCRIPTS,
        read_plotly(),
        charts,
        command="grpo sweep",
        name=Path(result["sweep"]).parent.parent.name,
        result=result,
        progress=say_progress(result),
        cells=ranked,
        title=count_noun(len(ranked), "cell"),
        facts=_list_facts(result, runs),
        reasons=list_reasons(ranked),
        keys=list(dict.fromkeys(key for cell in ranked for key in cell["settings"])),
        charts=charts["charts"],
        link=lambda run: _link_report(RunFolder(Path(run)).report),
    )
    write_text(path, page)
    return path


def _list_facts(
    result: Mapping[str, Any], runs: Mapping[int, Sequence[RunReport]]
) -> dict[str, str]:
    """Return what was run, and how it was measured."""
    steps = sorted({run.total_steps for each in runs.values() for run in each if run.total_steps})
    facts = {
        "steps": " or ".join(f"{each:,}" for each in steps),
        "measured on": say_measured(result),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _link_report(report: Path) -> str | None:
    return f"../../{report.parent.name}/{report.name}" if report.is_file() else None


def _build_charts(
    ranked: Sequence[Mapping[str, Any]], runs: Mapping[int, Sequence[RunReport]]
) -> dict[str, Any]:
    """Return the data of the charts: a cell is drawn as a run is elsewhere."""
    steps: dict[tuple[int, ...], int] = {}
    charts = []
    for name in _CHARTS:
        curves = [_mean_curve(name, runs.get(cell["cell"], ())) for cell in ranked]
        if any(curves):
            lines = [make_line(place, curve, steps) for place, curve in enumerate(curves) if curve]
            charts.append({"metric": name, "lines": lines})
    rows = [
        {
            "label": f"cell {cell['cell']}",
            "run": place,
            "ends": {"after": {end: cell["mean"][end] for end in ("value", "low", "high")}},
        }
        for place, cell in enumerate(ranked)
        if cell["mean"]
    ]
    return {
        "runs": [f"cell {cell['cell']}: {cell['label']}" for cell in ranked],
        "steps": list(map(list, steps)),
        "charts": charts,
        "held_out_rows": rows,
    }


def _mean_curve(name: str, runs: Sequence[RunReport]) -> list[Point]:
    """Return the mean over seeds at each step."""
    values: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for step, value in run.series.get(name, []):
            if value is not None:
                values[step].append(value)
    return [(step, fmean(each)) for step, each in sorted(values.items())]
