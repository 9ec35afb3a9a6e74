"""`grpo check`, `grpo check-batch` and `grpo schema`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Column, Table
from rich.text import Text

from grpo_cli.cli.arguments import AsJson, Gpus, Overrides, RecipePath
from grpo_cli.cli.output import marked, print_json, print_problems, stderr, stdout
from grpo_cli.errors import ExitCode
from grpo_cli.units import count_noun

if TYPE_CHECKING:
    from grpo_cli.batch.explanation import Misreading
    from grpo_cli.batch.plan import BatchPlan
    from grpo_cli.checks.recipe import CheckedRecipe
    from grpo_cli.data.preview import Preview


def check(
    recipe: RecipePath,
    set_: Overrides = None,
    gpus: Gpus = None,
    environment: Annotated[
        bool, typer.Option(help="Treat packages missing on this machine as errors.")
    ] = True,
    json: AsJson = False,
) -> None:
    """Check a recipe without loading a model: schema, batch sizes, columns, rewards, paths.

    `--gpus 8 --no-environment` checks it for another machine.
    """
    from grpo_cli.checks.recipe import check_recipe
    from grpo_cli.errors import RecipeError
    from grpo_cli.machine import read_hardware

    checked = check_recipe(recipe, set_, read_hardware(gpus), environment=environment)
    if json:
        print_json(checked.as_json())
        raise typer.Exit(RecipeError(checked.errors).exit_code if checked.errors else ExitCode.OK)
    print_problems(problem for problem in checked.problems if problem.level != "error")
    _print_check(checked, there=gpus is not None)


def _print_check(checked: "CheckedRecipe", *, there: bool) -> None:
    """Print what was read; `there` is whether another machine trains."""
    from grpo_cli.models.vllm_engine import describe_weights
    from grpo_cli.recipe.recipe import describe_fast

    console, recipe, seen = stdout(), checked.recipe, checked.preview
    table = Table.grid(padding=(0, 2))
    trained = "LoRA" if recipe.model.lora else "all weights"
    table.add_row("model", f"{recipe.model.path} ({trained})")
    for name, stage in recipe.stages.items():
        table.add_row(name, stage)
    table.add_row("dataset", f"{recipe.dataset.kind}: {_count_rows(checked)}")
    if seen is not None and seen.sources:
        table.add_row("sources", _describe_sources(recipe.dataset, seen))
    if (difficulty := recipe.dataset.difficulty) is not None:
        where = " (the shares and draws above are where it begins)" if recipe.dataset.shares else ""
        table.add_row("difficulty", f"{difficulty.kind}{where}")
    if seen is not None and seen.columns is not None:
        columns = seen.columns.union(*(each.columns for each in recipe.dataset.parts))
        table.add_row("columns", ", ".join(sorted(columns)))
    rewards = ", ".join(f"{one.name or one.kind} × {one.weight:g}" for one in recipe.rewards)
    if rewards or recipe.teacher is None:
        table.add_row("rewards", rewards or _describe_groups(checked))
    if checked.batch is not None:
        table.add_row("batch", _describe_batch(checked.batch))
    if recipe.generation.backend == "vllm":
        device: Literal["cpu", "cuda"] = "cpu" if checked.on_cpu else "cuda"
        weights = describe_weights(recipe, device)
        table.add_row("vllm", f"{recipe.generation.vllm.mode}, {weights}")
    table.add_row(
        "fast", f"{describe_fast(recipe, cpu=checked.on_cpu)} (tried on the model at step 1)"
    )
    console.print(table)
    path, where = checked.loaded.source, " there" if there else ""
    if not checked.unseen:
        console.print(marked("ok", f"{path} is ready: grpo train {path}{where}"))
        return
    console.print(marked("ok", f"{path} passes the checks; not checked:"))
    for each in checked.unseen:
        console.print(f"  {each}")
    console.print(f"next{where}: grpo probe --quick {path}, or grpo train {path}")


def _count_rows(checked: "CheckedRecipe") -> str:
    seen, is_streamed = checked.preview, checked.recipe.dataset.streams is not None
    if seen is None or (seen.train_rows is None and not is_streamed):
        return "not checked"
    about = "" if seen.is_exact else "about "
    held_out = f", {about}{seen.eval_rows:,} held out" if seen.eval_rows else ""
    drawn = " an epoch" if seen.sources else ""
    prompts = (
        "streamed"
        if seen.train_rows is None
        else f"{about}{count_noun(seen.train_rows, 'prompt')}{drawn}"
    )
    return f"{prompts}{held_out}"


def _describe_sources(dataset: Any, seen: "Preview") -> str:
    parts = []
    for (name, share), size in zip(dataset.shares.items(), seen.sources, strict=True):
        # An epoch ends when every row has been drawn.
        times = max(share * seen.train_rows / size, 1.0) if size and seen.train_rows else None
        often = f"{times:.2g} times" if times else ""
        often = "once" if often == "1 times" else often
        rows = f" ({size:,} rows, each about {often})" if often else ""
        parts.append(f"{name} {share:.0%}{rows}")
    return ", ".join(parts)


def _describe_groups(checked: "CheckedRecipe") -> str:
    groups = checked.preview.groups if checked.preview else None
    if groups is None:
        return "in the rows"
    return f"in the rows: {groups.smallest} to {groups.largest} responses a prompt, median {groups.median}"


def _describe_batch(plan: "BatchPlan") -> str:
    steps = (
        f", {count_noun(plan.total_optimizer_steps, 'step')}" if plan.total_optimizer_steps else ""
    )
    processes = count_noun(plan.num_processes, "process")
    return f"{plan.completions_per_optimizer_step:,} completions a step on {processes}{steps}"


def check_batch(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="The recipe (YAML).")
    ] = None,
    set_: Overrides = None,
    per_device_train_batch_size: Annotated[int | None, typer.Option()] = None,
    gradient_accumulation_steps: Annotated[int | None, typer.Option()] = None,
    num_processes: Annotated[int | None, typer.Option()] = None,
    num_generations: Annotated[int | None, typer.Option()] = None,
    steps_per_generation: Annotated[int | None, typer.Option()] = None,
    generation_batch_size: Annotated[int | None, typer.Option()] = None,
    num_iterations: Annotated[int | None, typer.Option()] = None,
    gpus: Gpus = None,
    dataset_size: Annotated[int | None, typer.Option(help="Training prompts.")] = None,
    num_train_epochs: Annotated[float | None, typer.Option()] = None,
    max_steps: Annotated[int | None, typer.Option()] = None,
    per_device_eval_batch_size: Annotated[
        int | None, typer.Option(help="Check the evaluation rule too.")
    ] = None,
    num_generations_eval: Annotated[int | None, typer.Option()] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add common misreadings, with their numbers here.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check that batch sizes, group size and processes fit together, and derive the number of steps.

    Takes the numbers from a recipe, from flags, or from both; flags win.
    """
    flags = locals()
    from grpo_cli.batch.explanation import find_misreadings
    from grpo_cli.batch.plan import BatchInputs, as_json
    from grpo_cli.checks.batch import plan_from_flags

    known = BatchInputs.__annotations__
    given = {name: value for name, value in flags.items() if name in known}
    plan = plan_from_flags(recipe, set_, given, gpus)
    misread = find_misreadings(plan) if explain else []
    if json:
        explained = {"misreadings": [each.as_json() for each in misread]} if explain else {}
        print_json(as_json(plan) | explained)
    else:
        _print_batch(plan)
        _print_misreadings(misread)
    raise typer.Exit(ExitCode.OK if plan.valid else ExitCode.FAILED)


def _print_batch(plan: "BatchPlan") -> None:
    from grpo_cli.batch.explanation import derive

    console = stdout()
    table = Table.grid("", Column(style="dim"), "", Column(style="dim"), padding=(0, 2))
    for line in derive(plan):
        result = Text.assemble("= ", (line.result, "bold"))
        table.add_row(line.label, line.formula, result, line.note)
    console.print(table)
    for suggestion in plan.suggestions:
        values = " or ".join(map(str, suggestion.nearest))
        rest = "" if suggestion.complete else " (fixes this, but not everything)"
        console.print(f"  {suggestion.knob}: {suggestion.value} → {values}{rest}")
    if plan.valid:
        console.print(marked("ok", "the batch sizes fit together"))
    # The table above already shows every fix for these.
    for problem in plan.problems:
        if plan.suggestions:
            stderr().print(f"error: {problem.path}: {problem.seen}", style="red")
        else:
            print_problems([problem])


_RIGHT_HERE = {False: "  [wrong here]", True: "  [happens to be right here]", None: ""}


def _print_misreadings(misreadings: "list[Misreading]") -> None:
    console = stdout()
    if misreadings:
        console.print("\ncommon misreadings")
    for each in misreadings:
        console.print(Text.assemble(("✗ ", "red"), (f"“{each.claim}”", "bold")))
        console.print(f"    would give  {each.claimed.text}{_RIGHT_HERE[each.right_here]}")
        console.print(f"    is          {each.actual.text}")
        console.print(f"    because     {each.because} ({each.source})", style="dim")


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Print the JSON Schema of recipes, for editors."""
    from grpo_cli.checks.schema import build_schema, write_schema

    if output is None:
        print_json(build_schema())
    else:
        write_schema(output)
