"""One HTML page of a run, or of several over each other; its look and behaviour are in `assets/`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_cli.analysis.metrics import say_metric
from grpo_cli.batch.explanation import derive
from grpo_cli.errors import SetupError, UsageError, install_extra
from grpo_cli.report import packing, tables
from grpo_cli.report.charts import build_charts, read_asset
from grpo_cli.report.comparison import (
    RunsComparison,
    compare_runs,
    read_runs,
    show_apart,
    tell_settings,
)
from grpo_cli.report.summary import RunReport
from grpo_cli.report.verdict import judge
from grpo_cli.runs.files import write_text

_SCRIPTS = ("unpacking.js", "charts.js", "browser.js", "page.js")
_WIDEST_SETTING = 60
"""Characters of a setting beside those of other runs."""


def write_report(
    runs: Sequence[RunReport | Path], output: Path | None, *, force: bool = False
) -> Path:
    """Write the page of one run, or of several with their charts over each other.

    `output` is by default `report.html` in the run, or for several in the working directory. A run's own report
    may always be replaced, another file with `force`.
    """
    opened = read_runs(list(dict.fromkeys(runs)))
    own = opened[0].folder.report
    target = output or (own if len(opened) == 1 else Path("report.html"))
    if target.exists() and target.resolve() != own.resolve() and not force:
        raise UsageError(f"{target} exists", "another --output, or --force to replace it")
    plotly = read_plotly()
    page = _render(opened, plotly)
    try:
        write_text(target, page)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written ({error.strerror})", "another --output"
        ) from None
    return target


def read_plotly() -> str:
    """Return the script that draws charts; raises `SetupError` if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise SetupError("plotly is not installed", install_extra("report")) from error
    return str(get_plotlyjs())


def render_page(
    kind: str, scripts: Sequence[str], plotly: str, chart_data: Any, **values: Any
) -> str:
    """Return a page by its template in `assets/`, `page` or `sweep`, with what this needs."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("grpo_cli.report", "assets"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["metric"] = say_metric
    return environment.get_template(f"{kind}.html.jinja").render(
        **values,
        written=time.strftime("%Y-%m-%d %H:%M"),
        style=read_asset("page.css"),
        scripts="\n".join(map(read_asset, scripts)),
        chart_data=packing.pack_json(chart_data),
        plotly=packing.pack_text(plotly),
    )


def _render(runs: Sequence[RunReport], plotly: str) -> str:
    described = [_describe(place, run) for place, run in enumerate(runs)]
    charts = build_charts(runs)
    comparison = compare_runs(runs) if len(runs) > 1 else None
    return render_page(
        "page",
        _SCRIPTS,
        plotly,
        charts["data"],
        command="grpo report",
        title=", ".join(run.name for run in runs),
        runs=described,
        ranking=_rank(runs, comparison) if comparison else None,
        comparison=comparison,
        equal=tables.group_equal,
        tone_of=tables.tone_of,
        notes_of=tables.gather_notes,
        show_apart=lambda values: show_apart(
            [None if value is None else tables.show(value) for value in values], _WIDEST_SETTING
        ),
        show_trend=tables.show_trend,
        tell_settings=tell_settings,
        charts=charts,
        browsers=_build_browsers(runs),
    )


def _rank(runs: Sequence[RunReport], comparison: RunsComparison) -> dict[str, Any]:
    """Return the runs, the best first, with the facts in which they differ and those that all share."""
    metric, order = tables.rank_runs(runs)
    facts = [[("state", run.life.state), *tables.list_facts(run)] for run in runs]
    shared = tables.share_facts(facts)
    rows = [
        {
            "place": place,
            "name": runs[place].name,
            "after": say_metric(runs[place].held_out.after.get(metric)),
            "change": say_metric(change := runs[place].held_out.change.get(metric), "+"),
            "tone": tables.tone_of(metric, change),
            "facts": dict(facts[place]),
        }
        for place in order
    ]
    # The first two columns tell what was measured, and a run's name tells when it started.
    names = dict.fromkeys(name for each in facts for name, _ in each if name != "started")
    return {
        "metric": metric,
        "rows": rows,
        "facts": [one for one in names if one not in shared and not one.startswith("held-out ")],
        "shared": shared,
        "measured_otherwise": [
            each.run
            for each in comparison.held_out
            if each.settings or each.only_base or each.only_run
        ],
    }


def _build_browsers(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """Return the places to look at groups of completions; several runs share the room that there is."""
    kinds = (
        ("training", packing.pack_training, packing.TRAINING_BYTES),
        ("held-out", packing.pack_held_out, packing.HELD_OUT_BYTES),
    )
    browsers = [
        {"name": name, "packs": [each for run in runs if (each := pack(run, room // len(runs)))]}
        for name, pack, room in kinds
    ]
    return [each for each in browsers if each["packs"]]


def _describe(place: int, run: RunReport) -> dict[str, Any]:
    failure, measured = _tell_failure(run), tables.list_measured(run)
    plan, held_out = tables.plan_run_batch(run), run.held_out
    numbers = held_out.change or held_out.after or held_out.before
    return {
        "place": place,
        "name": run.name,
        "state": run.life.state,
        "is_over": run.is_over,
        "verdict": judge(run),
        "facts": tables.list_facts(run),
        "description": run.recipe.description,
        "failure": failure,
        "has_problems": bool(failure or run.diagnosis.symptoms or run.diagnosis.skipped),
        "symptoms": run.diagnosis.symptoms,
        "diagnosis": run.diagnosis,
        "expected": run.expected,
        "measured": measured,
        "notes": tables.gather_notes(numbers, [row["name"] for row in measured]),
        "noted": "the change in " if held_out.change else "",
        "sampling": run.sampling,
        "rewards": tables.list_rewards(run),
        "phases": tables.list_phases(run),
        "settings": tables.list_settings(run),
        "recipe": _read_recipe(run),
        "overrides": tables.list_overrides(run.attempt_manifests)[-1],
        "batch": derive(plan) if plan else [],
        "manifest": tables.list_manifest(run),
    }


def _tell_failure(run: RunReport) -> dict[str, Any] | None:
    """Return what ended a run: its first line, and what is folded away."""
    reason, traceback = (run.status.reason or "").strip(), run.status.traceback
    if run.life.state != "failed" or not (reason or traceback):
        return None
    whole = reason if "\n" in reason else ""
    text = run.status.reason_line or "it gave no reason"
    details = {"All of it": whole, "Traceback": traceback}
    return {
        "text": text,
        "details": {name: each for name, each in details.items() if each},
    }


def _read_recipe(run: RunReport) -> str:
    path = run.folder.recipe
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
