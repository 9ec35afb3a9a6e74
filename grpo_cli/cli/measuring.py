"""The work of `grpo eval`: on this process, or on several that are launched."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from grpo_cli.cli.output import stderr
from grpo_cli.errors import RunError
from grpo_cli.eval.evaluation import run_here
from grpo_cli.eval.folder import EvalFolder
from grpo_cli.eval.request import EvalRequest, Progress
from grpo_cli.launch.cpu_environment import set_thread_env
from grpo_cli.launch.plan import LaunchPlan, plan_launch
from grpo_cli.machine import is_on_cpu, processes_per_machine, read_hardware
from grpo_cli.processes import start_child
from grpo_cli.runs.folder import RunFolder

WORKER = "grpo_cli.eval.worker"
_LOOK_S = 0.5
_TELLING = re.compile(r"^[\w.]*(Error|Exception)\b.*:|Signal \d+ \(")
"""A traceback's last line, or what torch's launcher says of a process that was killed (2.13)."""


def run_request(
    request: EvalRequest, folder: EvalFolder, processes: int | None, tell: Progress
) -> None:
    """Samples and scores what a request asks for.

    Args:
        request: What is asked for.
        folder: Where it goes.
        processes: How many measure together; None is one for each visible GPU, and 1 on a CPU.
        tell: Told how far it is.

    Raises:
        GrpoError: A model, the data or a reward fails.
    """
    hardware = read_hardware()
    alone = request.recipe.launch.use_cpu or request.backend == "vllm"
    count = processes or (1 if alone else processes_per_machine(hardware))
    if count == 1:
        if request.backend != "vllm" and is_on_cpu(request.recipe.launch, hardware):
            set_thread_env(hardware, 1)
        run_here(request, folder, tell)
        return
    # Each process measures with a model of its own, however the training shared it.
    own = {"num_processes": count, "num_machines": 1, "strategy": "ddp", "accelerate_config": None}
    recipe = request.recipe
    apart = {
        "launch": recipe.launch.model_copy(update=own),
        "generation": recipe.generation.model_copy(update={"backend": "transformers"}),
    }
    plan = plan_launch(recipe.model_copy(update=apart), folder.path, hardware, worker=WORKER)
    RunFolder(folder.path).write_plan(plan.as_json())
    _run_together(replace(plan, argv=(*plan.argv, str(count))), request, folder, tell)


@contextmanager
def kept_for_resume(folder: EvalFolder, *, fresh: bool) -> Iterator[None]:
    """Says how an evaluation that breaks off goes on; one that sampled nothing leaves no folder behind.

    Args:
        folder: The evaluation's.
        fresh: Whether this command made it.
    """
    try:
        yield
    except BaseException:
        if folder.samples.any():
            stderr().print(
                f"the samples so far are kept in {folder.path}; the same command with --resume goes on",
                markup=False,
            )
        elif fresh and not folder.log.is_file():
            folder.remove()
        raise


def _run_together(
    plan: LaunchPlan, request: EvalRequest, folder: EvalFolder, tell: Progress
) -> None:
    """Runs the launcher to its end; what its processes say goes to a log."""
    with folder.log.open("w", encoding="utf-8") as log:
        process = start_child(
            plan.argv,
            env=plan.add_environment(os.environ),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                _report(request, folder, tell)
                time.sleep(_LOOK_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    failure = folder.take_failure()
    if failure is None and process.returncode == 0:
        return
    if failure is not None:
        folder.log.unlink()
        raise failure
    raise RunError(
        f"the processes ended with {process.returncode}: {_cause(folder)}. Fix: see {folder.log}"
    )


def _report(request: EvalRequest, folder: EvalFolder, tell: Progress) -> None:
    if not folder.about.is_file():
        return
    total = folder.read_about()["rows"] * request.samples
    for subject in request.subjects:
        done = folder.samples.count(subject.name)
        if done:
            tell(subject.name, done, total)


def _cause(folder: EvalFolder) -> str:
    """The last exception in the log, or the signal that killed a process."""
    lines = folder.log.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [line for line in lines if _TELLING.search(line)]
    return telling[-1].strip() if telling else "they did not say why"
