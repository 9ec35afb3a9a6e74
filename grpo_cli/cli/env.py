"""`grpo env`: the kinds of tools and environments."""

from typing import Annotated

import typer

from grpo_cli.cli.arguments import AsJson
from grpo_cli.cli.kinds import print_kind, print_kinds
from grpo_cli.cli.output import print_json, stdout

app = typer.Typer(
    help="Tools and environments, and those of a recipe tried without a model.",
    no_args_is_help=True,
)
_TITLES = {"tools": "tools", "environment": "environments"}


@app.command("list")
def list_environments(json: AsJson = False) -> None:
    """List every kind of tool and environment."""
    from grpo_cli.environments.registry import list_kinds

    kinds = {section: list_kinds(section) for section in _TITLES}
    if json:
        print_json({name: [kind.as_json() for kind in kinds[name]] for name in kinds})
        return
    for section, title in _TITLES.items():
        stdout().print(title)
        print_kinds(kinds[section])


@app.command("show")
def show_environment(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="A kind of tool or environment.")],
    json: AsJson = False,
) -> None:
    """Show a kind of tool or environment, and its parameters."""
    from grpo_cli.environments.registry import describe_kind

    described = describe_kind(kind)
    if json:
        print_json([each.as_json() for each in described])
        return
    for each in described:
        print_kind(each)
