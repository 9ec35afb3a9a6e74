"""How kinds of rewards, tools and environments are printed."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from grpo_cli.cli.output import stdout

if TYPE_CHECKING:
    from grpo_cli.recipe.kinds import KindDescription


def print_kinds(kinds: "Sequence[KindDescription]") -> None:
    """Print a line for each kind."""
    table = Table.grid(padding=(0, 2))
    for kind in kinds:
        table.add_row(Text(kind.kind, style="bold"), Text(kind.summary))
    stdout().print(table)


def print_kind(kind: "KindDescription", section: str = "") -> None:
    """Print all that is known of a kind, under its name and the recipe's section that it is for."""
    console = stdout()
    console.print(Text(f"{kind.kind}, in `{section}`" if section else kind.kind, style="bold"))
    console.print(Text(kind.doc))
    table = Table.grid(padding=(0, 2))
    for parameter in kind.parameters:
        default = "required" if parameter.required else json.dumps(parameter.default)
        table.add_row(Text(f"  {parameter.name}", style="bold"), default, Text(parameter.doc))
    if kind.parameters:
        console.print("\nparameters")
        console.print(table)
