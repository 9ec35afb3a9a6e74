"""The `grpo` command: registers the subcommands, which import what they need in function bodies."""

import sys
from typing import Annotated

import typer

from grpo_cli import __version__
from grpo_cli.cli import (
    check,
    convert,
    diagnose,
    doctor,
    env,
    eval,
    expect,
    export,
    probe,
    report,
    rewards,
    runs,
    serve,
    sweep,
    train,
    watch,
)
from grpo_cli.cli.errors import run_guarded

app = typer.Typer(
    help="Train, measure and ship language models with GRPO, from YAML recipes.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"grpo {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train, measure and ship language models with GRPO, from YAML recipes."""


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the recipe; writes NAME.yaml.")] = "recipe",
    template: Annotated[
        str,
        typer.Option(
            "--template",
            "-t",
            help="quickstart, math, code, tools, environment, format, judge, length or problem.",
        ),
    ] = "quickstart",
) -> None:
    """Write a commented recipe to start from."""
    from grpo_cli.cli.output import stdout
    from grpo_cli.recipe.templates import write_template

    *more, path = write_template(template, name)
    names = " and ".join(map(str, (path, *more)))
    stdout().print(f"wrote {names}; next: grpo check {path}", markup=False)


app.command()(check.check)
app.command("check-batch")(check.check_batch)
app.command()(probe.probe)
app.command()(train.train)
app.command()(sweep.sweep)
app.command()(check.schema)
app.command()(doctor.doctor)
app.add_typer(eval.app, name="eval")
app.command()(expect.expect)
app.command()(export.export)
app.command()(convert.convert)
app.command()(diagnose.diagnose)
app.command()(report.report)
app.command()(watch.watch)
app.command()(serve.serve)
app.command()(serve.chat)
app.add_typer(runs.app, name="runs")
app.add_typer(rewards.app, name="rewards")
app.add_typer(env.app, name="env")


def main() -> None:
    """Entry point of the `grpo` command."""
    sys.exit(run_guarded(lambda: app(prog_name="grpo", standalone_mode=False)))
