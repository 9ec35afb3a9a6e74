"""Settings that run but are usually wrong, and settings that a library refuses."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from grpo_cli.errors import install_extra, nearest
from grpo_cli.issues import Issue, Level
from grpo_cli.recipe.grpo_fields import home_of, key_in_home, read_grpo_fields
from grpo_cli.recipe.model import LORA, rates_of
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.registry import find_kind

_MOST_BETA = 1.0
"""Published runs use 0.001 to 0.04; from here on the KL term outweighs the reward."""
_HELD_RATE = 1e-5
"""Up to it, clipped gradients alone have held full fine-tuning without a KL term in published runs."""
_FEWEST_GENERATIONS = 4
_LEAST_TEMPERATURE = 0.3


def find_risks(recipe: Recipe, num_processes: int, gpus: int) -> Iterator[Issue]:
    """Find settings that run to the end and teach little; `gpus` are the visible ones of this machine."""
    yield from _check_rate(recipe)
    yield from _check_hold(recipe)
    yield from _check_sampling(recipe)
    for index, reward in enumerate(recipe.rewards):
        params = find_kind(reward.kind)
        judges = params is not None and params.meta.right_answer is not None
        if reward.weight < 0 and judges and reward.kind != "contains":
            seen, fix = (
                f"`{reward.kind}` has weight {reward.weight:g}",
                f"set `weight: {-reward.weight:g}`",
            )
            why = "right answers are punished, and the policy learns to avoid them"
            yield _risk("reward weights", f"rewards.{index}.weight", seen, fix, why)
    size = recipe.generation.num_generations
    if size < _FEWEST_GENERATIONS:
        fix = "set `num_generations: 8` (and a batch size it divides: grpo check-batch)"
        why = f"advantages compare {size} completions only: most groups are all right or all wrong"
        path = "generation.num_generations"
        yield _risk("group size", path, f"num_generations is {size}", fix, why)
    on_gpu = gpus > 0 and not recipe.launch.use_cpu
    if recipe.generation.backend != "vllm" and on_gpu and num_processes > 1:
        seen = f"backend is {recipe.generation.backend} on {num_processes} GPUs"
        fix = f"set `generation.backend: vllm` ({install_extra('vllm')})"
        why = "sampling takes most of a step, and every GPU waits for the slowest one's generate()"
        yield _risk("generation backend", "generation.backend", seen, fix, why)


def _risk(
    subject: str, path: str, seen: str, fix: str, why: str, level: Level = "warning"
) -> Issue:
    return Issue(seen, fix, path, level=level, subject=f"setting: {subject}", why=why)


def _check_rate(recipe: Recipe) -> Iterator[Issue]:
    training, lora = recipe.training, recipe.model.lora is not None
    rate, path, subject = training.learning_rate, "training.learning_rate", "learning rate"
    good = "1e-4" if lora else "1e-6"
    fix = f"set `learning_rate: {good}`"
    if lora and rate < LORA.least:
        default = "" if "learning_rate" in training.model_fields_set else " (the default)"
        seen = f"learning_rate is {rate:g}{default} with LoRA"
        why = "adapters hardly move at a rate meant for full fine-tuning, and the reward stays flat"
        yield _risk(subject, path, seen, fix, why)
    elif rate > rates_of(recipe.model).most:
        seen = f"learning_rate is {rate:g} {'with' if lora else 'without'} LoRA"
        fix += "" if lora else ", or add `model.lora`"
        why = "a policy trained at this rate most often collapses within tens of steps"
        yield _risk(subject, path, seen, fix, why)


def _check_hold(recipe: Recipe) -> Iterator[Issue]:
    path, beta = "training.beta", recipe.setting("beta") or 0.0
    if beta > _MOST_BETA:
        why = "the KL term outweighs the reward, and the policy stays where it is"
        fix = "set `training.beta: 0.04`, or less"
        yield _risk("KL term", path, f"beta is {beta:g}", fix, why)
    if (
        recipe.kl_weight
        or recipe.model.lora
        or recipe.training.early_stopping
        or not recipe.is_sampled
    ):
        return
    norm, rate = recipe.setting("max_grad_norm"), recipe.training.learning_rate
    if not norm or rate > _HELD_RATE:
        loose = f"learning_rate {rate:g}" if norm else "no gradient clipping (max_grad_norm: 0)"
        seen = f"beta is 0, all weights are trained, and {loose}"
        fix = "set `training.beta: 0.001` to `0.04`, or `learning_rate: 1e-6`, or add `model.lora`"
        why = "nothing keeps the model near the one it started from when the reward can be gamed"
        yield _risk("nothing holds the policy", path, seen, fix, why)


def _check_sampling(recipe: Recipe) -> Iterator[Issue]:
    generation = recipe.generation
    neutral = {"top_p": (None, 1), "top_k": (None, 0), "min_p": (None, 0)}
    neutral["repetition_penalty"] = (None, 1)
    values = {name: getattr(generation, name) for name in neutral}
    narrowed = {name: value for name, value in values.items() if value not in neutral[name]}
    if narrowed and generation.backend == "vllm":
        seen = ", ".join(f"{name}: {value:g}" for name, value in narrowed.items()) + " with vLLM"
        fix = "remove it; `temperature` alone keeps the two in step"
        why = (
            "vLLM draws from a narrowed distribution, the trainer's log-probabilities are of the whole one, so "
            "importance ratios are wrong"
        )
        yield _risk("narrowed sampling", f"generation.{next(iter(narrowed))}", seen, fix, why)
    if generation.temperature < _LEAST_TEMPERATURE:
        why = "the completions of a group come out nearly the same, and equal rewards teach nothing"
        seen, path = f"temperature is {generation.temperature:g}", "generation.temperature"
        yield _risk("temperature", path, seen, "set `temperature: 1.0`", why)


# --- what libraries refuse ---------------------------------------------------------------------

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
        yield _risk("generation_kwargs", f"{path}.{name}", seen, fix, why, level="error")
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
    return _risk("refused", path, seen, fix, why, level="error")


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
