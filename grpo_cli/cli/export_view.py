"""How an export looks in a terminal. Computes nothing."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from grpo_cli.cli.output import stderr, stdout
from grpo_cli.cli.views import count_noun
from grpo_cli.units import format_bytes


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows on stderr what is being done, and for how long."""
    console = stderr()
    if not console.is_terminal:
        started = time.monotonic()
        yield lambda what: console.print(
            f"· {what} ({time.monotonic() - started:.0f}s)", markup=False
        )
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting")
        yield lambda what: bars.update(task, description=what)


def print_result(result: Mapping[str, Any]) -> None:
    """Prints where the export is, and what was checked of it."""
    console = stdout()
    precision = f", {result['precision']}" if result["precision"] else ""
    console.print(
        Text.assemble(
            ("✓ ", "green"),
            f"exported {result['model']} as {result['format']}{precision}: "
            f"{count_noun(len(result['files']), 'file')}, {format_bytes(result['bytes'])}",
        )
    )
    found = result["verification"]
    if found is not None and "instead_of" in found:
        coarse = found["instead_of"]
        _say(
            f"{result['precision']}, since {coarse['dtype']} keeps {coarse['kept']:.0%} of what training "
            "changed; --dtype float16 is finer, and as small"
        )
    if found is None:
        console.print(Text("  not verified", style="yellow"))
    else:
        _print_verification(found)
    for each in result["warnings"]:
        _say(f"warning: {each['seen']}. Fix: {each['fix']}", style="yellow")
    console.print(f"  folder  {result['path']}", markup=False)
    if result.get("pushed"):
        console.print(f"  pushed  {result['pushed']}", markup=False)


def _print_verification(found: Mapping[str, Any]) -> None:
    difference, moved, tensors = found["difference"], found["moved"], found["tensors"]
    _say(
        f"logits  {difference['largest']:.2g} off the trained model's at most, {difference['mean']:.2g} in "
        f"the mean; training moved them by {moved['largest']:.2g} and {moved['mean']:.2g}, and "
        f"{found['kept']:.1%} of that is kept"
    )
    _say(f"greedy  the same first tokens for {found['greedy_same']} of {found['prompts']} prompts")
    if tensors["all"]:
        _say(
            f"weights {tensors['changed']} of {tensors['all']} tensors differ from the base model's"
        )
    for finding in found["findings"]:
        _say(f"{finding['level']}: {finding['seen']}. Fix: {finding['fix']}", style="yellow")


def _say(text: str, style: str | None = None) -> None:
    """A line of the result, broken between words and indented."""
    console = stdout()
    console.print(Padding(Text(text, style=style or ""), (0, 0, 0, 2)), soft_wrap=False)
