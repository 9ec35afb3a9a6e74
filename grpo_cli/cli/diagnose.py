"""`grpo diagnose`: print what a run's metrics say is wrong, and the list of rules."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from grpo_cli.cli import output
from grpo_cli.cli.arguments import RUNS, AsJson, NewestRun, RunsRoot
from grpo_cli.errors import ExitCode
from grpo_cli.units import count_noun, format_value

if TYPE_CHECKING:
    from grpo_cli.analysis.diagnosis.diagnosis import Diagnosis
    from grpo_cli.analysis.diagnosis.rule import Rule, Symptom
    from grpo_cli.logs.run import LogRun


_MOST_NAMES = 10
"""Skipped rules that are named; `--json` names all."""
LIMIT, GROUP = "generation.max_completion_length", "generation.num_generations"


def diagnose(
    run: NewestRun = "latest",
    runs: RunsRoot = RUNS,
    rules: Annotated[
        bool, typer.Option("--rules", help="List the rules instead, with thresholds and sources.")
    ] = False,
    max_completion_length: Annotated[
        int | None,
        typer.Option(min=1, help="Of a log of another tool: the limit of tokens a completion."),
    ] = None,
    num_generations: Annotated[
        int | None, typer.Option(min=2, help="Of a log of another tool: completions a prompt.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Of a log of another tool: its config, in YAML or JSON."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Find out from a run's metrics why it does not learn, and what to change.

    `training.stop_when` takes names of rules, and stops a run that one of them matches. Exit code 1 if the run
    failed, learns nothing, or loses what it learned.
    """
    if rules:
        from grpo_cli.analysis.diagnosis.diagnosis import RULES

        output.show(RULES, _print_rules, as_json=json)
        return
    from grpo_cli.analysis.diagnosis.diagnosis import examine
    from grpo_cli.logs.run import Known, LogRun, open_run

    settings = {LIMIT: max_completion_length, GROUP: num_generations}
    given = {key: value for key, value in settings.items() if value is not None}
    read = open_run(runs, run, Known(given, config))
    found, failure = examine(read.history()), read.failure
    if json:
        log = {"log": read.log_json()} if isinstance(read, LogRun) else {}
        output.print_json(
            {"run": str(read.folder.path), "failure": failure, **log, **found.as_json()}
        )
    else:
        if isinstance(read, LogRun):
            _print_log(read)
        _print_diagnosis(found, failure)
        for where, failures in read.scoring_failures().items():
            output.print_words(output.stdout(), f"! {where}: {failures}", "yellow")
    short = isinstance(read, LogRun) and read.is_short
    raise typer.Exit(ExitCode.FAILED if found.errors or failure or short else ExitCode.OK)


def _print_log(run: "LogRun") -> None:
    """Print what was read of a log, and how its reward went."""
    console = output.stdout()
    output.print_words(console, Text.assemble((run.name, "bold"), f": {run.described}"))
    if trend := run.trend("reward"):
        values = f"{format_value(trend.first)} → {format_value(trend.last)}"
        console.print(f"  reward {values} ({trend.describe()})")
    for text in run.remarks.values():
        output.print_words(console, f"note: {text}", "dim", indent=2)
    if run.left_out:
        output.print_words(console, f"left out: {', '.join(run.left_out)}", "dim", indent=2)
    if run.is_short:
        count = count_noun(len(run.values("reward")), "record")
        output.print_words(
            console, f"too short to tell: {count} with a reward; rules need up to 40", "yellow"
        )
        newest = ", ".join(f"{name} {value:.3g}" for name, value in run.newest.items())
        output.print_words(console, f"the newest: {newest}", indent=2)
    console.print()


def _print_diagnosis(found: "Diagnosis", failure: str | None) -> None:
    console = output.stdout()
    if failure:
        style = output.LEVEL_MARKS["error"][1]
        output.print_words(console, output.marked("error", ("failed: ", style), failure))
    if found.symptoms or not failure:
        console.print(_say_verdict(found))
    for symptom in found.symptoms:
        console.print()
        _print_symptom(console, symptom)
    if found.skipped:
        console.print()
    for why, names in found.skipped_by_reason().items():
        which = ", ".join(names) if len(names) <= _MOST_NAMES else count_noun(len(names), "rule")
        console.print(f"skipped: {which} ({why})", style="dim")


def _say_verdict(found: "Diagnosis") -> Text:
    serious = [each for each in found.symptoms if each.level != "note"]
    if not found.checked:
        return Text(f"· too little was logged to check any of {found.rules} rules", style="cyan")
    if not serious:
        notes = len(found.symptoms)
        more = f"; {count_noun(notes, 'note')}" if notes else ""
        few = 2 * found.checked < found.meant
        return output.marked("note" if few else "ok", f"{found.clean_verdict()}{more}")
    mark, style = output.LEVEL_MARKS["error" if found.errors else "warning"]
    return Text(f"{mark} {count_noun(len(serious), 'problem')}", style=style)


def _print_symptom(console: Console, symptom: "Symptom") -> None:
    console.print(output.marked(symptom.level, (symptom.rule, "bold"), f"  at step {symptom.step}"))
    output.print_words(console, symptom.seen, indent=2)
    output.print_words(console, symptom.why, "dim", indent=2)
    output.print_words(console, Text.assemble(("Fix: ", "bold"), symptom.fix), indent=2)


def _print_rules(rules: "Iterable[Rule]") -> None:
    console = output.stdout()
    for rule in rules:
        console.print(Text.assemble((rule.name, "bold"), f"  {rule.title}"))
        # What looks at no records looks at the measurements before and after.
        last = f", the last {count_noun(rule.window, 'record')}" if rule.window else ""
        least = f"; from {count_noun(rule.min_records, 'record')} on" if rule.min_records else ""
        facts = {
            "metric": f"{rule.metric}{last}",
            "speaks": f"{rule.threshold}{least}",
            "source": rule.source,
        }
        for name, fact in facts.items():
            console.print(Text.assemble((f"  {name}  ", "dim"), fact))


def print_symptoms(symptoms: "Sequence[Symptom]", run: str) -> None:
    """Print the three worst symptoms of a finished run to stderr, and the command that shows all."""
    console = output.stderr()
    lines = [
        (each.level, Text.assemble((f"{each.rule}: ", "bold"), f"{each.seen}. Fix: {each.fix}"))
        for each in symptoms[:3]
    ]
    output.print_marked(console, lines)
    if symptoms:
        console.print(f"more: grpo diagnose {run}", style="dim")
