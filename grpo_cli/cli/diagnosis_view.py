"""How a diagnosis and the table of rules look in a terminal. Computes nothing."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from grpo_cli.cli.output import stderr, stdout
from grpo_cli.cli.views import LEVEL_MARKS, count_noun, print_marked

if TYPE_CHECKING:
    from grpo_cli.analysis.diagnosis.diagnosis import Diagnosis
    from grpo_cli.analysis.diagnosis.rule import Rule
    from grpo_cli.analysis.diagnosis.symptom import Symptom

_MOST_SHOWN = 3
"""Symptoms at the end of a training; `grpo diagnose` shows all."""


def print_diagnosis(found: "Diagnosis") -> None:
    """Prints the verdict, then every symptom, then what could not be looked at."""
    console = stdout()
    console.print(_say_verdict(found))
    for symptom in found.symptoms:
        console.print()
        _print_symptom(console, symptom)
    if found.obstacles:
        console.print()
        _print_obstacles(console, found.obstacles)


def _say_verdict(found: "Diagnosis") -> Text:
    looked = found.rules - len(found.obstacles)
    serious = [each for each in found.symptoms if each.level != "note"]
    if not looked:
        return Text("· too little was logged to say anything", style="cyan")
    if not serious:
        notes = len(found.symptoms)
        more = f"; {count_noun(notes, 'note')}" if notes else ""
        if 2 * looked < found.rules:
            # Too few have looked to call it well.
            told = f"· {looked} of {found.rules} rules could look, and saw nothing wrong{more}"
            return Text(told, style="cyan")
        rules = count_noun(looked, "rule")
        return Text.assemble(("✓", "green"), f" nothing is wrong that {rules} could see{more}")
    mark, style = LEVEL_MARKS["error" if found.errors else "warning"]
    return Text(f"{mark} {count_noun(len(serious), 'problem')}", style=style)


def _print_symptom(console: Console, symptom: "Symptom") -> None:
    mark, style = LEVEL_MARKS[symptom.level]
    head = Text.assemble((f"{mark} ", style), (symptom.rule, "bold"), f"  at step {symptom.step}")
    console.print(head)
    lines = (
        Text(symptom.seen),
        Text(symptom.why, style="dim"),
        Text.assemble(("Fix: ", "bold"), symptom.fix),
    )
    for line in lines:
        if console.is_terminal:
            console.print(Padding(line, (0, 0, 0, 2)), soft_wrap=False)
        else:
            console.print(Text.assemble("  ", line), soft_wrap=True)


def _print_obstacles(console: Console, obstacles: Mapping[str, str]) -> None:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for rule, why in obstacles.items():
        by_reason[why].append(rule)
    for why, names in by_reason.items():
        console.print(Text(f"not looked for: {', '.join(names)} ({why})", style="dim"))


def print_rules(rules: "Iterable[Rule]") -> None:
    """Prints what is looked for, where, from what value on, and by whose word."""
    console = stdout()
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
    """Prints the worst of a run that has ended to stderr, and where there is more."""
    console = stderr()
    told = [
        (each.level, Text.assemble((f"{each.rule}: ", "bold"), f"{each.seen}. Fix: {each.fix}"))
        for each in symptoms[:_MOST_SHOWN]
    ]
    print_marked(console, told)
    if symptoms:
        console.print(f"more: grpo diagnose {run}", markup=False, soft_wrap=True, style="dim")
