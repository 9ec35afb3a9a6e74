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
            help="quickstart, math, code, tools, environment, images, format, judge, length or problem.",
        ),
    ] = "quickstart",
) -> None:
    """Write a commented recipe to start from."""
    from grpo_cli.cli.output import stdout
    from grpo_cli.recipe.templates import write_template

    *more, path = write_template(template, name)
    names = " and ".join(map(str, (path, *more)))
    stdout().print(f"wrote {names}; next: grpo check {path}")
