"""Measure models: prepare, sample in this process or in several, and write the result."""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_cli.errors import RunError
from grpo_cli.eval.folder import EvalFolder, open_folder
from grpo_cli.eval.harness import check_harness, run_harness
from grpo_cli.eval.request import EvalOptions, EvalRequest, Progress, make_request
from grpo_cli.eval.result import check_floors, finish, known_metrics
from grpo_cli.eval.worker import measure
from grpo_cli.launch.plan import LaunchPlan, plan_launch, set_thread_env
from grpo_cli.machine import is_on_cpu, processes_per_machine, read_hardware
from grpo_cli.processes import child
from grpo_cli.reporter import Reporter
from grpo_cli.runs.folder import RunFolder

WORKER = "grpo_cli.eval.worker"
_POLL_S = 0.5
_CAUSE = re.compile(r"^[\w.]*(Error|Exception)\b.*:|Signal \d+ \(")
"""The last line of a traceback, or how torch's launcher (2.13) reports a killed process."""


@dataclass(frozen=True)
class Evaluation:
    """A written result, and its folder."""

    result: dict[str, Any]
    folder: EvalFolder


def evaluate(
    source: Path,
    overrides: list[str] | None,
    options: EvalOptions,
    reporter: Reporter,
    *,
    num_processes: int | None = None,
    harness: str | None = None,
    tasks: Sequence[str] = (),
    floors: Sequence[str] = (),
) -> Evaluation:
    """Measure the models of a run, or a model with a recipe, and the gain over a baseline.

    `num_processes` None is one for each visible GPU, and 1 on a CPU; `floors` are `METRIC=VALUE` texts.

    Raises `GrpoError` if the source, a setting, a model, the data or a reward is wrong.
    """
    check_harness(harness, list(tasks))
    request = make_request(source, overrides, options)
    check_floors(floors, known_metrics(request), baseline=request.baseline is not None)
    folder = open_folder(request, options)
    with (
        folder.lock(),
        _kept_for_resume(folder, reporter, fresh=not options.resume),
        reporter.evaluation(folder.path) as tell,
    ):
        _run_request(request, folder, num_processes, tell)
        # Before the result is written: if this fails, --resume repeats only this.
        scores = run_harness(request, list(tasks), options.limit, tell) if harness else None
        return Evaluation(finish(request, folder, scores), folder)


def _run_request(
    request: EvalRequest, folder: EvalFolder, processes: int | None, tell: Progress
) -> None:
    hardware = read_hardware()
    alone = request.recipe.launch.use_cpu or request.backend == "vllm"
    count = processes or (1 if alone else processes_per_machine(hardware))
    if count == 1:
        if request.backend != "vllm" and is_on_cpu(request.recipe.launch, hardware):
            set_thread_env(hardware, 1)
        measure(request, folder, tell)
        return
    # Each process measures with its own copy of the model, even if training sharded it.
    launch = {
        "num_processes": count,
        "num_machines": 1,
        "strategy": "ddp",
        "accelerate_config": None,
    }
    recipe = request.recipe
    apart = {
        "launch": recipe.launch.model_copy(update=launch),
        "generation": recipe.generation.model_copy(update={"backend": "transformers"}),
    }
    plan = plan_launch(recipe.model_copy(update=apart), folder.path, hardware, worker=WORKER)
    RunFolder(folder.path).write_plan(plan.as_json())
    _run_together(replace(plan, argv=(*plan.argv, str(count))), request, folder, tell)


@contextmanager
def _kept_for_resume(folder: EvalFolder, reporter: Reporter, *, fresh: bool) -> Iterator[None]:
    """Say how to resume an evaluation that is interrupted; remove a new one that sampled nothing."""
    try:
        yield
    except BaseException:
        if folder.has_samples():
            reporter.say(
                f"the samples so far are in {folder.path}; repeat the command with --resume to finish"
            )
        elif fresh and not folder.log.is_file():
            folder.remove()
        raise


def _run_together(
    plan: LaunchPlan, request: EvalRequest, folder: EvalFolder, tell: Progress
) -> None:
    with (
        folder.log.open("w", encoding="utf-8") as log,
        child(
            plan.argv,
            grace_s=None,
            env=plan.add_environment(os.environ),
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        while process.poll() is None:
            _report(request, folder, tell)
            time.sleep(_POLL_S)
    failure = folder.take_failure()
    if failure is None and process.returncode == 0:
        return
    if failure is not None:
        folder.log.unlink()
        raise failure
    lines = folder.log.read_text(encoding="utf-8", errors="replace").splitlines()
    cause = next((each.strip() for each in reversed(lines) if _CAUSE.search(each)), "")
    why = cause or "no reason was logged"
    raise RunError(f"the processes ended with {process.returncode}: {why}", f"see {folder.log}")


def _report(request: EvalRequest, folder: EvalFolder, tell: Progress) -> None:
    if not folder.data.is_file():
        return
    total = folder.read_data()["rows"] * request.samples
    for subject in request.subjects:
        done = folder.count_samples(subject.name)
        if done:
            tell(subject.name, done, total)
