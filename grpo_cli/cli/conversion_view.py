"""How a conversion looks in a terminal: the YAML on stdout, the account of it on stderr. Computes nothing."""

import sys
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.text import Text

from grpo_cli.cli.output import print_problems, stderr
from grpo_cli.cli.views import count_noun
from grpo_cli.convert.dialects import TOOLS

if TYPE_CHECKING:
    from grpo_cli.convert.conversion import Conversion


def print_conversion(converted: "Conversion") -> None:
    """Prints the YAML, unless it went to a file, and says what was done to make it."""
    if converted.output is None:
        sys.stdout.write(converted.text)
        sys.stdout.flush()
    if converted.to == "trl":
        _print_lost(converted)
    else:
        _print_account(converted)
    print_problems(converted.problems)
    _print_verdict(converted)


def _print_account(converted: "Conversion") -> None:
    console, known = stderr(), converted.recognition
    if known is not None:
        how = f"told by {', '.join(known.signs)}" if known.signs else "as --from says"
        console.print(
            f"{converted.source}: a config of {TOOLS[known.dialect]} ({how})", markup=False
        )
    moved = [entry for entry in converted.mapped if _is_translated(entry.key, entry.target)]
    if moved:
        console.print(f"{count_noun(len(moved), 'key')} with another name or place:")
        for entry in moved:
            note = f" ({entry.note})" if entry.note else ""
            console.print(f"  {entry.key} → {entry.target}{note}", markup=False)
    if converted.dropped:
        console.print(f"{count_noun(len(converted.dropped), 'key')} dropped:")
        for entry in converted.dropped:
            console.print(f"  {entry.location}: {entry.key}: {entry.note}", markup=False)
    for target, text in converted.to_do.items():
        said = text.partition("\n")[0]
        console.print(Text.assemble(("to do: ", "yellow"), f"{target}: {said}"))


def _is_translated(key: str, target: str | None) -> bool:
    return (target or "").rpartition(".")[2] != key.rpartition(".")[2]


def _print_lost(converted: "Conversion") -> None:
    if converted.lost:
        stderr().print("what TRL's command line cannot express:")
    for key, reason in converted.lost:
        stderr().print(f"  {key}: {reason}", markup=False)


def _print_verdict(converted: "Conversion") -> None:
    console = stderr()
    where = escape(str(converted.output or "-o FILE writes it"))
    if converted.to == "trl":
        if converted.valid:
            shown = escape(str(converted.output or "FILE"))
            console.print(f"[green]✓[/] run it with: trl grpo --config {shown}")
        return
    errors = sum(problem.level == "error" for problem in converted.problems)
    if errors:
        console.print(
            f"[red]✗[/] {count_noun(errors, 'problem')} to mend before the recipe passes `grpo check` ({where})"
        )
    else:
        left = ", once what is to do is written" if converted.to_do else ""
        console.print(f"[green]✓[/] the recipe passes `grpo check`{left} ({where})")
