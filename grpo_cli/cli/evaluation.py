"""`grpo eval`: the commands. Each body parses, calls one function, and hands on its result."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from grpo_cli.cli.arguments import AsJson, Overrides, RunOrRecipe, RunOrResult
from grpo_cli.errors import ExitCode


class _MeasuresByDefault(TyperGroup):
    """`grpo eval RUN` is `grpo eval measure RUN`: what is no command is something to measure."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the command in its place; help without one is that of measuring, which names the others."""
        if not args or args[0] not in self.commands:
            args = ["measure", *(args or ["--help"])]
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="Measure a model with its recipe's own prompts and rewards, beside a baseline.",
    cls=_MeasuresByDefault,
)
FailUnder = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC=VALUE",
        help="Exit with 1 below it: accuracy=0.5, gain/accuracy=0. May be repeated.",
    ),
]
Harness = Annotated[
    str | None, typer.Option(help="lm-eval: run standard benchmarks on the same models too.")
]
Tasks = Annotated[
    str | None, typer.Option(help="The harness's tasks, with commas, or YAML files of tasks.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Completions sampled at a time on each device.")
]
NumProcesses = Annotated[
    int | None, typer.Option(min=1, help="One for each GPU where not given; 1 on a CPU.")
]


@app.command()
def measure(
    source: RunOrRecipe,
    set_: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Measure this folder or hub id with the recipe.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="A step of the run, all or best.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this folder or hub id; none leaves it out.")
    ] = None,
    split: Annotated[str, typer.Option(help="eval or train.")] = "eval",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts to measure on.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Completions for each prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of sampling and of the bootstrap.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="transformers or vllm.")] = None,
    batch_size: BatchSize = None,
    num_processes: NumProcesses = None,
    out: Annotated[Path | None, typer.Option(help="Folder for samples and result.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted one.")
    ] = False,
    harness: Harness = None,
    tasks: Tasks = None,
    fail_under: FailUnder = None,
    json: AsJson = False,
) -> None:
    """Measure the models of a run, or a model with a recipe, and the gain over a baseline.

    Greedy, unless the recipe or --temperature says otherwise. The result goes to RUN/eval/TIME, or to
    evals/NAME/TIME for a recipe. See also: grpo eval show RUN, grpo eval compare A B.
    """
    from grpo_cli.cli import eval_view, output
    from grpo_cli.cli.measuring import kept_for_resume, run_request
    from grpo_cli.eval.evaluation import EvalOptions, finish, open_folder, prepare
    from grpo_cli.eval.harness import check_harness, run_harness
    from grpo_cli.eval.result import check_floors, known_metrics

    options = EvalOptions(
        **{name: value for name, value in locals().items() if name in EvalOptions.__annotations__}
    )
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    check_harness(harness, names)
    request = prepare(source, set_, options)
    check_floors(fail_under or (), known_metrics(request), baseline=request.baseline is not None)
    folder = open_folder(request, options)
    with (
        output.stdout_to_stderr(),
        folder.lock(),
        kept_for_resume(folder, fresh=not resume),
        eval_view.progress(folder) as tell,
    ):
        run_request(request, folder, num_processes, tell)
        # Before the result is written: what breaks here can be taken up with --resume.
        scores = run_harness(request, names, limit, tell) if harness else None
        result = finish(request, folder, scores)
    _tell(result, folder.path, fail_under, as_json=json)


@app.command()
def show(
    path: RunOrResult,
    fail_under: FailUnder = None,
    json: AsJson = False,
) -> None:
    """Show a result again: a run's newest, or the one that is named."""
    from grpo_cli.eval.result import read_result

    folder, result = read_result(path)
    _tell(result, folder.path, fail_under, as_json=json)


@app.command()
def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A result, its folder or its run; A:NAME for one of several models.",
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another, on the same prompts.")],
    json: AsJson = False,
) -> None:
    """Compare two results prompt by prompt: B minus A."""
    from grpo_cli.cli import eval_view, output
    from grpo_cli.eval.result import compare_results

    compared = compare_results(first, second)
    if json:
        output.print_json(compared)
    else:
        eval_view.print_comparison(compared)


def _tell(result: Any, folder: Path, floors: list[str] | None, *, as_json: bool) -> None:
    """Prints a result, and ends with 1 where a floor is not reached."""
    from grpo_cli.cli import eval_view, output
    from grpo_cli.eval.result import falls_short

    # Read before anything is printed: a floor that names no metric is a mistake of the command line.
    short = falls_short(result, floors or ())
    if as_json:
        output.print_json(result)
    else:
        eval_view.print_result(result, folder)
    for each in short:
        output.stderr().print(f"error: {each}", style="red", markup=False)
    if short:
        raise typer.Exit(ExitCode.FAILED)
