"""`grpo init`: write a recipe to start from."""

from typing import Annotated

import typer


def init(
    name: Annotated[str, typer.Argument(help="Name of the recipe; writes NAME.yaml.")] = "recipe",
    template: Annotated[
        str,
        typer.Option(
            "--template",
            "-t",
            help="What it teaches: quickstart (one-digit sums on a CPU, in minutes), math (a checked answer), "
            "code (programs that pass tests), tools (calls of Python), environment (a game of your own), images "
            "(questions about pictures), format (reasoning between tags), judge (what another model likes), "
            "length (answers of a given length), problem (exact answers).",
        ),
    ] = "quickstart",
) -> None:
    """Write a commented recipe to start from."""
    from grpo_cli.cli.output import stdout
    from grpo_cli.recipe.templates import write_template

    *more, path = write_template(template, name)
    names = " and ".join(map(str, (path, *more)))
    stdout().print(f"wrote {names}; next: grpo check {path}")
