"""`grpo env`: the kinds of tools and environments, and those of a recipe tried without a model."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from grpo_cli.cli import output
from grpo_cli.cli.arguments import AsJson, Overrides, RecipePath
from grpo_cli.errors import ExitCode
from grpo_cli.units import count_noun, format_value

if TYPE_CHECKING:
    from grpo_cli.env_test.agents import AgentResult
    from grpo_cli.env_test.testing import EnvironmentTestResult

app = typer.Typer(
    help="Tools and environments, and those of a recipe tried without a model.",
    no_args_is_help=True,
)
_QUICK = ("the class", "gold()", "reward()", "close()")
"""Calls whose times are printed only if one is slow."""
_SLOW_S = 0.1
_TITLES = {"tools": "tools", "environment": "environments"}


@app.command("list")
def list_environments(json: AsJson = False) -> None:
    """List every kind of tool and environment."""
    from grpo_cli.environments.registry import list_kinds

    kinds = {section: list_kinds(section) for section in _TITLES}
    if json:
        output.print_json({name: [kind.as_json() for kind in kinds[name]] for name in kinds})
        return
    for section, title in _TITLES.items():
        output.stdout().print(title)
        output.print_kinds(kinds[section])


@app.command("show")
def show_environment(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="A kind of tool or environment.")],
    json: AsJson = False,
) -> None:
    """Show a kind of tool or environment, and its parameters."""
    from grpo_cli.environments.registry import describe_kind

    described = describe_kind(kind)
    if json:
        output.print_json([{"section": name, **each.as_json()} for name, each in described.items()])
        return
    for section, each in described.items():
        output.print_kind(each, section)


@app.command("test")
def try_environments(
    recipe: RecipePath,
    set_: Overrides = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to try.")] = None,
    json: AsJson = False,
) -> None:
    """Try a recipe's tools and environments without a model: alone, side by side, and with scripted agents.

    Exit code 1 if something is wrong, such as an environment that fails, or an agent that plays wrong and wins.
    """
    from grpo_cli.checks.recipe import check_recipe
    from grpo_cli.env_test.run import try_recipe
    from grpo_cli.processes import run_in_child

    with output.stdout_to_stderr(), output.progress("checking the recipe") as report:
        checked = check_recipe(recipe, set_)
        result = run_in_child(lambda tell: try_recipe(checked, rows=rows, on_progress=tell), report)
    output.show(result, _print_result, as_json=json)
    raise typer.Exit(ExitCode.FAILED if result.failed else ExitCode.OK)


def _print_result(result: "EnvironmentTestResult") -> None:
    console = output.stdout()
    for tool in result.tools:
        arguments = ", ".join(f"{name}: {kind}" for name, kind in tool.arguments.items())
        line = Text(f"{tool.name}({arguments})", style="bold")
        console.print(line.append(f"  {tool.description[:80]}", style="dim not bold"))
    if result.tools:
        console.print()
    if result.agents:
        console.print(_agents_table(result.agents))
        console.print()
    times = [
        f"{name} {_milliseconds(each.median)} (worst {_milliseconds(each.worst)})"
        for name, each in result.latency.items()
        if name not in _QUICK or each.worst >= _SLOW_S
    ]
    if times:
        console.print(f"time of a call: {', '.join(times)}", style="dim")
    if tokens := result.result_tokens:
        lengths = f"tokens of a result: {tokens.median:g} (median of {tokens.results}), at most {tokens.longest}"
        console.print(lengths, style="dim")
    if result.images:
        sizes = ", ".join(f"{count} of {size}" for size, count in result.images.items())
        shown = f"images returned as each was tried by itself, before agents played: {sizes} pixels"
        console.print(shown, style="dim")
    rows = f"{count_noun(result.rows, 'row')}, an episode of each"
    console.print(result.skipped or rows, style="dim")
    output.print_problems(result.problems)
    if result.agents and not result.failed:
        has_gold = any(agent.name == "gold" for agent in result.agents)
        no_gold = "no errors, but see above" if result.problems else "nothing is wrong"
        no_gold += "; whether playing right wins was not tried: there is no gold"
        verdict = "the gold wins, and nothing else does" if has_gold else no_gold
        console.print(output.marked("ok", verdict))


def _agents_table(agents: "tuple[AgentResult, ...]") -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("agent", style="bold", no_wrap=True)
    for name in ("reward", "turns"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("ended by", "failed calls"):
        table.add_column(name, no_wrap=True)
    table.add_column("first answer", no_wrap=True, overflow="ellipsis", style="dim")
    for agent in agents:
        table.add_row(
            agent.name,
            format_value(agent.reward),
            f"{agent.turns:.1f}",
            _counts(agent.ends),
            _counts(agent.failures),
            " ".join(agent.answer.split())[:60],
        )
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
