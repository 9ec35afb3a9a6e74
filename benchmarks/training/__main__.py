"""Measures plain `GRPOTrainer` against `grpo train`, in turn on the same machine.

    python -m benchmarks.training [--only a,b] [--rounds 2] [--steps N] [--json FILE]
                                  [--model quickstart|tiny|PATH] [--keep DIR]

Progress goes to stderr, the table to stdout. Ctrl-C ends it with the table of what is done.
"""

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.training.bench import Bench
from benchmarks.training.cases import CASES, ON_CPU, Case
from benchmarks.training.comparison import compare
from benchmarks.training.runs import Measured, RunFailedError, run_case
from benchmarks.training.table import format_comparison, format_ratio, take_ratio


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    # Asked to end, it ends its run first, as with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [case for case in CASES if case.name in given.only and _is_possible(case)]
    results: list[dict[str, Any]] = []
    code = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.keep or scratch).resolve()
        bench = Bench(folder, given.model, steps=given.steps)
        try:
            for case in chosen:
                code |= _measure(bench, case, case.rounds or given.rounds, results)
        except KeyboardInterrupt:
            _say("interrupted")
            code = 130
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return code


def _measure(bench: Bench, case: Case, rounds: int, results: list[dict[str, Any]]) -> int:
    """Measures a case and prints its lines; returns 1 where a run failed."""
    try:
        bench.write_case(case)
        pairs = [_run_pair(bench, case, number, rounds) for number in range(rounds)]
        ratios = [take_ratio(case, figure, pairs) for figure in case.figures]
        compared = compare(bench, case, *pairs[-1])
    except RunFailedError as failure:
        _say(f"{case.name}: {failure}")
        print(f"{case.name:10.10} failed   {case.title}", flush=True)
        results.append({"case": case.name, "failed": str(failure)})
        return 1
    for ratio in ratios:
        print(format_ratio(ratio), flush=True)
    if compared:
        print(format_comparison(case, compared), flush=True)
    runs = [{"trl": plain.figures, "grpo": ours.figures} for plain, ours in pairs]
    figures = [asdict(ratio) for ratio in ratios]
    results.append({"case": case.name, "ratios": figures, "compared": compared, "runs": runs})
    return 0


def _run_pair(bench: Bench, case: Case, number: int, rounds: int) -> tuple[Measured, Measured]:
    measured = []
    for system in ("trl", "grpo"):
        _say(f"{case.name}: round {number + 1}/{rounds}, {system} …")
        measured.append(run_case(bench, case, system, number))
        shown = ", ".join(f"{key} {value:.3f}" for key, value in measured[-1].figures.items())
        _say(f"{case.name}: round {number + 1}/{rounds}, {system}: {shown}")
    return measured[0], measured[1]


def _is_possible(case: Case) -> bool:
    from grpo_cli.recipe.training import TrainingConfig

    if case.needs and importlib.util.find_spec(case.needs) is None:
        _say(f"{case.name}: left out, {case.needs} is not installed")
        return False
    lacking = [
        key
        for key in case.ours
        if key.startswith("training.") and key.split(".")[1] not in TrainingConfig.model_fields
    ]
    if lacking:
        _say(f"{case.name}: left out, recipes have no {lacking[0]}")
    return not lacking


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of cases, with commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of each case's own")
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument(
        "--model", default="quickstart", help="quickstart, tiny, or a model's folder or hub id"
    )
    parser.add_argument("--keep", help="an empty folder for all that is written")
    given = parser.parse_args(arguments)
    known = [case.name for case in CASES]
    given.only = ON_CPU if given.only is None else given.only.split(",")
    if unknown := [name for name in given.only if name not in known]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(known)}")
    return given


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
