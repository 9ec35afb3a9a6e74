"""Standard benchmarks by EleutherAI's lm-evaluation-harness, beside our own measurement."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_cli.errors import SetupError, UsageError, install_extra
from grpo_cli.eval.request import EvalRequest, Progress, Subject
from grpo_cli.machine import pick_device
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.runs.manifest import read_version


def is_task_file(task: str) -> bool:
    """Return whether a task is named by its file."""
    return Path(task).suffix in (".yaml", ".yml")


def check_harness(name: str | None, tasks: Sequence[str]) -> None:
    """Refuse a harness that is unknown or not installed, before anything is measured."""
    if name is None:
        if tasks:
            raise UsageError("--tasks are a harness's", "add --harness lm-eval")
        return
    if name != "lm-eval":
        raise UsageError(f"there is no harness `{name}`", "--harness lm-eval")
    if not tasks:
        raise UsageError("--harness lm-eval needs tasks", "--tasks gsm8k,arc_easy")
    if importlib.util.find_spec("lm_eval") is None:
        raise SetupError("lm-eval is not installed", install_extra("lm-eval"))
    for task in filter(is_task_file, tasks):
        if not Path(task).is_file():
            raise UsageError(f"there is no task file {task}", "correct --tasks")


def run_harness(
    request: EvalRequest, tasks: Sequence[str], limit: int | None, tell: Progress
) -> dict[str, Any]:
    """Return every subject's scores in every task: names of tasks, or YAML files of one's own.

    Raises `UsageError` if there is no such task, and `SetupError` if a task's data cannot be fetched.
    """
    from grpo_cli.eval.lm_eval_tasks import score_tasks

    scores: dict[str, Any] = {}
    for subject in request.subjects:
        name = f"{subject.name}: {', '.join(tasks)}"
        tell(name, 0, 1)
        with _open_model(request, subject) as model:
            source = model_folder_or_id(subject.model)
            scored = score_tasks(model, tasks, source=source, limit=limit, seed=request.seed)
            scores[subject.name] = scored
        tell(name, 1, 1)
    return {
        "name": "lm-eval",
        "version": read_version("lm_eval"),
        "tasks": list(tasks),
        "limit": limit,
        "subjects": scores,
    }


@contextmanager
def _open_model(request: EvalRequest, subject: Subject) -> Iterator[Any]:
    """Load a subject, and yield it as lm-eval takes it; two models may not fit in memory."""
    if request.backend == "vllm":
        yield _open_vllm(request, subject)
        return
    import torch

    from grpo_cli.eval.lm_eval_tasks import wrap_model
    from grpo_cli.eval.samplers import load_subject
    from grpo_cli.models.loading import load_tokenizer

    tokenizer = load_tokenizer(subject.model)
    device = torch.device(pick_device(request.recipe.launch))
    with wrap_model(
        load_subject(subject, tokenizer, device), tokenizer, request.batch_size
    ) as model:
        yield model


def _open_vllm(request: EvalRequest, subject: Subject) -> Any:
    from lm_eval.api.registry import get_model

    args: dict[str, Any] = {
        "pretrained": model_folder_or_id(subject.model),
        "dtype": subject.model.dtype,
        "trust_remote_code": subject.model.trust_remote_code,
    }
    if subject.model.revision:
        args["revision"] = subject.model.revision
    if subject.adapter is not None:
        args["lora_local_path"] = subject.adapter
    more = {"batch_size": request.batch_size, "device": pick_device(request.recipe.launch)}
    return get_model("vllm").create_from_arg_obj(args, more)
