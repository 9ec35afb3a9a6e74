"""How bands and verdicts look in a terminal. Computes nothing."""

import math
import sys
from typing import TYPE_CHECKING

from rich.text import Text

from grpo_cli.cli.output import stderr, stdout

if TYPE_CHECKING:
    from grpo_cli.analysis.expectations.verdicts import Comparison, Verdict
    from grpo_cli.analysis.expectations.writing import Written

_STYLES = {"inside": "green", "outside": "bold red"}
_MOST_DECIMALS = 6


def print_written(written: "Written") -> None:
    """Prints a block as YAML that can be appended to a recipe; what to know of it to stderr."""
    from grpo_cli.recipe.writing import write_expect

    # A line apart from whatever stands before it.
    sys.stdout.write(f"\n{write_expect(written.expect)}")
    for note in written.notes:
        stderr().print(f"note: {note}", style="cyan", markup=False)


def print_comparisons(comparisons: "list[Comparison]") -> None:
    """Prints how runs lie to their bands, each under its name."""
    for comparison in comparisons:
        ended = "" if comparison.state == "completed" else f" ({comparison.state})"
        stdout().print(Text(f"{comparison.run}{ended}", style="bold"))
        print_verdicts(comparison, indent="  ")


def print_verdicts(comparison: "Comparison", indent: str = "") -> None:
    """Prints a line for each metric, then where the run's conditions are not those of the bands."""
    console = stdout()
    for verdict in comparison.verdicts:
        line = Text(f"{indent}expected  {verdict.metric} at step {verdict.step}: ")
        console.print(line.append(_say(verdict)))
    for mismatch in comparison.mismatches:
        console.print(Text(f"{indent}          {mismatch}", style="dim"))
    if comparison.runs == 1:
        note = "the bands come from one run: a guess at its own noise, not at what another seed changes"
        console.print(Text(f"{indent}          {note}", style="dim"))


def _say(verdict: "Verdict") -> Text:
    style, detail = _STYLES.get(verdict.outcome, "yellow"), verdict.detail
    if verdict.value is None:
        return Text(f"{verdict.outcome}{f' ({detail})' if detail else ''}", style=style)
    word = "OUTSIDE" if verdict.outcome == "outside" else verdict.outcome
    value, low, high = _format(verdict.value, verdict.low, verdict.high)
    text = Text(f"{value}, ").append(f"{word} {low} to {high}", style=style)
    return text.append(f" ({detail})") if detail else text


def _format(*values: float) -> list[str]:
    """Numbers in one form: so many decimals that the ends of the band are told apart."""
    low, high = values[-2:]
    decimals = 3 if high <= low else max(3, 2 - math.floor(math.log10(high - low)))
    if decimals > _MOST_DECIMALS:
        return [f"{value:.6g}" for value in values]
    return [f"{value:.{decimals}f}" for value in values]
