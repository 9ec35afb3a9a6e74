"""How a batch looks in a terminal: the sum on paper, and what is often read otherwise. Computes nothing."""

from rich.table import Table
from rich.text import Text

from grpo_cli.batch import BatchPlan, Misreading, derive
from grpo_cli.cli.output import print_problems, stderr, stdout


def print_batch(plan: BatchPlan) -> None:
    """Prints the derivation as one would write it on paper, then the verdict."""
    console = stdout()
    table = Table.grid(padding=(0, 2))
    for line in derive(plan):
        table.add_row(
            line.label,
            f"[dim]{line.formula}[/]",
            f"= [bold]{line.result}[/]",
            f"[dim]{line.note}[/]",
        )
    console.print(table)
    for suggestion in plan.suggestions:
        values = " or ".join(map(str, suggestion.nearest))
        rest = "" if suggestion.complete else " (mends this, but not all)"
        console.print(f"  {suggestion.knob}: {suggestion.value} → {values}{rest}")
    if plan.valid:
        console.print("[green]✓[/] the batch sizes fit together")
    # The table above already holds every way to mend these.
    for problem in plan.problems:
        if plan.suggestions:
            stderr().print(f"error: {problem.path}: {problem.message}", style="red", markup=False)
        else:
            print_problems([problem])


_MARKS = {
    False: ("✗", "red", "wrong here"),
    True: ("≈", "yellow", "right here all the same"),
    None: ("·", "cyan", ""),
}


def print_misreadings(misreadings: list[Misreading]) -> None:
    """Prints each misreading with its number, what is, and why."""
    console = stdout()
    if misreadings:
        console.print("\noften read otherwise")
    for each in misreadings:
        mark, style, verdict = _MARKS[each.right_here]
        console.print(Text(f"{mark} ", style=style).append(f"“{each.claim}”", style="default bold"))
        would = f"{each.claimed.text}{f'  [{verdict}]' if verdict else ''}"
        console.print(Text(f"    would give  {would}"))
        console.print(Text(f"    is          {each.actual.text}"))
        console.print(Text(f"    because     {each.because} ({each.source})", style="dim"))
