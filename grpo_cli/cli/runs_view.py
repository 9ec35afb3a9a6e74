"""How `grpo runs` looks in a terminal: lists, one run, runs side by side, and what is removed."""

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from grpo_cli.cli.output import print_words, stderr, stdout
from grpo_cli.cli.summary import STATE_MARKS, print_summary, say_change
from grpo_cli.report.tables import say_overrides
from grpo_cli.report.wording import clean_text, short_path
from grpo_cli.units import count_noun, format_bytes, format_duration, format_value

if TYPE_CHECKING:
    from grpo_cli.analysis.held_out import HeldOutDifference
    from grpo_cli.analysis.metrics import Metric
    from grpo_cli.report.comparison import RunsComparison
    from grpo_cli.report.summary import RunReport, Trend
    from grpo_cli.runs.removal import Removal

Row = Mapping[str, Any]
"""One run of `grpo runs list --json`."""
_GAP = 2
_DROPPED = ("took", "started", "reward", "held-out", "steps")
"""Columns that go if the terminal is too narrow, in this order."""
_LONGEST = 40
"""Characters of a setting's value."""


def print_runs(runs: Sequence[Row], root: Path, *, filtered: bool) -> None:
    """Print a line for each run; columns that do not fit are left out."""
    if not runs:
        hint = "none is like this" if filtered else "grpo train RECIPE makes one"
        stderr().print(f"no runs in {root}: {hint}")
        return
    console = stdout()
    columns = {name: [cell(run) for run in runs] for name, cell in _COLUMNS.items()}
    widths = {
        name: max(len(name), *(each.cell_len for each in cells)) for name, cells in columns.items()
    }
    for name in _DROPPED:
        if sum(widths.values()) + _GAP * (len(widths) - 1) > console.width:
            del widths[name]
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in widths:
        table.add_column(
            name,
            justify="right" if name in ("steps", "took") else "left",
            no_wrap=name != "run",
            overflow="fold" if name == "run" else "ellipsis",
        )
    for cells in zip(*(columns[name] for name in widths), strict=True):
        table.add_row(*cells)
    console.print(table)
    if "reward" in widths and any(run["reward_within_noise"] for run in runs):
        stderr().print("≈ the reward has changed by no more than its noise", style="dim")
    if any(run["scoring_failed"] for run in runs):
        stderr().print(
            "! scoring failed on some answers: `grpo runs show RUN` counts them", style="dim"
        )
    for run in runs:
        if run["state"] == "damaged":
            line = f"damaged: {run['run']}: {clean_text(run['reason'])}"
            stderr().print(line, style="yellow")


def print_held_out_sets(runs: Sequence[Row]) -> None:
    """Print that results cannot be ranked if they were measured on different prompts."""
    sets = {run["held_out_prompts"] for run in runs if run["held_out_prompts"]}
    if len(sets) > 1:
        warning = (
            f"measured on {len(sets)} different sets of held-out prompts: the order says little. Fix: the same "
            "`dataset.eval_seed` and data, or `grpo eval` of all models on one recipe"
        )
        stderr().print(warning, style="yellow")


def _say_steps(run: Row) -> Text:
    step, total = run["step"], run["total_steps"]
    if step is None:
        return Text("–")
    return Text(f"{step}/{total}" if total else f"{step}")


def _say_state(run: Row) -> Text:
    mark, style = STATE_MARKS[run["state"]]
    failed = ("!", "yellow") if run["scoring_failed"] else ""
    return Text.assemble((f"{mark} {run['state']}", style), failed)


def _say_ago(run: Row) -> Text:
    seconds = max(time.time() - (run["started_at"] or 0), 0)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return Text(f"{seconds // size:.0f}{unit} ago")
    return Text("now")


def _say_held_out(run: Row) -> Text:
    text = _say_change(run["before"], run["after"])
    return text.append(" (reward)", style="dim") if run["held_out"] == "reward" else text


def _say_change(first: float | None, last: float | None, sign: str = "→") -> Text:
    return Text("–") if first is last is None else say_change(first, last, sign=sign)


_COLUMNS: dict[str, Callable[[Row], Text]] = {
    "run": lambda run: Text(f"{run['name']}/{run['id']}", style="bold"),
    "state": _say_state,
    "steps": _say_steps,
    "reward": lambda run: _say_change(
        run["reward_first"], run["reward_last"], "≈" if run["reward_within_noise"] else "→"
    ),
    "held-out": _say_held_out,
    "took": lambda run: Text("–" if run["seconds"] is None else format_duration(run["seconds"])),
    "started": _say_ago,
}


def print_overview(run: "RunReport") -> None:
    """Print how a run went, what it was made of, its size on disk, and the next commands."""
    console, path = stdout(), run.folder.path
    console.print(f"{path.parent.name}/{path.name}", style="bold")
    print_summary(run)
    console.print()
    table = Table.grid(padding=(0, _GAP))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in _list_facts(run):
        table.add_row(f"  {name}", clean_text(fact))
    console.print(table)
    # Outside the table, which would break the path.
    console.print(Text.assemble(("  log", "dim"), f"  {run.folder.log}"), soft_wrap=True)
    console.print()
    for command, does in _list_next(run):
        # A command is whole, to be copied, and its purpose does not run into it.
        fits = len(command) + len(does) + 2 * _GAP + 1 <= console.width
        between = "   " if fits or not console.is_terminal else "\n      "
        line = Text.assemble((f"  {command}", "bold"), (f"{between}{does}", "dim"))
        console.print(line, soft_wrap=True)


def _list_facts(run: "RunReport") -> list[tuple[str, str]]:
    from grpo_cli.analysis.expectations import describe_hardware
    from grpo_cli.recipe.recipe import describe_fast

    recipe, manifest, attempts = run.recipe, run.manifest, run.folder.attempts
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.status.started_at))
    sizes = run.sizes()
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    versions, git, fast = manifest["versions"], manifest["git"] or {}, manifest.get("fast")
    shown = ("grpo-cli", "trl", "transformers", "torch", "peft", "vllm")
    host = manifest["hardware"].get("host")
    changes = ", with changes" if git.get("dirty") else ""
    best = run.best_checkpoint
    steps = [f"{step} (best)" if step == best else str(step) for step in run.checkpoints]
    facts = [
        ("started", f"{started}{f', {attempts} attempts' if attempts > 1 else ''}"),
        ("model", f"{recipe.model.path} ({'LoRA' if recipe.model.lora else 'all weights'})"),
        *recipe.stages.items(),
        ("data", _say_data(recipe.dataset.kind, manifest["data"])),
        ("dropped", run.dropped),
        ("rewards", ", ".join(f"{r.name or r.kind} × {r.weight:g}" for r in recipe.rewards)),
        ("learning rate", f"{recipe.training.learning_rate:g}"),
        ("batch", _say_batch(run)),
        ("fast", describe_fast(recipe, excluded=fast.get("left_off")) if fast else ""),
        ("seed", str(recipe.seed)),
        ("set", say_overrides(run)),
        ("versions", ", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name))),
        ("git", f"{git['revision'][:12]}{changes}" if git.get("revision") else ""),
        ("machine", ", ".join(filter(None, (host, describe_hardware(run))))),
        ("checkpoints", ", ".join(steps) or "none"),
        ("on disk", f"{format_bytes(sum(sizes.values()))}: {parts}"),
    ]
    return [(name, fact) for name, fact in facts if fact]


def _say_data(kind: str, data: Mapping[str, Any]) -> str:
    if "train_rows" not in data:
        return kind
    held_out = f", {data['eval_rows']:,} held out" if data.get("eval_rows") else ""
    mark = f" (fingerprint {str(data['fingerprint'])[:12]})" if data.get("fingerprint") else ""
    rows = data["train_rows"]
    # A mixture draws the rows of some sources several times.
    drawn = " an epoch" if data.get("sources") else ""
    prompts = "streamed" if rows is None else f"{count_noun(rows, 'prompt')}{drawn}"
    return f"{kind}: {prompts}{held_out}{mark}"


def _say_batch(run: "RunReport") -> str:
    from grpo_cli.batch.plan import batch_inputs, plan_batch

    processes, size = run.plan.get("num_processes") or 1, run.recipe.generation.num_generations
    plan = plan_batch(batch_inputs(run.recipe, processes, None))
    if plan.problems:
        return f"groups of {size}"
    completions = f"{plan.completions_per_optimizer_step} completions a step in groups of {size}"
    return f"{completions}, on {count_noun(processes, 'process')}"


def _list_next(run: "RunReport") -> list[tuple[str, str]]:
    path = shlex.quote(short_path(run.folder.path))
    diagnose = (
        [(f"grpo diagnose {path}", "what is wrong with it")] if run.diagnosis.symptoms else []
    )
    if not run.is_over:
        return [(f"grpo watch {path}", "what it is doing"), *diagnose]
    commands = [*diagnose, (f"grpo report {path}", "one HTML page of it")]
    if run.folder.model.is_dir():
        commands.append((f"grpo eval {path}", "compare with the model it started from"))
        commands.append((f"grpo export {path} --to DIR", "export the model"))
    if run.life.state != "completed" and run.can_resume:
        commands.append((run.resume_command(path), "resume it"))
    return commands


def print_comparison(compared: "RunsComparison") -> None:
    """Print runs under letters: who they are, then each table with a column a run."""
    from grpo_cli.report.comparison import drop_scored_apart, find_trends, show_apart

    console = stdout()
    letters = [chr(ord("A") + place) for place in range(len(compared.runs))]
    table = Table.grid(Column(style="bold"), "", Column(style="dim"), padding=(0, 2))
    for letter, run in zip(letters, compared.runs, strict=True):
        table.add_row(letter, run.name, _say_run(run))
    console.print(table)
    settings = [
        (path, show_apart([_say_value(value) for value in values], _LONGEST))
        for path, values in compared.settings.items()
    ]
    _print_table("settings that differ", letters, settings, "every setting is the same")
    trends = drop_scored_apart(compared.runs, [find_trends(run) for run in compared.runs])
    names = dict.fromkeys(name for each in trends for name in each)
    rows = [(name, [_say_trend(each.get(name)) for each in trends]) for name in names]
    _print_table("training: first → last (best)", letters, rows, "no metrics to compare")
    if rows:
        console.print(f"  {_say_widths(trends)}", style="dim", soft_wrap=False)
    warmed = drop_scored_apart(compared.runs, [run.held_out.warmup for run in compared.runs])
    if any(warmed):
        title = "held-out prompts after the warm-up (95 % interval)"
        _print_table(title, letters, _list_metrics(warmed), "")
    after = [run.held_out.measurements["after"] for run in compared.runs]
    metrics = [{} if isinstance(each, str) else each.metrics for each in after]
    measured = drop_scored_apart(compared.runs, metrics)
    title = "held-out prompts after training (95 % interval)"
    _print_table(title, letters, _list_metrics(measured), "none of them was measured")
    for letter, run in zip(letters, compared.runs, strict=True):
        for measured_on, failures in run.scoring_failures().items():
            print_words(console, f"! {letter}, {measured_on}: {failures}", "yellow")
    for letter, difference in zip(letters[1:], compared.held_out, strict=True):
        _print_difference(letter, difference)


def _print_difference(letter: str, difference: "HeldOutDifference") -> None:
    from grpo_cli.report.comparison import tell_settings

    console = stdout()
    console.print()
    if difference.reason is not None:
        console.print(f"{letter} and A: not compared, since {difference.reason}", style="yellow")
        return
    print_words(console, f"{letter} and A: {difference.verdict or ''}", "bold")
    primary = difference.differences.get(difference.primary or "")
    for name, each in difference.differences.items():
        if name != difference.primary or each.value == 0:
            line = f"  {name}: {_say_paired(each, primary.reason if primary else None)}"
            print_words(console, line)
    if difference.only_base or difference.only_run:
        alone = count_noun(difference.only_base, "prompt")
        line = f"  left out: {alone} of A only, {difference.only_run} of {letter} only"
        console.print(line, style="dim")
    if difference.settings:
        line = f"  measured with other settings: {'; '.join(tell_settings(difference.settings))}"
        print_words(console, line, "yellow")


def _print_table(
    title: str, letters: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], empty: str
) -> None:
    console = stdout()
    console.print()
    if not rows:
        console.print(empty, style="dim")
        return
    console.print(title, style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    # A name is not broken: the cells beside it may be, at their spaces.
    table.add_column(style="dim", no_wrap=True)
    for letter in letters:
        table.add_column(letter, overflow="fold")
    for name, cells in rows:
        table.add_row(f"  {clean_text(name)}", *map(clean_text, cells))
    console.print(table)


def _say_run(run: "RunReport") -> str:
    return run.described


def _say_value(value: Any) -> str | None:
    is_plain = value is None or isinstance(value, str)
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _say_widths(trends: "Sequence[Mapping[str, Trend]]") -> str:
    widths = sorted({trend.width for each in trends for trend in each.values()}) or [1]
    shown = f"{widths[0]}" if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
    return f"means of {shown} records; entropy, kl and grad_norm begin with the first record"


def _say_trend(trend: "Trend | None") -> str:
    if trend is None:
        return "–"
    ends = f"{format_value(trend.first)} → {format_value(trend.last)}"
    if trend.best is None:
        return ends
    return f"{ends} ({format_value(trend.best)} at step {trend.best_step})"


def _list_metrics(measured: "Sequence[Mapping[str, Metric]]") -> list[tuple[str, list[str]]]:
    from grpo_cli.analysis.metrics import say_metric

    names = dict.fromkeys(name for each in measured for name in each)
    return [(name, [say_metric(each.get(name)) for each in measured]) for name in names]


def _say_paired(metric: "Metric", known_reason: str | None) -> str:
    """Return a difference with its interval, or why there is none if it is not known already."""
    if metric.value is None:
        return f"– ({metric.reason})"
    value = format_value(metric.value, "+") if metric.value else "no difference"
    if interval := metric.say_interval("+"):
        return f"{value} (95 % interval {interval})"
    return value if metric.reason == known_reason else f"{value} (no interval: {metric.reason})"


def print_planned(planned: "Sequence[Removal]") -> None:
    """Print what would be removed, to stderr: it is not a result yet."""
    console = stderr()
    for each in planned:
        if not each.paths:
            console.print(f"{each.run.path}: nothing to remove")
        for path in each.paths:
            console.print(Text.assemble("remove ", (str(path), "bold")))
        for path in each.kept:
            console.print(f"keep   {path}", style="dim")
    count = count_noun(sum(len(each.paths) for each in planned), "folder")
    console.print(f"{count}, {format_bytes(sum(each.bytes for each in planned))}")
