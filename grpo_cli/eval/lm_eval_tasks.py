"""Scores of a model in memory in tasks of EleutherAI's lm-evaluation-harness.

Source: lm-eval 0.4.13, `lm_eval.simple_evaluate`.
"""

import copy
import os
import random
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy

from grpo_cli.errors import RunError, SetupError, UsageError
from grpo_cli.eval.harness import is_task_file
from grpo_cli.fast.completions import sampling_state

_BOOTSTRAP_ITERS = 1000
"""For standard errors of metrics that are not means."""
_GROUP = re.compile(r"^group\s*:", re.MULTILINE)


Scores = dict[str, dict[str, float | None]]
"""Metric, such as `acc,none` → `value`, `stderr` and `higher_is_better`."""


@contextmanager
def wrap_model(model: Any, tokenizer: Any, batch_size: int) -> Iterator[Any]:
    """Yield a model in memory as lm-eval takes it; its mode and torch's random state are restored."""
    from lm_eval.models.huggingface import HFLM

    with sampling_state(model, None, None):
        # A copy, since lm-eval changes how it pads.
        yield HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)


def score_tasks(
    model: Any, tasks: Sequence[str], *, source: str, limit: int | None, seed: int
) -> dict[str, Scores]:
    """Return a model's scores by task; of a group of tasks, those of its tasks too.

    `source` is a folder or hub id with the tokenizer, by which some tasks make texts of a length; `seed` is that
    of `random`, since lm-eval has fixed ones for all else.

    Raises `UsageError` if there is no such task, `SetupError` if a task's data cannot be fetched, and
    `RunError` if a task fails, as one with a mistake in its templates or functions does.
    """
    import lm_eval
    from jinja2 import TemplateError

    own_only = all(
        is_task_file(task) and not _GROUP.search(Path(task).read_text(encoding="utf-8"))
        for task in tasks
    )
    try:
        with _global_state_kept():
            outcome = lm_eval.simple_evaluate(
                model=model,
                tasks=list(tasks),
                limit=limit,
                log_samples=False,
                bootstrap_iters=_BOOTSTRAP_ITERS,
                random_seed=seed,
                task_manager=_open_task_manager(source, own_only=own_only),
            )
    except (ConnectionError, OSError) as error:
        raise SetupError(
            f"lm-eval cannot fetch what it needs: {_shorten(error)}",
            "fetch the dataset beforehand "
            "(`hf download --repo-type dataset …`), or name a task file of your own",
        ) from error
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"lm-eval refuses: {_shorten(error)}", "`lm_eval ls tasks` lists them"
        ) from error
    except (ArithmeticError, AssertionError, AttributeError, TypeError, TemplateError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        seen = f"{type(error).__name__}: {_shorten(error)}".removesuffix(": ")
        raise RunError(
            f"lm-eval failed at {', '.join(tasks)}: {seen} "
            f"({Path(last.filename).name}:{last.lineno}: `{last.line}`)",
            "correct the task",
        ) from error
    directions = outcome.get("higher_is_better", {})
    return {
        task: _read_scores(scores, directions.get(task, {}))
        for task, scores in outcome["results"].items()
    }


@lru_cache(maxsize=2)
def _open_task_manager(source: str, own_only: bool) -> Any:
    from lm_eval.tasks import TaskManager

    # The index of all tasks takes seconds to read.
    return TaskManager(include_defaults=not own_only, metadata={"pretrained": source})


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """Restore the random states that lm-eval seeds; keep what it prints out of the standard output."""
    states = random.getstate(), numpy.random.get_state()
    # It would fork this process, which may hold a GPU, for what takes milliseconds.
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _read_scores(scores: dict[str, Any], directions: dict[str, bool | None]) -> Scores:
    """Return metric → value, standard error and direction, without the harness's own bookkeeping."""
    numbers = {key: float(each) for key, each in scores.items() if isinstance(each, int | float)}
    return {
        key: {
            "value": value,
            "stderr": numbers.get(key.replace(",", "_stderr,")),
            "higher_is_better": directions.get(key.partition(",")[0]),
        }
        for key, value in numbers.items()
        # Such as `acc,none`; `alias` and `sample_len` are not metrics.
        if "," in key and "_stderr," not in key
    }
