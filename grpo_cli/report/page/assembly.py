"""One HTML page of a run, or of several over each other, for people: no network, light and dark.

Owns putting the page together. What stands on it is worked out by the modules beside this one; what it looks
like and how it answers is in `assets/`. Charts are plotly's, whose script is put into the page.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_cli.batch import derive
from grpo_cli.errors import SetupError, UsageError, install_extra
from grpo_cli.report.comparison import RunsComparison, compare_runs, name_runs
from grpo_cli.report.page import gain_table, phases, reward_table, values
from grpo_cli.report.page import provenance as origin
from grpo_cli.report.page.charts import build_charts
from grpo_cli.report.page.completions import (
    HELD_OUT_BYTES,
    TRAINING_BYTES,
    Pack,
    pack_held_out,
    pack_training,
)
from grpo_cli.report.page.packing import pack_json, pack_text
from grpo_cli.report.page.run_data import RunData, read_material
from grpo_cli.report.page.verdict import first_line, judge
from grpo_cli.runs.files import write_text
from grpo_cli.runs.folder import RunFolder

_SCRIPTS = ("unpacking.js", "charts.js", "browser.js", "page.js")


@dataclass(frozen=True)
class Browser:
    """A place in the page where groups of completions are looked at."""

    name: str
    """`training` or `held-out`; what its elements are called."""
    packs: tuple[Pack, ...]


def write_report(runs: Sequence[Path], output: Path | None, *, force: bool = False) -> Path:
    """Writes the page.

    Args:
        runs: Run folders; the charts lie over each other.
        output: The file; None is `report.html` in the run, or for several in the working directory.
        force: Whether a file that is there already may be replaced; a run's own report always may.

    Raises:
        UsageError: A folder is no run or is damaged, or the file is there or cannot be written.
        SetupError: plotly is not installed.
    """
    folders = [RunFolder(path) for path in dict.fromkeys(runs)]
    own = folders[0].path / "report.html"
    target = output or (own if len(folders) == 1 else Path("report.html"))
    if target.exists() and target.resolve() != own.resolve() and not force:
        raise UsageError(f"{target} exists. Fix: another --output, or --force to replace it")
    script = _read_plotly()
    page = _render(folders, script)
    try:
        write_text(target, page)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written ({error.strerror}). Fix: another --output"
        ) from None
    return target


def _read_plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise SetupError(f"plotly is not installed. Fix: {install_extra('report')}") from error
    return str(get_plotlyjs())


def _render(folders: Sequence[RunFolder], plotly: str) -> str:
    from jinja2 import Environment, StrictUndefined

    names = name_runs(folders)
    runs = [read_material(folder, name) for folder, name in zip(folders, names, strict=True)]
    charts = build_charts(runs)
    comparison = compare_runs(folders) if len(runs) > 1 else None
    environment = Environment(
        undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["metric"] = gain_table.format_metric
    return environment.from_string(_read_asset("page.html.jinja")).render(
        title=", ".join(names),
        written=time.strftime("%Y-%m-%d %H:%M"),
        runs=[_describe(place, run) for place, run in enumerate(runs)],
        ranking=_rank(runs, comparison) if comparison else None,
        comparison=comparison,
        equal=gain_table.group_equal,
        tone_of=gain_table.tone_of,
        notes_of=gain_table.gather_notes,
        show_apart=values.show_apart,
        show_course=origin.show_course,
        say_differences=values.say_differences,
        charts=charts,
        browsers=_build_browsers(runs),
        style=_read_asset("page.css"),
        scripts="\n".join(map(_read_asset, _SCRIPTS)),
        chart_data=pack_json(charts.data),
        phase_data=pack_json([phases.phase_series(run) for run in runs]),
        plotly=pack_text(plotly),
    )


def _rank(runs: Sequence[RunData], comparison: RunsComparison) -> dict[str, Any]:
    """The runs of a page, the best first, with the facts in which they differ and those that all share."""
    metric, order = gain_table.rank_runs(runs)
    facts = [[("state", run.state), *origin.list_facts(run)] for run in runs]
    shared = origin.share_facts(facts)
    rows = []
    for place in order:
        gain = runs[place].gain
        after, change = gain.after.get(metric), gain.change.get(metric)
        rows.append(
            {
                "place": place,
                "name": runs[place].name,
                "after": gain_table.format_metric(after),
                "change": gain_table.format_metric(change, "+.3f"),
                "tone": gain_table.tone_of(metric, change),
                "facts": dict(facts[place]),
            }
        )
    names = dict.fromkeys(name for each in facts for name, _ in each)
    return {
        "metric": metric,
        "rows": rows,
        # The first two columns tell what was measured, and a run's name tells when it started.
        "facts": [
            name
            for name in names
            if name not in shared and name != "started" and not name.startswith("held-out ")
        ],
        "shared": shared,
        "measured_otherwise": [
            each.run
            for each in comparison.held_out
            if each.settings or each.only_base or each.only_run
        ],
    }


def _read_asset(name: str) -> str:
    return resources.files("grpo_cli.report.page").joinpath("assets", name).read_text("utf-8")


def _build_browsers(runs: Sequence[RunData]) -> list[Browser]:
    """The browsers that have something to show; several runs share the room that there is."""
    packs = {
        "training": [pack_training(run, TRAINING_BYTES // len(runs)) for run in runs],
        "held-out": [pack_held_out(run, HELD_OUT_BYTES // len(runs)) for run in runs],
    }
    return [
        Browser(name, tuple(pack for pack in found if pack))
        for name, found in packs.items()
        if any(found)
    ]


def _describe(place: int, run: RunData) -> dict[str, Any]:
    """What the template says of one run."""
    plan, failure, measured = (
        origin.read_batch(run),
        _tell_failure(run),
        gain_table.list_measured(run),
    )
    gain = run.gain.change or run.gain.after or run.gain.before
    return {
        "place": place,
        "name": run.name,
        "state": run.state,
        "is_over": run.is_over,
        "verdict": judge(run),
        "facts": origin.list_facts(run),
        "description": run.recipe.description,
        "failure": failure,
        "has_problems": bool(failure or run.symptoms),
        "symptoms": run.symptoms,
        "expected": run.expected,
        "measured": measured,
        "notes": gain_table.gather_notes(gain, [row.name for row in measured]),
        "sampling": run.gain.sampling,
        "rewards": reward_table.list_rewards(run),
        "phases": phases.list_phases(run),
        "settings": origin.list_settings(run),
        "recipe": _read_recipe(run.folder),
        "overrides": origin.list_overrides(run.manifest),
        "batch": derive(plan) if plan else [],
        "origin": origin.list_origin(run),
    }


def _tell_failure(run: RunData) -> dict[str, Any] | None:
    """What ended a run: its first line, and what is folded away."""
    reason, traceback = (run.status.reason or "").strip(), run.status.traceback
    if run.state != "failed" or not (reason or traceback):
        return None
    whole = reason if "\n" in reason else ""
    text = first_line(reason) or "it gave no reason"
    return {"text": text, "details": [each for each in (whole, traceback) if each]}


def _read_recipe(run: RunFolder) -> str:
    """The recipe as given; empty where it is not there."""
    try:
        return run.recipe.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
