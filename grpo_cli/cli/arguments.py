"""Arguments and options that several commands share."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

_NAMED = "A path, NAME/ID, NAME (its newest) or latest."
RUNS = Path("runs")


def _as_run(given: str) -> Path:
    """Return a path unchanged; take anything else for the name of a run."""
    path = Path(given)
    if path.exists() or path.suffix in (".yaml", ".yml", ".json"):
        return path
    from grpo_cli.runs.selection import find_run

    return find_run(RUNS, given).path


def _as_side(given: str) -> str:
    """Return a result, or a run by its name, with the `:NAME` of a model behind it; a run becomes its path."""
    has_name = ":" in given and not Path(given).exists()
    source, _, name = given.rpartition(":") if has_name else (given, "", "")
    path = os.path.relpath(_as_run(source))
    return f"{path}:{name}" if name else path


def _argument(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, help=text, parser=_as_run)


RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe (YAML).")]
Gpus = Annotated[
    int | None,
    typer.Option(min=0, help="GPUs of the machine that will train, if it is another one."),
]
TrustCheckpoint = Annotated[
    bool,
    typer.Option(
        "--trust-checkpoint",
        help="Read a checkpoint that holds more than tensors and plain values, and run what it holds.",
    ),
]
Run = Annotated[Path, _argument("RUN", _NAMED)]
Runs = Annotated[list[Path], _argument("RUN...", _NAMED)]
EvalSide = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FILE",
        help="A run, by path or name, a result or its folder; RUN:NAME for one of several models.",
        parser=_as_side,
    ),
]
RunOrDir = Annotated[Path, _argument("RUN|DIR", "A run, by path or name, or an exported folder.")]
RunOrRecipe = Annotated[Path, _argument("RUN|RECIPE", "A run, by path or name, or a recipe.")]
RunOrResult = Annotated[
    Path,
    _argument(
        "RUN|FILE", "A run, by path or name, for its newest result; or a result or its folder."
    ),
]
Served = Annotated[
    Path,
    _argument(
        "RUN|DIR|RECIPE",
        "A run, by path or name, or an exported folder; or a recipe, for the server that its "
        "training samples from.",
    ),
]
NewestRun = Annotated[str, typer.Argument(metavar="[RUN]", help=_NAMED)]
SeveralRuns = Annotated[list[str], typer.Argument(metavar="RUN...", help=_NAMED)]
RunsRoot = Annotated[Path, typer.Option("--runs", help="Where run folders are.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Replace a value of the recipe; may be repeated."),
]
NoProbe = Annotated[bool, typer.Option("--no-probe", help="Skip `grpo probe --quick`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AsSlurmJob = Annotated[
    bool, typer.Option("--slurm", help="Submit a Slurm job; with --dry-run, print its script.")
]
