"""Settings that a library refuses once everything is loaded."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.grpo_fields import home_of, key_in_home, read_grpo_fields
from grpo_cli.recipe.recipe import Recipe

_WORLD = "WORLD_SIZE RANK LOCAL_RANK PMI_SIZE OMPI_COMM_WORLD_SIZE MV2_COMM_WORLD_SIZE".split()
"""With one of these accelerate would wait for other processes."""


def check_upstream_settings(recipe: Recipe, *, cpu: bool) -> Iterator[Issue]:
    """Build what a trainer builds of the settings alone; not of asynchronous training, which has its own."""
    if recipe.training.mode == "async":
        return
    from trl import GRPOConfig

    fields = _fields(recipe, cpu=cpu)
    with _single_process_env():
        built: list[Any] = []
        if reason := _why_not(lambda: built.append(GRPOConfig(**fields))):
            yield _refused(reason, _find_path(reason, fields))
            return
        for build, names in _BUILT.items():
            if reason := _why_not(partial(build, built[0])):
                given = {name: fields[name] for name in names if fields.get(name) is not None}
                inner = [
                    f"{name}.{key}"
                    for name, value in given.items()
                    for key in (value if isinstance(value, dict) else ())
                    if str(key) in reason
                ]
                named = sorted(given, key=lambda name: str(given[name]) not in reason) or names[-1:]
                yield _refused(reason, f"training.{[*inner, *named][0]}")
    if recipe.generation.backend != "vllm":
        yield from _check_generation(recipe.generation.backend_kwargs)


def _fields(recipe: Recipe, *, cpu: bool) -> dict[str, Any]:
    """Return the recipe's `GRPOConfig` fields, less the arithmetic, which `batch` checks for all processes."""
    fields = recipe.trl_fields()
    for name in ("steps_per_generation", "generation_batch_size", "num_generations_eval"):
        fields.pop(name, None)
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        fields[name] = recipe.generation.num_generations
    if cpu:
        fields.setdefault("bf16", False)
    return {**fields, "output_dir": os.devnull, "use_cpu": cpu}


def _build_scheduler(args: Any) -> None:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    get_scheduler(args.lr_scheduler_type, optimizer, 1, 10, args.lr_scheduler_kwargs)


def _build_dynamo(args: Any) -> None:
    from accelerate.utils import TorchDynamoPlugin

    if args.torch_compile_backend is not None:
        TorchDynamoPlugin(backend=args.torch_compile_backend)


def _build_optimizer(args: Any) -> None:
    import torch
    from transformers import Trainer

    for part in (args.optim_args or "").replace(" ", "").split(","):
        if part and part.count("=") != 1:
            raise ValueError(
                f"optim_args is read as name=value,name=value, and has the part {part!r}; betas are `adam_beta1` "
                "and `adam_beta2`"
            )
    # These look for their layers in the model.
    if not args.optim_target_modules and "lomo" not in args.optim:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        kind([torch.nn.Parameter(torch.zeros(1))], **options)


def _build_loader(args: Any) -> None:
    from torch.utils.data import DataLoader

    DataLoader(
        [0],
        num_workers=min(args.dataloader_num_workers, 1),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
    )


def _run_checkpointed(args: Any) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    options = {"use_reentrant": False, **(args.gradient_checkpointing_kwargs or {})}
    checkpoint(torch.nn.Identity(), torch.zeros(1, requires_grad=True), **options)


_BUILT: dict[Callable[[Any], None], list[str]] = {
    _build_scheduler: ["lr_scheduler_kwargs", "lr_scheduler_type"],
    _build_dynamo: ["torch_compile_backend"],
    _build_optimizer: ["optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "optim"],
    _build_loader: ["dataloader_persistent_workers", "dataloader_prefetch_factor"],
    _run_checkpointed: ["gradient_checkpointing_kwargs"],
}
"""What a trainer builds of its settings, and those that it may refuse."""


def _check_generation(options: dict[str, Any]) -> Iterator[Issue]:
    """Find names that `GenerationConfig` would keep and nobody reads."""
    from transformers import GenerationConfig

    path, known = "generation.generation_kwargs", vars(GenerationConfig())
    for name in options.keys() - known.keys():
        close = nearest(name, known)
        seen = f"transformers has no generation setting `{name}`"
        fix = (
            f"write `{close}`"
            if close
            else "remove it, or sample with `backend: vllm` if it is of vLLM"
        )
        why = "it would be ignored"
        yield Issue(seen, fix, f"{path}.{name}", subject="setting: generation_kwargs", why=why)
    if reason := _why_not(lambda: GenerationConfig(**options)):
        yield _refused(reason, path)


def _why_not(build: Callable[[], object]) -> str:
    """Return why something cannot be built; empty if it can."""
    try:
        build()
    except (ValueError, TypeError, KeyError, ImportError) as error:
        return str(error)
    return ""


def _refused(reason: str, path: str) -> Issue:
    seen, fix = " ".join(reason.split()).rstrip("."), f"change or remove `{path}`"
    why = "the training would end with this error once it has loaded everything"
    return Issue(seen, fix, path, subject="setting: refused", why=why)


def _find_path(reason: str, fields: dict[str, Any]) -> str:
    """Return the setting that an error names; one that the recipe gives goes before others."""
    words = re.findall(r"\w+", reason)
    known = [name for name in words if name in read_grpo_fields() and home_of(name)]
    known.sort(key=lambda name: name not in fields)
    return key_in_home(known[0]) if known else "training"


@contextmanager
def _single_process_env() -> Iterator[None]:
    """Hide a launcher's variables, and undo those that `TrainingArguments` sets."""
    kept = dict(os.environ)
    for name in _WORLD:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
