"""Standard benchmarks by EleutherAI's lm-evaluation-harness, beside our own measurement.

Source: lm-eval 0.4.13, `lm_eval.simple_evaluate`.
"""

import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_cli.errors import SetupError, UsageError, install_extra
from grpo_cli.eval.request import EvalRequest, Progress, Subject
from grpo_cli.machine import pick_device
from grpo_cli.models.source import model_folder_or_id


def check_harness(name: str | None, tasks: Sequence[str]) -> None:
    """Refuse a harness that is unknown or not installed, before anything is measured."""
    if name is None:
        if tasks:
            raise UsageError("--tasks are a harness's. Fix: add --harness lm-eval")
        return
    if name != "lm-eval":
        raise UsageError(f"there is no harness `{name}`. Fix: --harness lm-eval")
    if not tasks:
        raise UsageError("--harness lm-eval needs tasks. Fix: --tasks gsm8k,arc_easy")
    if importlib.util.find_spec("lm_eval") is None:
        raise SetupError(f"lm-eval is not installed. Fix: {install_extra('lm-eval')}")


def run_harness(
    request: EvalRequest, tasks: Sequence[str], limit: int | None, tell: Progress
) -> dict[str, Any]:
    """Return every subject's scores in every task.

    Args:
        request: Which subjects, and with which backend.
        tasks: Names of tasks, or YAML files of one's own.
        limit: Examples of each task; None for all.
        tell: Told which subject is measured.

    Raises:
        UsageError: There is no such task.
        SetupError: A task's data cannot be fetched.
    """
    import lm_eval

    scores: dict[str, Any] = {}
    read = [_read_task(task) for task in tasks]
    for subject in request.subjects:
        name = f"{subject.name}: {', '.join(tasks)}"
        tell(name, 0, 1)
        try:
            outcome = lm_eval.simple_evaluate(
                model="vllm" if request.backend == "vllm" else "hf",
                model_args=_model_args(request, subject),
                tasks=read,
                batch_size=request.batch_size,
                limit=limit,
                device=pick_device(request.recipe.launch),
                log_samples=False,
                bootstrap_iters=1000,
                random_seed=request.seed,
            )
        except (ConnectionError, OSError) as error:
            raise SetupError(
                f"lm-eval cannot fetch what it needs: {_shorten(error)}. Fix: fetch the dataset beforehand "
                "(`hf download --repo-type dataset …`), or name a task file of your own"
            ) from error
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"lm-eval refuses: {_shorten(error)}. Fix: `lm_eval ls tasks` lists them"
            ) from error
        scores[subject.name] = _read_scores(outcome["results"])
        tell(name, 1, 1)
    return {
        "name": "lm-eval",
        "version": metadata.version("lm_eval"),
        "tasks": list(tasks),
        "limit": limit,
        "subjects": scores,
    }


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _read_task(task: str) -> Any:
    """Return a task's name, or the task that a file describes."""
    path = Path(task)
    if path.suffix not in (".yaml", ".yml"):
        return task
    if not path.is_file():
        raise UsageError(f"there is no task file {path}. Fix: correct --tasks")
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _model_args(request: EvalRequest, subject: Subject) -> dict[str, Any]:
    """Return a subject as lm-eval names models."""
    args: dict[str, Any] = {
        "pretrained": model_folder_or_id(subject.model),
        "dtype": subject.model.dtype,
        "trust_remote_code": subject.model.trust_remote_code,
    }
    if subject.model.revision:
        args["revision"] = subject.model.revision
    if subject.adapter is not None:
        args["lora_local_path" if request.backend == "vllm" else "peft"] = subject.adapter
    return args


def _read_scores(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return task → metric → value and standard error, without the harness's own bookkeeping."""
    return {
        task: {
            key: {"value": float(value), "stderr": _read_stderr(scores, key)}
            for key, value in scores.items()
            # Such as `acc,none`; `alias` and `sample_len` are no metrics.
            if "," in key and "_stderr," not in key and isinstance(value, int | float)
        }
        for task, scores in results.items()
    }


def _read_stderr(scores: dict[str, Any], key: str) -> float | None:
    error = scores.get(key.replace(",", "_stderr,"))
    return float(error) if isinstance(error, int | float) else None
