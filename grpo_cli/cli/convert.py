"""`grpo convert`: prints the YAML on stdout, and what was done to make it on stderr."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from grpo_cli.cli.arguments import AsJson
from grpo_cli.cli.output import marked, print_problems, show, stderr, stdout_to_stderr
from grpo_cli.errors import ExitCode, UsageError
from grpo_cli.units import count_noun

if TYPE_CHECKING:
    from grpo_cli.convert.conversion import Conversion
    from grpo_cli.convert.key_report import KeyReport

_TO_TRL = (
    "Fix: to train a recipe with `trl grpo --config`, copy its keys under `training:`, `generation:` and "
    "`logging:`, which are TRL's own, and those under `generation.vllm:` with the prefix `vllm_`"
)


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Another tool's YAML, or a Python script, notebook or shell script that trains.",
        ),
    ],
    from_: Annotated[
        str | None,
        typer.Option("--from", help="trl, open-r1, axolotl or ms-swift; recognised by default."),
    ] = None,
    to: Annotated[str, typer.Option(hidden=True)] = "recipe",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a new file instead of stdout.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Turn a GRPO config of TRL, open-r1, axolotl or ms-swift into a recipe.

    Scripts and notebooks are read, not run. Every key is mapped, marked TO DO, or listed as dropped with the
    reason. Exit code 1 if the result is written but has errors or lines TO DO.
    """
    from grpo_cli.convert.conversion import convert_file

    if to != "recipe":
        raise UsageError(
            f"`--to {to}` is not supported: configs are converted to recipes. {_TO_TRL}"
        )
    with stdout_to_stderr():
        converted = convert_file(file, from_, output)
    show(converted, _print_conversion, as_json=json)
    raise typer.Exit(ExitCode.OK if converted.valid else ExitCode.FAILED)


def _print_conversion(converted: "Conversion") -> None:
    if converted.output is None:
        sys.stdout.write(converted.text)
        sys.stdout.flush()
    _print_keys(converted.source, converted.report)
    print_problems(converted.problems)
    _print_verdict(converted)


def _print_keys(source: Path, report: "KeyReport") -> None:
    console = stderr()
    how = f"recognised by {', '.join(report.signs)}" if report.signs else "as --from says"
    console.print(f"{source}: a config of {report.tool} ({how})")
    moved = [
        entry
        for entry in report.entries
        if entry.target and entry.target.rpartition(".")[2] != entry.key.rpartition(".")[2]
    ]
    if moved:
        console.print(f"{count_noun(len(moved), 'setting')} with another name or place:")
    for entry in moved:
        note = f" ({entry.note})" if entry.note else ""
        console.print(f"  {entry.key} → {entry.target}{note}")
    if report.dropped:
        console.print(f"{len(report.dropped)} not taken over:")
    for entry in report.dropped:
        console.print(f"  {entry.location}: {entry.key}: {entry.note}")
    if report.notes:
        texts = ", ".join(f"{target} {text}" for target, text in report.notes.items())
        about = "different in earlier versions of TRL, and not set or changed: "
        console.print(Text.assemble(("note: ", "blue"), f"{about}{texts}"))
    for target, text in report.to_do.items():
        first_line = text.partition("\n")[0]
        console.print(Text.assemble(("to do: ", "yellow"), f"{target}: {first_line}"))


def _print_verdict(converted: "Conversion") -> None:
    console = stderr()
    where = converted.output or "-o FILE writes it"
    errors = sum(problem.level == "error" for problem in converted.problems)
    parts = [f"{count_noun(errors, 'error')} to fix"] if errors else []
    if converted.report.to_do:
        parts.append(f"{count_noun(len(converted.report.to_do), 'TO DO line')} to write")
    if parts:
        text = f"{' and '.join(parts)} before the recipe passes `grpo check` ({where})"
        console.print(marked("error" if errors else "warning", text))
    else:
        console.print(marked("ok", f"the recipe passes `grpo check` ({where})"))
