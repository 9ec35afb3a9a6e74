"""How an export looks in a terminal. Computes nothing."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
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
    if result["refined"]:
        console.print(
            "  float32, since a coarser precision would lose much of what was trained; --dtype float16 "
            "is finer than bfloat16, and as small"
        )
    found = result["verification"]
    if found is None:
        console.print(Text("  not verified", style="yellow"))
    else:
        _print_verification(found)
    console.print(f"  folder  {result['path']}", markup=False)
    if result.get("pushed"):
        console.print(f"  pushed  {result['pushed']}", markup=False)


def _print_verification(found: Mapping[str, Any]) -> None:
    console, difference, moved = stdout(), found["difference"], found["moved"]
    console.print(
        f"  logits  differ from the trained model's by {difference['largest']:.2g} at most, "
        f"{difference['mean']:.2g} in the mean (training moved them by {moved['largest']:.2g} and "
        f"{moved['mean']:.2g}; {found['kept']:.1%} of that is kept)"
    )
    console.print(
        f"  greedy  the same text for {found['greedy_same']} of {found['prompts']} prompts"
    )
    tensors = found["tensors"]
    if tensors["all"]:
        console.print(
            f"  weights {tensors['changed']} of {tensors['all']} tensors differ from the base model's"
        )
    for finding in found["findings"]:
        text = f"  {finding['level']}: {finding['seen']}. Fix: {finding['fix']}"
        console.print(text, style="yellow", markup=False)
