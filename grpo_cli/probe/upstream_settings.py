"""The settings as TRL, transformers and accelerate read them: what they refuse is found before a model is loaded.

Source: trl 1.16.0 on transformers 5.17.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_cli.errors import nearest
from grpo_cli.issues import Finding
from grpo_cli.recipe.grpo_fields import home_of, key_in_home, read_grpo_fields
from grpo_cli.recipe.recipe import Recipe

_WORLD = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
"""With one of these accelerate would wait for other processes."""


def check_upstream_settings(recipe: Recipe, *, cpu: bool) -> Iterator[Finding]:
    """Build what a trainer builds of the settings alone.

    Args:
        recipe: The recipe; one that trains asynchronously has another configuration, and is passed over.
        cpu: Whether the run is on the CPU.
    """
    if recipe.training.mode == "async":
        return
    fields = _fields(recipe, cpu=cpu)
    with _alone():
        try:
            args = _build_args(fields)
        except (ValueError, TypeError, ImportError) as error:
            yield _refused(str(error), _find_path(str(error), fields))
            return
        backend = args.torch_compile_backend
        of_scheduler = "kwargs" if fields.get("lr_scheduler_kwargs") else "type"
        for path, build in (
            (f"training.lr_scheduler_{of_scheduler}", lambda: _build_scheduler(args)),
            ("training.torch_compile_backend", lambda: _build_dynamo(backend)),
        ):
            if (reason := _reason(build)) is not None:
                yield _refused(reason, path)
    if recipe.generation.backend != "vllm":
        yield from _check_generation(fields.get("generation_kwargs") or {})


def _fields(recipe: Recipe, *, cpu: bool) -> dict[str, Any]:
    """The recipe's `GRPOConfig` fields, less the arithmetic, which `batch` checks for all processes."""
    training, generation = recipe.training, recipe.generation
    fields = {**training.trl_fields(), **generation.trl_fields(), **recipe.logging.trl_fields()}
    for name in ("steps_per_generation", "generation_batch_size", "num_generations_eval"):
        fields.pop(name, None)
    size = dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), generation.num_generations
    )
    if cpu:
        fields.setdefault("bf16", False)
    return {**fields, **size, "output_dir": os.devnull, "use_cpu": cpu}


def _build_args(fields: dict[str, Any]) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(**fields)


def _build_scheduler(args: Any) -> None:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    get_scheduler(args.lr_scheduler_type, optimizer, 1, 10, args.lr_scheduler_kwargs)


def _build_dynamo(backend: str | None) -> None:
    from accelerate.utils import TorchDynamoPlugin

    if backend is not None:
        TorchDynamoPlugin(backend=backend)


def _check_generation(given: dict[str, Any]) -> Iterator[Finding]:
    """Names that `GenerationConfig` would keep and nobody reads."""
    from transformers import GenerationConfig

    path = "generation.generation_kwargs"
    known = vars(GenerationConfig())
    for name in given.keys() - known.keys():
        close = nearest(name, known)
        fix = f"write `{close}`" if close else "remove it"
        yield Finding(
            "setting: generation_kwargs",
            "error",
            f"transformers has no generation setting `{name}`",
            fix,
            "it would be ignored",
            f"{path}.{name}",
        )
    if (reason := _reason(lambda: GenerationConfig(**given))) is not None:
        yield _refused(reason, path)


def _reason(build: Callable[[], object]) -> str | None:
    """Why something cannot be built; None if it can."""
    try:
        build()
    except (ValueError, TypeError, KeyError, ImportError) as error:
        return str(error)
    return None


def _refused(reason: str, path: str) -> Finding:
    return Finding(
        "setting: refused",
        "error",
        " ".join(reason.split()).rstrip("."),
        f"change or remove `{path}`",
        "the training would end with this error once it has loaded everything",
        path,
    )


def _find_path(reason: str, fields: dict[str, Any]) -> str:
    """The setting that an error names; one that the recipe gives goes before others."""
    words = re.findall(r"\w+", reason)
    known = [name for name in words if name in read_grpo_fields() and home_of(name)]
    known.sort(key=lambda name: name not in fields)
    return key_in_home(known[0]) if known else "training"


@contextmanager
def _alone() -> Iterator[None]:
    """Hide a launcher's variables, and undo those that `TrainingArguments` sets."""
    kept = dict(os.environ)
    for name in _WORLD:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
