"""How results look in a terminal: a check, a plan, the end of a run. Computes nothing."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_cli.analysis.sentences import PLAIN_FROM, say_number
from grpo_cli.batch import BatchPlan
from grpo_cli.checks.fast import describe_fast
from grpo_cli.cli.expect_view import print_verdicts
from grpo_cli.cli.output import print_json, print_problems, print_words, stderr, stdout
from grpo_cli.report.live import wording
from grpo_cli.report.live.terminal import clean_text

if TYPE_CHECKING:
    from grpo_cli.checks.recipe_checks import CheckedRecipe
    from grpo_cli.checks.reward_tests.procedure import Trial
    from grpo_cli.cli.submission import SubmittedJob
    from grpo_cli.doctor.result import Examination
    from grpo_cli.launch.plan import LaunchPlan
    from grpo_cli.report.summary import RunSummary
    from grpo_cli.rewards.description import KindDescription
    from grpo_cli.runs.folder import RunFolder
    from grpo_cli.runs.status import Status


def print_check(checked: "CheckedRecipe") -> None:
    """Prints what a recipe that passed comes to."""
    console, recipe, seen = stdout(), checked.recipe, checked.preview
    table = Table.grid(padding=(0, 2))
    trained = "LoRA" if recipe.model.lora else "all weights"
    table.add_row("model", Text(f"{recipe.model.path} ({trained})"))
    table.add_row("dataset", f"{recipe.dataset.kind}: {_count_rows(checked)}")
    if seen is not None and seen.columns is not None:
        table.add_row(
            "columns", Text(", ".join(sorted(seen.columns | set(recipe.dataset.columns))))
        )
    rewards = ", ".join(
        f"{reward.name or reward.kind} × {reward.weight:g}" for reward in recipe.rewards
    )
    table.add_row("rewards", rewards or _describe_groups(checked))
    if checked.batch is not None:
        table.add_row("batch", _describe_batch(checked.batch))
    table.add_row("fast", describe_fast(recipe))
    console.print(table)
    path = checked.loaded.source
    if not checked.unseen:
        console.print(Text.assemble(("✓ ", "green"), f"{path} is ready: grpo train {path}"))
        return
    console.print(Text.assemble(("✓ ", "green"), f"{path} passes the checks; not checked:"))
    for each in checked.unseen:
        console.print(f"  {each}", markup=False)
    console.print(f"next: grpo probe --quick {path}, or grpo train {path}", markup=False)


def _count_rows(checked: "CheckedRecipe") -> str:
    seen = checked.preview
    if seen is None or seen.train_rows is None:
        return "not looked at"
    held_out = f", {seen.eval_rows:,} held out" if seen.eval_rows else ""
    return f"{seen.train_rows:,} prompts{held_out}"


def _describe_groups(checked: "CheckedRecipe") -> str:
    groups = checked.preview.groups if checked.preview else None
    if groups is None:
        return "in the rows"
    return f"in the rows: {groups.smallest} to {groups.largest} responses a prompt, {groups.median} in the median"


def _describe_batch(plan: BatchPlan) -> str:
    steps = f", {plan.total_optimizer_steps:,} steps" if plan.total_optimizer_steps else ""
    return (
        f"{plan.completions_per_optimizer_step} completions a step on {plan.num_processes} "
        f"process{'es' if plan.num_processes > 1 else ''}{steps}{_describe_replacing(plan)}"
    )


def _describe_replacing(plan: BatchPlan) -> str:
    most = plan.most_prompts_per_generation_batch
    if most is None:
        return ""
    least = plan.prompts_per_generation_batch
    return f"; {least:,} to {most:,} prompts a generation batch, and epochs count batches"


def print_plan(folder: "RunFolder", plan: "LaunchPlan", *, as_json: bool) -> None:
    """Prints what a launch would start."""
    if as_json:
        print_json({"run": str(folder.path), **plan.as_json()})
        return
    console = stdout()
    console.print(f"run folder  {folder.path}", markup=False)
    console.print(
        f"processes   {plan.num_processes} ({plan.strategy}, {plan.device})", markup=False
    )
    effective = plan.add_environment(os.environ)
    for name, planned in plan.environment.items():
        yours = " (yours)" if effective[name] != planned else ""
        console.print(f"environment {name}={effective[name]}{yours}", markup=False)
    console.print(f"command     {plan.command_line()}", markup=False)
    if plan.server:
        console.print(f"server      {plan.server.command_line()}", markup=False)
        told = f"{plan.server.root}, weights by port {plan.server.group_port}"
        console.print(
            f"            {told}, at most {plan.server.max_restarts} restarts, log {folder.server_log}",
            markup=False,
        )


def print_job(job: "SubmittedJob", *, as_json: bool) -> None:
    """Prints a job that was submitted, or the script of one that was not."""
    if as_json:
        print_json(job.as_json())
    elif job.number is None:
        sys.stdout.write(job.plan.script)
    else:
        console = stdout()
        console.print(f"job         {job.number}", markup=False)
        console.print(f"run folder  {job.run}", markup=False)
        console.print(f"log         {job.log}", markup=False)


def print_kinds(kinds: "list[KindDescription]") -> None:
    """Prints reward kinds, one a line."""
    table = Table.grid(padding=(0, 2))
    for kind in kinds:
        table.add_row(Text(kind.kind, style="bold"), Text(kind.summary))
    stdout().print(table)


def print_kind(kind: "KindDescription") -> None:
    """Prints one reward kind: its documentation, then its parameters."""
    console = stdout()
    console.print(Text(kind.kind, style="bold"))
    console.print(Text(kind.doc))
    table = Table.grid(padding=(0, 2))
    for parameter in kind.parameters:
        default = "required" if parameter.required else json.dumps(parameter.default)
        table.add_row(Text(f"  {parameter.name}", style="bold"), default, Text(parameter.doc))
    if kind.parameters:
        console.print("\nparameters")
        console.print(table)


LEVEL_MARKS: dict[str, tuple[str, str]] = {"ok": ("✓", "green"), **wording.LEVEL_MARKS}


def print_examination(examination: "Examination") -> None:
    """Prints what was found on a machine as a table, with a fix beside each failure."""
    console = stdout()
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in examination.findings:
        mark, style = LEVEL_MARKS[finding.level]
        seen = Text(finding.seen)
        if finding.fix:
            seen.append(f"\nFix: {finding.fix}", style="bold")
        table.add_row(Text(mark, style=style), Text(finding.subject), seen)
    console.print(table)
    errors, warnings = len(examination.errors), len(examination.at("warning"))
    took = f"[dim]({examination.seconds:.1f} s)[/]"
    if errors or warnings:
        console.print(f"{count_noun(errors, 'error')}, {count_noun(warnings, 'warning')} {took}")
    else:
        console.print(f"[green]✓[/] nothing is wrong with this machine {took}")


def print_marked(console: Console, lines: Sequence[tuple[str, Text]]) -> None:
    """Prints what was found, each under the mark of its level.

    On a terminal lines break at words; in a file each finding is one line and its fix may be another.
    """
    if not console.is_terminal:
        for level, text in lines:
            mark, style = LEVEL_MARKS[level]
            console.print(Text(f"{mark} ", style=style).append(text))
        return
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold")
    for level, text in lines:
        mark, style = LEVEL_MARKS[level]
        table.add_row(Text(mark, style=style), text)
    if lines:
        console.print(table)


def count_noun(number: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_trial(trial: "Trial") -> None:
    """Prints what every kind of answer scored, then what is wrong."""
    console = stdout()
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("answer", style="bold")
    names = list(trial.seconds)
    for name in [*names, "total"] if len(names) > 1 else names:
        table.add_column(name, justify="right")
    table.add_column("example", no_wrap=True, overflow="ellipsis", style="dim")
    for result in trial.results:
        scores = [_format(result.rewards[name]) for name in names]
        total = [_format(result.total)] if len(names) > 1 else []
        example = " ".join(result.example.split())
        table.add_row(Text(result.name), *scores, *total, Text(example[:60]))
    console.print(table)
    console.print(f"\n{trial.rows} rows; means over the rows a reward applies to", style="dim")
    for name, form in trial.forms.items():
        console.print(Text(f"the gold of {name} is written as {form}", style="dim"))
    slow = [f"{name} {spent:.2g} s" for name, spent in trial.seconds.items() if spent >= 0.05]
    if slow:
        console.print(Text(f"time for a completion: {', '.join(slow)}", style="dim"))
    print_problems(trial.problems)
    if trial.forms and all(problem.level == "note" for problem in trial.problems):
        console.print("[green]✓[/] right answers win, and nothing else does")


_MARKS = {
    "completed": "[green]✓[/]",
    "stopped": "[yellow]■[/]",
    "running": "[cyan]●[/]",
    "pending": "[dim]○[/]",
}


def print_summary(summary: "RunSummary", *, lost: str | None = None) -> None:
    """Prints how a run ended and what to do next.

    Args:
        summary: The run's.
        lost: What is known of a run that ended without a word; its status still says that it runs.
    """
    from grpo_cli.cli.diagnosis_view import print_symptoms
    from grpo_cli.report.tracker_places import list_places

    console, status = stdout(), summary.status
    console.print(_say_end(summary, lost=lost))
    table = Table.grid(padding=(0, 2))
    change = summary.reward_change()
    if change and len(summary.steps) > 1 and not summary.answers:
        values = f"{_format(change.first)} → [bold]{_format(change.last)}[/]"
        table.add_row("  reward", values, f"[dim]{change.describe()}[/]")
    for name, before, after in _compare(summary):
        values = f"{_format(before)} → [bold]{_format(after)}[/]"
        table.add_row(
            Text(f"  {clean_text(name)}"), values, f"[dim]{_say_measured(summary.before or {})}[/]"
        )
    console.print(table)
    for question, answer in summary.answers[:2]:
        console.print(
            f"  » {clean_text(question)}",
            markup=False,
            style="cyan",
            overflow="ellipsis",
            no_wrap=True,
        )
        console.print(f"  « {clean_text(answer)}", markup=False, overflow="ellipsis", no_wrap=True)
    if summary.expected:
        print_verdicts(summary.expected, indent="  ")
    if status.state == "completed" and status.reason:
        console.print(f"  {status.reason}", markup=False)
    # Outside the table, which would cut long paths short.
    if summary.folder.model.is_dir():
        console.print(f"  model  {summary.folder.model}", markup=False)
    if summary.folder.report.is_file():
        console.print(f"  report {summary.folder.report}", markup=False)
    for tracker, where in list_places(summary.folder).items():
        console.print(f"  {tracker} {clean_text(where)}", markup=False)
    console.print(f"  run    {summary.folder.path}", markup=False)
    print_symptoms(summary.problems(), str(summary.folder.path))
    if lost:
        print_words(stderr(), Text(lost, style="bold red"))
    elif status.state in ("stopped", "failed"):
        print_failure(summary)


def _say_end(summary: "RunSummary", *, lost: str | None) -> Text:
    """How it ended, and how much was found wrong with it."""
    status, problems = summary.status, summary.problems()
    mark = _MARKS.get("" if lost else status.state, "[red]✗[/]")
    total = f"/{status.total_steps}" if status.total_steps else ""
    state = "interrupted" if lost else status.state
    text = Text.from_markup(mark)
    text.append(f" {state}: {status.step}{total} steps in {summary.duration()}")
    if problems:
        # The worst comes first.
        _, style = LEVEL_MARKS[problems[0].level]
        text.append(", ").append(count_noun(len(problems), "problem"), style=style)
    return text


def _say_measured(measured: dict[str, Any]) -> str:
    """Over how many prompts, and how their answers were drawn."""
    prompts = [f"{measured['prompts']} held-out prompts"] if "prompts" in measured else []
    drawn = wording.say_sampling(measured.get("temperature"))
    return ", ".join([*prompts, drawn] if drawn else prompts)


def _compare(summary: "RunSummary") -> Iterator[tuple[str, float | None, float | None]]:
    """Accuracy of the rewards that judge answers, and means that say anything more than it."""
    before, after = summary.before or {}, summary.after or {}
    if len(before.get("rewards", {})) > 1:
        yield "held-out reward", before.get("reward"), after.get("reward")
    for key, what in (("accuracy", "accuracy"), ("rewards", "mean")):
        for name in before.get(key, {}):
            values = before[key][name], after.get(key, {}).get(name)
            accuracies = before.get("accuracy", {}).get(name), after.get("accuracy", {}).get(name)
            if key == "accuracy" and after and values[1] is None:
                # A python reward that gave 0 and 1 alone before training, and other scores after it.
                continue
            if key == "accuracy" or values != accuracies:
                yield f"held-out {what} ({name})", *values
    if "likelihood_gap" in before:
        yield "held-out likelihood gap", before["likelihood_gap"], after.get("likelihood_gap")


def _format(value: float | None) -> str:
    if value is None:
        return "–"
    return say_number(value) if abs(value) >= PLAIN_FROM else f"{value:.3f}"


def print_failure(summary: "RunSummary") -> None:
    """Prints why a run did not complete, to stderr."""
    from grpo_cli.runs.checkpoints import whole_checkpoints

    console, status = stderr(), summary.status
    if status.traceback:
        console.print(status.traceback.rstrip(), markup=False, style="dim")
    style = "bold red" if status.state == "failed" else "yellow"
    reason = status.reason or "no reason was recorded"
    print_words(console, Text(reason, style=style))
    if status.state == "failed":
        console.print(f"The worker's log: {summary.folder.log}", markup=False)
    if whole_checkpoints(summary.folder):
        run = summary.folder.path
        console.print(
            f"To go on: grpo train {run / 'resolved.json'} --resume-from {run}{overrule(status)}",
            markup=False,
            soft_wrap=True,
        )
        if status.stopped_by:
            told = f"Without --set the rule {status.stopped_by} stops it again where it still finds the same."
            print_words(console, Text(told, style="dim"))


def overrule(status: "Status") -> str:
    """What lets a run go on that a rule has stopped."""
    return " --set 'training.stop_when=[]'" if status.stopped_by else ""
