"""`grpo rewards`: the reward kinds, and the rewards of a recipe tried on answers."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column

from grpo_cli.cli import output
from grpo_cli.cli.arguments import AsJson, Overrides, RecipePath
from grpo_cli.errors import ExitCode
from grpo_cli.units import count_noun, format_value

if TYPE_CHECKING:
    from grpo_cli.reward_test.testing import RewardTestResult

app = typer.Typer(help="Reward kinds, and rewards tried on answers.", no_args_is_help=True)


@app.command("list")
def list_rewards(json: AsJson = False) -> None:
    """List every reward kind with what it rewards."""
    from grpo_cli.rewards.registry import list_kinds

    output.show(list_kinds(), output.print_kinds, as_json=json)


@app.command("show")
def show_reward(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="A reward kind.")],
    json: AsJson = False,
) -> None:
    """Show a reward kind: formula, range, source, and its parameters."""
    from grpo_cli.rewards.registry import describe_kind

    output.show(describe_kind(kind), output.print_kind, as_json=json)


@app.command("test")
def score_answers(
    recipe: RecipePath,
    set_: Overrides = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(help="Try this answer too; {{ name }} is a column. May be repeated."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to try.")] = None,
    json: AsJson = False,
) -> None:
    """Score the gold, wrong and degenerate answers to a recipe's own rows, before training.

    Exit code 1 if the gold answer does not win, cannot be parsed, or a degenerate answer scores as well.
    """
    from grpo_cli.checks.recipe import check_recipe
    from grpo_cli.processes import run_in_child
    from grpo_cli.reward_test.run import try_recipe

    with output.stdout_to_stderr(), output.progress("checking the recipe") as report:
        checked = check_recipe(recipe, set_)
        trial = run_in_child(
            lambda tell: try_recipe(checked, rows=rows, answers=answer or (), on_progress=tell),
            report,
        )
    output.show(trial, _print_trial, as_json=json)
    raise typer.Exit(ExitCode.FAILED if trial.failed else ExitCode.OK)


def _print_trial(trial: "RewardTestResult") -> None:
    console = output.stdout()
    names = list(trial.seconds)
    columns = [*names, "total"] if len(names) > 1 else names
    table = output.number_table(Column("answer", style="bold"), columns)
    table.add_column("example", no_wrap=True, overflow="ellipsis", style="dim")
    for result in trial.results:
        scores = [format_value(result.rewards[name]) for name in names]
        total = [format_value(result.total)] if len(names) > 1 else []
        example = " ".join(result.example.split())
        table.add_row(result.name, *scores, *total, example[:60])
    console.print(table)
    console.print(
        f"\n{count_noun(trial.rows, 'row')}; means over the rows a reward applies to", style="dim"
    )
    for name, form in trial.forms.items():
        console.print(
            f"right answers of {name} are written as `{form}`, with the gold of the row for GOLD",
            style="dim",
        )
    slow = [f"{name} {spent:.2g} s" for name, spent in trial.seconds.items() if spent >= 0.05]
    if slow:
        console.print(f"time for a completion: {', '.join(slow)}", style="dim")
    output.print_problems(trial.problems)
    if trial.forms and all(problem.level == "note" for problem in trial.problems):
        console.print(output.marked("ok", "right answers win, and nothing else does"))
