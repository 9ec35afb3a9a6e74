"""`grpo convert`: parses, calls one function, and prints its result."""

from pathlib import Path
from typing import Annotated

import typer

from grpo_cli.cli.arguments import AsJson
from grpo_cli.errors import ExitCode


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Another tool's YAML, a Python script that trains with TRL, or a recipe.",
        ),
    ],
    from_: Annotated[
        str | None,
        typer.Option("--from", help="trl, open-r1 or axolotl; by default told by the keys."),
    ] = None,
    to: Annotated[str, typer.Option(help="recipe, or trl for `trl grpo --config`.")] = "recipe",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a new file instead of stdout.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Turn a GRPO config of TRL, open-r1 or axolotl into a recipe, or a recipe into TRL's.

    A script (`train.py`) is read, not run. Every key is mapped, left to do, or listed as dropped with the
    reason. Exit code 1 where the result is written and cannot be used as it is.
    """
    from grpo_cli.cli import conversion_view
    from grpo_cli.cli import output as streams
    from grpo_cli.convert.conversion import convert_file

    with streams.stdout_to_stderr():
        converted = convert_file(file, from_, to, output)
    if json:
        streams.print_json(converted.as_json())
    else:
        conversion_view.print_conversion(converted)
    raise typer.Exit(ExitCode.OK if converted.valid else ExitCode.FAILED)
