"""How lists of runs, one run at a glance, and what is removed look in a terminal. Computes nothing."""

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from grpo_cli.analysis.sentences import PLAIN_FROM, say_number
from grpo_cli.cli.output import stderr, stdout
from grpo_cli.cli.views import count_noun, overrule, print_summary
from grpo_cli.report.live.terminal import clean_text
from grpo_cli.report.live.wording import short_path
from grpo_cli.units import format_bytes, format_duration

if TYPE_CHECKING:
    from grpo_cli.report.listing import ListedRun
    from grpo_cli.report.overview import RunOverview
    from grpo_cli.runs.removal import Removal

STATE_MARKS = {
    "completed": ("✓", "green"),
    "running": ("●", "bold cyan"),
    "pending": ("○", "dim"),
    "stopped": ("■", "yellow"),
    "failed": ("✗", "red"),
    "interrupted": ("?", "red"),
    "damaged": ("!", "red"),
}
_GAP = 2
_DROPPED = ("took", "started", "reward", "held-out", "steps")
"""Columns that go where the terminal is too narrow, in this order."""
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60


def print_runs(runs: "Sequence[ListedRun]", root: Path, *, filtered: bool) -> None:
    """Prints a line for each run; columns that do not fit are left out."""
    if not runs:
        hint = "none is like this" if filtered else "grpo train RECIPE makes one"
        stderr().print(f"no runs in {root}: {hint}", markup=False)
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
    if "reward" in widths and any(run.reward_within_noise for run in runs):
        stderr().print("≈ the reward has changed by no more than its noise", style="dim")
    for run in runs:
        if run.state == "damaged":
            told = f"damaged: {run.folder.path}: {clean_text(run.reason or '')}"
            stderr().print(told, markup=False, style="yellow")


def print_held_out_sets(runs: "Sequence[ListedRun]") -> None:
    """Say that results cannot be ranked if they were measured on different prompts."""
    sets = {run.held_out_prompts for run in runs if run.held_out_prompts}
    if len(sets) > 1:
        told = (
            f"measured on {len(sets)} different sets of held-out prompts: the order says little. Fix: the same "
            "`dataset.eval_seed` and data, or `grpo eval` of all models on one recipe"
        )
        stderr().print(told, markup=False, style="yellow")


def _say_steps(run: "ListedRun") -> Text:
    if run.step is None:
        return Text("–")
    return Text(f"{run.step}/{run.total_steps}" if run.total_steps else f"{run.step}")


def _say_state(run: "ListedRun") -> Text:
    mark, style = STATE_MARKS[run.state]
    return Text(f"{mark} {run.state}", style=style)


def _say_ago(run: "ListedRun") -> Text:
    if run.started_at is None:
        return Text("–")
    seconds = max(time.time() - run.started_at, 0)
    for unit, size in (("d", _DAY_S), ("h", _HOUR_S), ("m", _MINUTE_S)):
        if seconds >= size:
            return Text(f"{seconds // size:.0f}{unit} ago")
    return Text("now")


def _say_took(run: "ListedRun") -> Text:
    return Text("–" if run.seconds is None else format_duration(run.seconds))


_COLUMNS: "dict[str, Callable[[ListedRun], Text]]" = {
    "run": lambda run: Text(f"{run.name}/{run.id}", style="bold"),
    "state": _say_state,
    "steps": _say_steps,
    "reward": lambda run: _say_change(
        run.reward_first, run.reward_last, "≈" if run.reward_within_noise else "→"
    ),
    "held-out": lambda run: _say_change(run.before, run.after),
    "took": _say_took,
    "started": _say_ago,
}


def _say_change(first: float | None, last: float | None, sign: str = "→") -> Text:
    if first is None and last is None:
        return Text("–")
    return Text(f"{_number(first)} {sign} ").append(_number(last), style="bold")


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return say_number(value) if abs(value) >= PLAIN_FROM else f"{value:.3f}"


def print_overview(overview: "RunOverview") -> None:
    """Prints how a run went, what it was made of, what lies on the disk, and what can be done next."""
    from grpo_cli.report.live.watching import say_lost

    status, life, console = overview.summary.status, overview.life, stdout()
    lost = say_lost(overview.folder, life, status) if life.state == "interrupted" else None
    console.print(Text(f"{overview.listed.name}/{overview.listed.id}", style="bold"))
    print_summary(overview.summary, lost=lost)
    console.print()
    table = Table.grid(padding=(0, _GAP))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, told in _list_facts(overview):
        table.add_row(f"  {name}", Text(clean_text(told)))
    console.print(table)
    console.print()
    for command, does in _list_next(overview):
        # A command is whole, to be copied, and its purpose does not run into it.
        fits = len(command) + len(does) + 2 * _GAP + 1 <= console.width
        between = "   " if fits or not console.is_terminal else "\n      "
        console.print(Text.assemble((f"  {command}", "bold"), (f"{between}{does}", "dim")))


def _list_facts(overview: "RunOverview") -> list[tuple[str, str]]:
    """What a run was made of, as far as it is known."""
    recipe, manifest = overview.recipe, overview.manifest
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(overview.summary.status.started_at))
    attempts = overview.folder.attempts
    tuned = "LoRA" if recipe.model.lora else "all weights"
    facts = [
        ("started", f"{started}{f', {attempts} attempts' if attempts > 1 else ''}"),
        ("model", f"{recipe.model.path} ({tuned})"),
        ("data", _say_data(recipe.dataset.kind, manifest.get("data"))),
        ("rewards", ", ".join(f"{r.name or r.kind} × {r.weight:g}" for r in recipe.rewards)),
        ("batch", _say_batch(overview)),
        ("seed", str(recipe.seed)),
        ("versions", _say_versions(manifest.get("versions"))),
        ("git", _say_git(manifest.get("git"))),
        ("machine", _say_machine(manifest)),
        ("checkpoints", _say_checkpoints(overview)),
        ("on disk", _say_sizes(overview.sizes)),
        ("log", str(overview.folder.log)),
    ]
    return [(name, told) for name, told in facts if told]


def _say_data(kind: str, told: Any) -> str:
    if not isinstance(told, dict) or "train_rows" not in told:
        return kind
    held_out = f", {told['eval_rows']:,} held out" if told.get("eval_rows") else ""
    mark = f" (fingerprint {str(told['fingerprint'])[:12]})" if told.get("fingerprint") else ""
    return f"{kind}: {told['train_rows']:,} prompts{held_out}{mark}"


def _say_batch(overview: "RunOverview") -> str:
    from grpo_cli.report.overview import count_completions

    processes = overview.folder.read_plan().get("num_processes")
    processes = processes if isinstance(processes, int) and processes > 0 else 1
    completions = count_completions(overview.recipe, processes)
    size = overview.recipe.generation.num_generations
    if completions is None:
        return f"groups of {size}"
    return f"{completions} completions a step in groups of {size}, on {processes} process{'es' * (processes > 1)}"


def _say_versions(versions: Any) -> str:
    wanted = ("grpo-cli", "trl", "transformers", "torch", "peft", "vllm")
    known = versions if isinstance(versions, dict) else {}
    return ", ".join(f"{name} {known[name]}" for name in wanted if known.get(name))


def _say_git(git: Any) -> str:
    if not isinstance(git, dict) or not git.get("revision"):
        return ""
    return f"{str(git['revision'])[:12]}{', with changes' if git.get('dirty') else ''}"


def _say_machine(manifest: dict[str, Any]) -> str:
    hardware, device = manifest.get("hardware") or {}, manifest.get("accelerator") or {}
    cores = f"{hardware['cpus']} CPU cores" if hardware.get("cpus") else ""
    named = [hardware.get("host"), device.get("device"), cores]
    return ", ".join(str(each) for each in named if each)


def _say_checkpoints(overview: "RunOverview") -> str:
    steps = [
        f"{step} (best)" if step == overview.best else str(step) for step in overview.checkpoints
    ]
    return ", ".join(steps) or "none"


def _say_sizes(sizes: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    return f"{format_bytes(sum(sizes.values()))}: {parts}"


def _list_next(overview: "RunOverview") -> list[tuple[str, str]]:
    """The commands that make sense for a run in this state."""
    path = shlex.quote(short_path(overview.folder.path))
    found = (
        [(f"grpo diagnose {path}", "what is wrong with it")] if overview.summary.symptoms else []
    )
    if overview.life.state in ("running", "pending"):
        return [(f"grpo watch {path}", "what it is doing"), *found]
    commands = [*found, (f"grpo report {path}", "one HTML page of it")]
    if overview.folder.model.is_dir():
        commands.append((f"grpo eval {path}", "against the model it started from"))
        commands.append((f"grpo export {path} --to DIR", "a model to take along"))
    if overview.life.state != "completed" and overview.checkpoints:
        resolved = f"{path}/{overview.folder.resolved.name}"
        overruled = overrule(overview.summary.status)
        commands.append((f"grpo train {resolved} --resume-from {path}{overruled}", "goes on"))
    return commands


def print_planned(planned: "Sequence[Removal]") -> None:
    """Prints what would be removed, to stderr: it is no result yet."""
    console = stderr()
    for each in planned:
        if not each.paths:
            console.print(f"{each.run.path}: nothing to remove", markup=False)
        for path in each.paths:
            console.print(Text.assemble("remove ", (str(path), "bold")))
        for path in each.kept:
            console.print(Text(f"keep   {path}", style="dim"))
        for path in each.linked:
            told = f"{path} is a link to {path.readlink()}, which stays"
            console.print(Text(told, style="yellow"))
    count = count_noun(sum(len(each.paths) for each in planned), "folder")
    console.print(f"{count}, {format_bytes(sum(each.bytes for each in planned))}", markup=False)


def print_freed(freed: int) -> None:
    """Prints what a removal came to."""
    stdout().print(f"freed {format_bytes(freed)}", markup=False)
