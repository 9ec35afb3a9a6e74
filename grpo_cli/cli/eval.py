"""`grpo eval`: measure models, show a result again, compare two results."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from grpo_cli.cli import output
from grpo_cli.cli.arguments import AsJson, EvalSide, Overrides, RunOrRecipe, RunOrResult
from grpo_cli.errors import ExitCode
from grpo_cli.units import count_noun, format_duration, format_interval, format_value


class _MeasuresByDefault(TyperGroup):
    """Make `grpo eval RUN` mean `grpo eval measure RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `measure` unless a command is named; without arguments, show its help, which names the others."""
        if not args or args[0] not in self.commands:
            args = ["measure", *(args or ["--help"])]
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="Measure a model with its recipe's prompts and rewards, and compare it with a baseline.",
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
    int | None, typer.Option(min=1, help="By default one for each GPU; 1 on a CPU.")
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
        str | None, typer.Option(help="Compare with this folder or hub id, or none.")
    ] = None,
    split: Annotated[str, typer.Option(help="eval or train.")] = "eval",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts to measure on.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Completions for each prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of sampling.")] = None,
    backend: Annotated[
        str,
        typer.Option(help="transformers, vllm, or auto: vllm on GPUs if training samples with it."),
    ] = "auto",
    batch_size: BatchSize = None,
    num_processes: NumProcesses = None,
    out: Annotated[Path | None, typer.Option(help="Folder for samples and result.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted evaluation.")
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
    from grpo_cli.cli.output import TerminalReporter
    from grpo_cli.eval.request import EvalOptions
    from grpo_cli.eval.run import evaluate

    class EvalReporter(TerminalReporter):
        evaluation = staticmethod(_progress)

    options = EvalOptions(
        **{name: value for name, value in locals().items() if name in EvalOptions.__annotations__}
    )
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    with output.stdout_to_stderr():
        evaluation = evaluate(
            source,
            set_,
            options,
            EvalReporter(),
            num_processes=num_processes,
            harness=harness,
            tasks=names,
            floors=fail_under or (),
        )
    _show_result(evaluation.result, evaluation.folder.path, fail_under, as_json=json)


@app.command()
def show(path: RunOrResult, fail_under: FailUnder = None, json: AsJson = False) -> None:
    """Show a result again: the newest of a run, or the named one."""
    from grpo_cli.eval.result import read_result

    folder, result = read_result(path)
    _show_result(result, folder.path, fail_under, as_json=json)


@app.command()
def compare(first: EvalSide, second: EvalSide, json: AsJson = False) -> None:
    """Compare two results on the same prompts, prompt by prompt: the second minus the first."""
    from grpo_cli.eval.result import compare_results

    output.show(compare_results(first, second), _print_comparison, as_json=json)


def _show_result(result: Any, folder: Path, floors: list[str] | None, *, as_json: bool) -> None:
    """Print a result, and exit with 1 if it is below a floor."""
    from grpo_cli.eval.result import falls_short

    # Before anything is printed: an unknown metric is a usage error.
    short = falls_short(result, floors or ())
    output.show(result, lambda result: print_result(result, folder), as_json=as_json)
    for each in short:
        output.stderr().print(f"error: {each}", style="red")
    if short:
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _progress(folder: Path) -> Iterator[Callable[[str, int, int], None]]:
    """Show on stderr how far an evaluation is, with the time left."""
    output.stderr().print(f"evaluation: {folder}")
    begun: dict[str, tuple[float, int]] = {}
    with output.progress("measuring") as show:
        yield lambda subject, done, total: show(_say_progress(subject, done, total, begun))


def _say_progress(subject: str, done: int, total: int, begun: dict[str, tuple[float, int]]) -> str:
    """Return how far a model is; `begun` keeps when each began, and what was done by then."""
    if not total:
        return f"{subject}: loading the model"
    now = time.monotonic()
    then, first = begun.setdefault(subject, (now, done))
    pace = (now - then) / (done - first) if done > first else None
    left = f"  left {format_duration(pace * (total - done))}" if pace is not None else ""
    return f"{subject}: {done}/{total} completions{left}"


def print_result(result: Mapping[str, Any], folder: Path) -> None:
    """Print every metric of every model, the gain, and the verdict."""
    console = output.stdout()
    console.print(_result_table(result))
    settings, first = result["settings"], next(iter(result["subjects"].values()))
    console.print(
        f"{count_noun(first['prompts'], 'prompt')} × {settings['samples']} at temperature "
        f"{settings['temperature']:g}, split {settings['split']}; 95 % intervals by prompt",
        style="dim",
    )
    if "harness" in result:
        console.print(_harness_table(result["harness"]))
    for note in _notes(result):
        console.print(note, style="dim")
    for name, subject in result["subjects"].items():
        _warn_of_failures(subject, name)
    for name, verdict in result["verdicts"].items():
        several = f"{name}: " if len(result["verdicts"]) > 1 else ""
        console.print(several + verdict, style="bold")
    console.print(f"result  {folder / 'result.json'}")


def _warn_of_failures(measured: Mapping[str, Any], name: str) -> None:
    from grpo_cli.analysis.metrics import say_failures

    if failures := say_failures(measured):
        output.print_words(output.stdout(), f"warning: {name}: {failures}", "yellow")


def _notes(result: Mapping[str, Any]) -> list[str]:
    from grpo_cli.analysis.metrics import group_reasons

    values = [subject["metrics"] for subject in result["subjects"].values()]
    gains = [
        {f"gain in {name}": metric for name, metric in each.items()}
        for each in result["differences"].values()
    ]
    pairs = ((name, one["reason"]) for each in (*values, *gains) for name, one in each.items())
    return [
        f"no interval: {why} ({', '.join(names)})" for why, names in group_reasons(pairs).items()
    ]


def _result_table(result: Mapping[str, Any]) -> Table:
    subjects = result["subjects"]
    gained = [f"gain of {name}" for name in result["differences"]]
    table = output.number_table(Column(no_wrap=True), [*subjects, *gained])
    first = next(iter(subjects.values()))
    for metric, found in first["metrics"].items():
        name = Text(metric)
        if found["prompts"] < first["prompts"]:
            name.append(f" ({count_noun(found['prompts'], 'prompt')})", style="dim")
        cells = [_cell(subject["metrics"].get(metric)) for subject in subjects.values()]
        gains = [_cell(each.get(metric), "+") for each in result["differences"].values()]
        table.add_row(name, *cells, *gains)
    speeds = [f"{each['tokens_per_s'] or 0:.0f}" for each in subjects.values()]
    table.add_row(Text("tokens/s", style="dim"), *speeds)
    return table


def _harness_table(harness: Mapping[str, Any]) -> Table:
    table = output.number_table(f"{harness['name']} {harness['version']}", harness["subjects"])
    first = next(iter(harness["subjects"].values()))
    for task, metrics in first.items():
        for metric in metrics:
            cells = [_with_error(tasks[task][metric]) for tasks in harness["subjects"].values()]
            table.add_row(f"{task} {metric.removesuffix(',none')}", *cells)
    return table


def _with_error(score: Mapping[str, Any]) -> Text:
    text = Text(f"{score['value']:.3f}")
    if score["stderr"] is not None:
        text.append(f" ± {score['stderr']:.3f}", style="dim")
    return text


def _print_comparison(compared: Mapping[str, Any]) -> None:
    console = output.stdout()
    console.print(f"first   {compared['before']}")
    console.print(f"second  {compared['after']}")
    table = output.number_table("", ["second − first"])
    for name, metric in compared["differences"].items():
        table.add_row(name, _cell(metric, "+"))
    console.print(table)
    for name, measured in compared["unscored"].items():
        _warn_of_failures(measured, name)
    for name, (before, after) in compared["settings"].items():
        change = "" if name == "rewards" else f": {before} → {after}"
        console.print(f"note: {name} of the two differ{change}", style="yellow")
    console.print(compared["verdict"], style="bold")


def _cell(metric: Mapping[str, Any] | None, sign: str = "") -> Text:
    if metric is None or metric["value"] is None:
        return Text("–")
    text = Text(format_value(metric["value"], sign))
    if interval := format_interval(metric["low"], metric["high"], sign):
        text.append(f" ({interval})", style="dim")
    return text
