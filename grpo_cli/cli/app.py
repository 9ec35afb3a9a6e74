"""The `grpo` command: registers the subcommands, which import what they need in function bodies."""

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from grpo_cli import __version__
from grpo_cli.cli.errors import run_guarded

COMMANDS = {
    "init": "init",
    "check": "check",
    "check-batch": "check",
    "probe": "probe",
    "train": "train",
    "sweep": "sweep",
    "schema": "check",
    "doctor": "doctor",
    "eval": "eval",
    "expect": "expect",
    "export": "export",
    "convert": "convert",
    "diagnose": "diagnose",
    "report": "report",
    "watch": "watch",
    "serve": "serve",
    "chat": "serve",
    "runs": "runs",
    "rewards": "rewards",
    "env": "env",
}
"""The module of each command, or group of commands, in the order of `grpo --help`."""


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with these commands."""
    app = typer.Typer(
        callback=_root,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in names:
        module = import_module(f"grpo_cli.cli.{COMMANDS[name]}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name.replace("-", "_")))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"grpo {__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train, measure and ship language models with GRPO, from YAML recipes."""


def main() -> None:
    """Entry point of the `grpo` command; loads the command that is meant, or all for help."""
    first = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    app = make_app([first] if first in COMMANDS else COMMANDS)
    sys.exit(run_guarded(lambda: app(prog_name="grpo", standalone_mode=False)))
