"""`grpo probe`: print whether a recipe can learn, what it costs, and every issue found."""

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from grpo_cli.cli import output
from grpo_cli.cli.arguments import RUNS, AsJson, Overrides, RecipePath, RunsRoot
from grpo_cli.errors import ExitCode
from grpo_cli.units import count_noun, format_bytes, format_duration

if TYPE_CHECKING:
    from grpo_cli.analysis.samples import ScoredCompletion
    from grpo_cli.probing.session import Probe


def probe(
    recipe: RecipePath,
    set_: Overrides = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Prompts to sample num_generations completions for.")
    ] = 16,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Load no weights: settings, data, template, rewards, memory."),
    ] = False,
    runs: RunsRoot = RUNS,
    json: AsJson = False,
) -> None:
    """Sample and score a few completions before training: is there anything to learn, and will it fit?

    Takes one training step with a copy of the model that is thrown away; keeps nothing on disk.
    `--runs` is where free disk space is checked. Exit code 1 if the training would fail or learn
    nothing.
    """
    # Importing the libraries takes seconds.
    started = time.monotonic()
    from grpo_cli.checks.recipe import check_recipe
    from grpo_cli.launch.plan import set_thread_env
    from grpo_cli.machine import is_on_cpu, read_hardware
    from grpo_cli.probing.procedure import probe_recipe
    from grpo_cli.processes import run_in_child

    with output.stdout_to_stderr(), output.progress("checking the recipe") as report:
        hardware = read_hardware()
        checked = check_recipe(recipe, set_, hardware)
        launch = checked.recipe.launch
        if is_on_cpu(launch, hardware) and checked.recipe.generation.backend != "vllm":
            set_thread_env(hardware, checked.num_processes // launch.num_machines)
        with checked.loaded.placing_errors():
            run = partial(
                probe_recipe,
                checked.recipe,
                source=recipe,
                runs=runs,
                prompts_sampled=prompts,
                quick=quick,
                known=checked.problems,
            )
            found = run_in_child(lambda tell: run(on_progress=tell), report)
        found.seconds = time.monotonic() - started
        found.findings = [checked.loaded.place(issue) for issue in found.findings]
    output.print_problems(checked.notes_of("generation.backend"))
    output.show(found, _print_probe, as_json=json)
    raise typer.Exit(ExitCode.FAILED if found.errors else ExitCode.OK)


_SHOWN_PROMPT, _SHOWN_COMPLETION, _LEAST_SHOWN = 1200, 400, 2**20


def _print_probe(probe: "Probe") -> None:
    console = output.stdout()
    for title, lines in (
        ("prompt", _prompt(probe)),
        ("rewards", _rewards(probe)),
        ("samples", _samples(probe.samples)),
        ("signal", _signal(probe)),
        ("episodes", _episodes(probe)),
        ("length", _lengths(probe)),
        ("cost", _cost(probe)),
    ):
        shown = list(lines)
        if shown:
            console.print(title, style="bold underline")
            for line in shown:
                console.print(line)
            console.print()
    output.print_findings(console, probe.sorted_findings)
    _print_verdict(console, probe)


def _print_verdict(console: Console, probe: "Probe") -> None:
    looked = "the model can learn from these rewards" if probe.signal else "nothing is wrong so far"
    command = "grpo probe" if probe.quick else "grpo train"
    took = Text(f"({format_duration(probe.seconds)})", style="dim")
    fine = Text.assemble(f"{looked} ", took, f"; next: {command} {probe.recipe}")
    output.print_counts(console, probe.findings, took, fine)


def _prompt(probe: "Probe") -> Iterator[Text]:
    sample = probe.prompts
    if sample is None:
        return
    shown = sample.rendered[:_SHOWN_PROMPT]
    more = " …" if len(sample.rendered) > _SHOWN_PROMPT else ""
    yield Text(shown + more, style="cyan")
    ordered = sorted(sample.lengths)
    yield Text(
        f"median {count_noun(ordered[len(ordered) // 2], 'token')}, at most {ordered[-1]:,} "
        f"({count_noun(len(ordered), 'prompt')} of {sample.total:,})",
        style="dim",
    )


def _samples(samples: "list[ScoredCompletion]") -> Iterator[Text]:
    """Yield the best, the middle and the worst; one where all are worth the same."""
    scored = [sample for sample in samples if sample.total is not None]
    ranked = sorted(scored or samples[:1], key=lambda sample: -(sample.total or 0.0))
    if not ranked:
        return
    named = {"best": ranked[0], "middle": ranked[len(ranked) // 2], "worst": ranked[-1]}
    if ranked[0].total == ranked[-1].total:
        named = {"all score the same": ranked[0]}
    for name, sample in named.items():
        scores = "  ".join(
            f"{name} {'–' if value is None else f'{value:g}'}"
            for name, value in sample.rewards.items()
        )
        cut = ", cut off" if sample.clipped else ""
        total = "–" if sample.total is None else f"{sample.total:.3g}"
        head = f"{name}, row {sample.row + 1}: total {total} ({scores}), {count_noun(sample.tokens, 'token')}{cut}"
        yield Text(head, style="bold")
        text = _transcribe(sample)
        more = " …" if len(text) > _SHOWN_COMPLETION else ""
        yield Text(text[:_SHOWN_COMPLETION] + more, style="cyan")
        for reward, reason in sample.reasons.items():
            yield Text(f"  {reward}: {reason}", style="dim")


def _transcribe(sample: "ScoredCompletion") -> str:
    """Return what was sampled; of an episode all messages, with what was asked first."""
    from grpo_cli.runs.completions import show_content

    if not sample.messages:
        return sample.text
    return "\n".join(
        f"{message['role']}: {show_content(message.get('content') or '')}"
        for message in (*sample.prompt[-1:], *sample.messages)
    )


def _signal(probe: "Probe") -> Iterator[Table | Text]:
    signal = probe.signal
    if signal is None:
        return
    table = output.number_table("reward", ("mean", "spread", "within a group"))
    total = {"total": signal.total} if len(signal.rewards) > 1 else {}
    for name, spread in (signal.rewards | total).items():
        mean = "–" if spread.mean is None else f"{spread.mean:.3f}"
        table.add_row(name, mean, f"{spread.std:.3f}", f"{spread.within:.3f}")
    yield table
    yield Text(
        f"{count_noun(signal.prompts, 'prompt')} × "
        f"{count_noun(signal.completions // signal.prompts, 'completion')}; "
        f"groups without a gradient, as all score the same: {signal.frac_reward_zero_std:.0%}"
    )
    for rate in signal.pass_rates:
        yield Text(
            f"right by {rate.reward}: {rate.rate:.0%} (95 % interval {rate.low:.0%} to {rate.high:.0%}); "
            f"prompts: {rate.too_hard} never right, {rate.learnable} sometimes, {rate.too_easy} always"
        )


_SHOWN_SHARES = {
    "valid_calls": "of calls valid",
    "failed_calls": "of calls failed or late",
    "cut_off_turns": "of episodes end with a turn that is cut off",
    "cut_off_episodes": "of episodes are cut off themselves",
}


def _episodes(probe: "Probe") -> Iterator[Text]:
    for name, metric in (probe.episodes or {}).items():
        if metric.value is None:
            continue
        percent = name in _SHOWN_SHARES
        form = "{:.0%}" if percent else "{:.3g}"
        interval = ""
        if metric.low is not None and metric.high is not None:
            low, high = form.format(metric.low), form.format(metric.high)
            interval = f" (95 % interval {low} to {high})"
        what = _SHOWN_SHARES.get(name, f"{name.replace('_', ' ')} an episode")
        yield Text(f"{form.format(metric.value)} {what}{interval}")


def _lengths(probe: "Probe") -> Iterator[Text]:
    lengths = probe.lengths
    if lengths is not None:
        yield Text(
            f"completions: median {count_noun(lengths.median, 'token')}, 95th percentile {lengths.p95:,}, "
            f"at most {lengths.max:,}; {lengths.clipped:.0%} cut off at {lengths.limit}"
        )


def _cost(probe: "Probe") -> Iterator[Table | Text]:
    if probe.memory is not None:
        left = probe.memory_available
        room = f" of {format_bytes(left)} available" if left is not None else ""
        stage = " in the warm-up" if probe.memory.stage == "warm-up" else ""
        size = format_bytes(probe.memory.peak_bytes)
        yield Text(f"memory: about {size} a process{stage}{room}")
        yield _table(
            (part.name, format_bytes(part.bytes), part.formula)
            for part in probe.memory.at_peak()
            if part.bytes >= _LEAST_SHOWN
        )
    if probe.disk is not None:
        yield Text(f"disk: {format_bytes(probe.disk.total)}: {probe.disk.formula}")
    if probe.time is not None:
        step_s = probe.time.step_s
        step = f"{step_s:.2g} s" if step_s < 10 else format_duration(step_s)
        yield Text(
            f"time: about {format_duration(probe.time.total_s)} without start-up, {step} a step"
        )
        yield _table(
            (part.name, format_duration(part.seconds), part.formula) for part in probe.time.parts
        )


def _rewards(probe: "Probe") -> Iterator[Text]:
    trial = probe.trial
    if trial is None or not trial.results:
        return
    shown = (f"{one.name} {one.total:.3g}" for one in trial.results if one.total is not None)
    yield Text(
        f"{', '.join(shown)}: mean total of answers to {count_noun(trial.rows, 'row')} (grpo rewards test)"
    )


def _table(rows: Iterator[tuple[str, str, str]]) -> Table:
    table = Table.grid("", Column(justify="right"), Column(style="dim"), padding=(0, 2))
    for name, value, formula in rows:
        table.add_row(f"  {name}", value, formula)
    return table
