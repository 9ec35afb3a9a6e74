"""Settings that depend on others: the table of what does not work together, and what acts only beside another.

Checks, backends, evaluation and the recipe reference read the table.

Source: where trl 1.16 and transformers 5.24 read each field; `tests/unit/checks/test_compatibility.py` compares.
"""

from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import nearest
from grpo_cli.issues import Issue, Level
from grpo_cli.models.source import read_config
from grpo_cli.recipe.dataset import MixtureDataset
from grpo_cli.recipe.episode import EpisodeConfig
from grpo_cli.recipe.generation import VllmConfig
from grpo_cli.recipe.grpo_fields import default_of, key_in_home
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import AsyncConfig

VLLM, DURING, EPISODE_IMAGES = "generation.backend: vllm", "evaluation.during", "images of episodes"
_TABLE = Path(__file__).with_name("compatibility.txt")

_IS_SET: dict[str, Callable[[Recipe], bool]] = {
    "dataset.streaming": lambda recipe: recipe.dataset.streams is not None,
    "dataset.sources": lambda recipe: isinstance(recipe.dataset, MixtureDataset),
    "episode": lambda recipe: (
        recipe.has_episodes or recipe.episode != EpisodeConfig.model_construct()
    ),
    "generation.backend": lambda recipe: recipe.generation.backend != "transformers",
    "generation.vllm": lambda recipe: (
        recipe.generation.backend == "vllm"
        or recipe.generation.vllm != VllmConfig.model_construct()
    ),
    "generation.temperature": lambda recipe: recipe.generation.temperature != 1,
    "generation.sampling_parts: 2 or more": lambda recipe: recipe.generation.sampling_parts > 1,
    "launch.num_machines: 2 or more": lambda recipe: recipe.launch.num_machines > 1,
    "launch.strategy": lambda recipe: recipe.launch.strategy not in ("auto", "single", "ddp"),
    "model.lora.bias": lambda recipe: _of_lora(recipe, "bias") not in (None, "none"),
    "model.lora.target_parameters": lambda recipe: bool(_of_lora(recipe, "target_parameters")),
    "images": lambda recipe: recipe.has_images,
    EPISODE_IMAGES: lambda recipe: recipe.has_images and recipe.has_episodes,
    "no rewards": lambda recipe: not recipe.rewards,
    "no reward with a weight": lambda recipe: not recipe.learns_from_rewards,
    "training.asynchronous": lambda recipe: (
        recipe.training.mode == "async"
        or recipe.training.asynchronous != AsyncConfig.model_construct()
    ),
    "training.eval_strategy of scored data": lambda recipe: (
        not recipe.is_sampled and recipe.training.eval_strategy != "no"
    ),
    "training.sync_ref_model of an adapter": lambda recipe: bool(
        recipe.setting("sync_ref_model") and recipe.kl_weight and recipe.model.lora
    ),
}
"""Names of the table, and of checks, that are not a field with any value, or with one of those named."""


def _of_lora(recipe: Recipe, key: str) -> object:
    return recipe.model.lora.extras.get(key) if recipe.model.lora else None


class Conflict(NamedTuple):
    """Two settings that do not work together."""

    setting: str
    """Where the issue stands."""
    other: str
    why: str
    """What is reported; `-` for "does not work with" the other. `{strategy}` is the recipe's."""
    fix: str


@cache
def read_conflicts() -> tuple[Conflict, ...]:
    """Return every pair that is refused; what depends on the machine or the data is a check of its section."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    return tuple(Conflict(*line.split(" | ")) for line in lines if not line.startswith("#"))


def find_conflicts(recipe: Recipe, setting: str = "") -> Iterator[Issue]:
    """Yield what does not work together in a recipe; only conflicts of `setting` if one is named."""
    for conflict in read_conflicts():
        named = (conflict.setting, conflict.other)
        if (not setting or setting in named) and all(is_set(recipe, name) for name in named):
            seen = f"does not work with `{_show(recipe, conflict.other)}`"
            if conflict.why != "-":
                seen = conflict.why.format(
                    strategy=recipe.launch.strategy,
                    backend=recipe.generation.backend,
                    scheduler=recipe.setting("lr_scheduler_type"),
                )
            yield Issue(seen, conflict.fix, _path(conflict.setting))


def is_set(recipe: Recipe, name: str) -> bool:
    """Return whether a recipe has a setting of the table, such as `training.mode: async`; yes if none is named."""
    if not name:
        return True
    if (condition := _IS_SET.get(name)) is not None:
        return condition(recipe)
    path, _, values = name.partition(": ")
    actual = _read(recipe, path)
    return actual in values.split(", ") if values else actual not in (None, False, 0, ())


def _read(recipe: Recipe, path: str) -> object:
    """Return the value of a setting; None if a section before it is left out."""
    section, _, key = path.rpartition(".")
    if section == "training":
        return recipe.setting(key)
    value: object = recipe
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _path(name: str) -> str:
    return name.partition(":")[0].partition(" ")[0]


def _show(recipe: Recipe, name: str) -> str:
    path, mark, _ = name.partition(": ")
    return f"{path}: {attrgetter(path)(recipe)}" if mark else name


Holds = Callable[[Recipe, int], bool]
"""Whether something holds for a recipe and its number of processes."""


class Partner(NamedTuple):
    """Settings that act only beside another one."""

    fields: str
    """`GRPOConfig`'s names."""
    acts: Holds
    why: str
    """Why they do not act otherwise; `{name}` stands for the value of a setting."""
    fix: str = ""
    """What makes them act; empty if that is another training."""
    level: Level = "warning"
    """An error if training fails with them."""


_ONCE = (
    "each batch is learned from once, by the weights that sampled it",
    "set `training.num_iterations: 2`",
)
"""Why settings about probability ratios do not act, and the fix."""


def _beside(fields: str, other: str, *values: Any, level: Level = "warning") -> Partner:
    """Return settings that act only beside these values of another field of `GRPOConfig`."""
    key = key_in_home(other)
    return Partner(
        fields,
        lambda recipe, processes: recipe.setting(other) in values,
        f"`{key.rpartition('.')[2]}` is {{{other}}}",
        f"set `{key}: {str(values[0]).lower()}`",
        level,
    )


def _quote(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value).lower()


def _has_workers(recipe: Recipe, processes: int) -> bool:
    return bool(recipe.setting("dataloader_num_workers"))


def _optimizer(names: str, *, acts: bool = True) -> Holds:
    """Return whether the optimizer's name holds one of some parts."""
    parts = names.split()
    return lambda recipe, _: acts is any(part in str(recipe.setting("optim")) for part in parts)


def _is_off_policy(recipe: Recipe, processes: int) -> bool:
    """Return whether a probability ratio may differ from 1.

    Source: trl 1.16, `GRPOTrainer._generate_and_score_completions`, `generate_every`.
    """
    generation, training = recipe.generation, recipe.training
    micro_batch = training.per_device_train_batch_size * processes
    micro_steps = generation.steps_per_generation or training.gradient_accumulation_steps
    if generation.generation_batch_size is not None:
        micro_steps = max(generation.generation_batch_size // micro_batch, 1)
    is_aligned = training.gradient_accumulation_steps % (micro_steps * training.num_iterations) == 0
    return not is_aligned or generation.backend == "vllm"


def _by_ratio(fields: str, *losses: str) -> Partner:
    """Return settings that act, with these losses, only if probability ratios differ from 1."""

    def acts(recipe: Recipe, processes: int) -> bool:
        is_other = recipe.setting("loss_type") not in losses
        delta = recipe.setting("delta") if fields == "delta" else None
        # A ratio of 1 is bounded too.
        is_low = delta is not None and delta <= 1
        return is_other or is_low or _is_off_policy(recipe, processes)

    return Partner(fields, acts, *_ONCE)


def has_best(recipe: Recipe) -> bool:
    """Return whether anything compares models, or evaluations, by `metric_for_best_model`."""
    return (
        recipe.loads_best
        or recipe.training.early_stopping is not None
        or recipe.setting("save_strategy") == "best"
        or recipe.setting("lr_scheduler_type") in _BY_METRIC
    )


def _is_many(recipe: Recipe, processes: int) -> bool:
    return processes > 1


def _is_ddp(recipe: Recipe, processes: int) -> bool:
    launch = recipe.launch
    return launch.accelerate_config is not None or (
        processes > 1 and launch.strategy in ("auto", "ddp")
    )


_EVALUATES = ("steps", "epoch")
CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")
"""Losses that clip probability ratios on both sides."""
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedulers that read a metric of an evaluation."""
_WORKERS = "`dataloader_num_workers` is 0", "set `training.dataloader_num_workers: 1`"
_UNREAD = "the optimizer {optim} does not read it"

PARTNERS = (
    _beside("eval_steps", "eval_strategy", "steps"),
    _beside("eval_delay num_generations_eval", "eval_strategy", *_EVALUATES),
    _beside("eval_on_start", "eval_strategy", *_EVALUATES, level="error"),
    _beside("save_steps", "save_strategy", "steps"),
    _beside("save_total_limit save_only_model", "save_strategy", "steps", "epoch", "best"),
    _beside("gradient_checkpointing_kwargs", "gradient_checkpointing", True),
    _beside("ref_model_mixup_alpha ref_model_sync_steps", "sync_ref_model", True),
    _beside("sapo_temperature_neg sapo_temperature_pos", "loss_type", "sapo"),
    _beside("vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg", "loss_type", "vespo"),
    _beside("delta", "loss_type", *CLIPPED),
    _beside("epsilon epsilon_high", "loss_type", *CLIPPED, "cispo"),
    _beside("entropy_coef_min entropy_coef_max", "use_adaptive_entropy", True),
    _beside("entropy_coef_delta entropy_target", "use_adaptive_entropy", True),
    _beside("liger_kernel_config", "use_liger_kernel", True),
    _beside(
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_correction",
        True,
    ),
    Partner(
        "num_train_epochs",
        lambda recipe, _: recipe.training.max_steps <= 0,
        "`max_steps` is {max_steps}",
        "set `training.max_steps: -1`",
    ),
    Partner(
        "use_bias_correction_kl",
        lambda recipe, _: bool(recipe.kl_weight),
        "`beta` is 0, so there is no KL term",
        "set `training.beta: 0.04`",
    ),
    Partner(
        "metric_for_best_model greater_is_better",
        lambda recipe, _: has_best(recipe),
        "nothing looks for the best model",
        "set `training.load_best_model_at_end: true`",
    ),
    Partner("off_policy_mask_threshold", _is_off_policy, *_ONCE),
    _by_ratio("delta", *CLIPPED),
    _by_ratio("epsilon epsilon_high", *CLIPPED),
    _by_ratio("sapo_temperature_neg sapo_temperature_pos", "sapo"),
    _by_ratio("vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg", "vespo"),
    Partner("dataloader_in_order", _has_workers, *_WORKERS),
    Partner("dataloader_prefetch_factor", _has_workers, *_WORKERS, "error"),
    Partner(
        "dataloader_persistent_workers dataloader_multiprocessing_context",
        _has_workers,
        *_WORKERS,
        "error",
    ),
    Partner(
        "adam_beta1 adam_beta2",
        _optimizer("sgd adagrad rmsprop adafactor galore lomo grokadamw", acts=False),
        _UNREAD,
    ),
    Partner(
        "adam_epsilon",
        _optimizer("sgd adagrad rmsprop adafactor galore lomo grokadamw lion", acts=False),
        _UNREAD,
    ),
    Partner(
        "optim_args",
        _optimizer(
            "sgd adagrad rmsprop ademamix galore apollo anyprecision grok torch_4bit torch_8bit free stable"
        ),
        _UNREAD,
    ),
    Partner("optim_target_modules", _optimizer("galore apollo"), _UNREAD),
    Partner(
        "warmup_steps",
        lambda recipe, _: recipe.setting("lr_scheduler_type") not in ("constant", *_BY_METRIC),
        "the scheduler {lr_scheduler_type} has no warm-up",
        "set `training.lr_scheduler_type: constant_with_warmup`",
    ),
    Partner(
        "cache_implementation",
        lambda recipe, _: recipe.generation.backend == "transformers",
        "completions are sampled by {backend}",
        "set `generation.backend: transformers`",
    ),
    Partner(
        "transformers_continuous_batching_config",
        lambda recipe, _: recipe.generation.backend == "transformers_continuous_batching",
        "completions are sampled by {backend}",
        "set `generation.backend: transformers_continuous_batching`",
    ),
    Partner(
        "top_p top_k min_p repetition_penalty generation_kwargs",
        lambda recipe, _: recipe.is_sampled,
        "a training on scored data samples nothing",
    ),
    Partner(
        "ds3_gather_for_generation",
        lambda recipe, _: (
            recipe.launch.strategy == "zero3" or bool(recipe.launch.accelerate_config)
        ),
        "`launch.strategy` is {strategy}",
        "set `launch.strategy: zero3`",
    ),
    Partner(
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_find_unused_parameters",
        _is_ddp,
        "it is for several processes with `launch.strategy: ddp`",
    ),
    Partner("ddp_backend ddp_timeout log_level_replica", _is_many, "there is one process"),
    Partner(
        "log_on_each_node save_on_each_node",
        lambda recipe, _: recipe.launch.num_machines > 1,
        "there is one machine",
    ),
    Partner(
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        lambda recipe, _: not {"trackio", "all"}.isdisjoint(recipe.logging.report_to),
        "`report_to` does not name `trackio`",
        "set `logging.report_to: trackio`",
    ),
    Partner(
        "run_name project",
        lambda recipe, _: bool(recipe.logging.report_to),
        "there is no tracker",
        "set `logging.report_to: tensorboard`, or another tracker",
    ),
)
"""Every field of `GRPOConfig` that only acts beside another one."""

_MIN_LR = frozenset({"num_cycles", "min_lr", "min_lr_rate"})
SCHEDULERS: dict[str, frozenset[str]] = {
    "linear": frozenset(),
    "constant": frozenset(),
    "constant_with_warmup": frozenset(),
    "cosine": frozenset({"num_cycles"}),
    "cosine_with_restarts": frozenset({"num_cycles"}),
    "polynomial": frozenset({"lr_end", "power"}),
    "inverse_sqrt": frozenset({"timescale"}),
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": _MIN_LR | {"warmup_lr_rate"},
    "warmup_stable_decay": frozenset(
        "num_decay_steps num_stable_steps warmup_type decay_type min_lr_ratio num_cycles".split()
    ),
}
"""What `lr_scheduler_kwargs` may hold for each scheduler; those of `_BY_METRIC` hand it on to PyTorch."""


class _Settings(dict[str, str]):
    """The settings of a recipe as they are written, for the reasons of partners."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(backend=recipe.generation.backend, strategy=_quote(recipe.launch.strategy))
        self._recipe = recipe

    def __missing__(self, name: str) -> str:
        return _quote(self._recipe.setting(name))


def check_compatibility(context: CheckContext) -> Iterator[Issue]:
    """Find settings that do not work together, that nothing reads because of other ones, or that lack others."""
    recipe, processes = context.recipe, context.num_processes
    yield from find_conflicts(recipe)
    # Asynchronous training has settings of its own, which `check_async` knows.
    for partner in PARTNERS if recipe.training.mode == "sync" else ():
        if not partner.acts(recipe, processes):
            yield from _report(recipe, partner)
    yield from _check_scheduler(recipe, context.steps)
    yield from _check_needed(recipe)
    yield from _check_reentrant(recipe, processes)


def _report(recipe: Recipe, partner: Partner) -> Iterator[Issue]:
    why = partner.why.format_map(_Settings(recipe))
    effect = "fails" if partner.level == "error" else "has no effect"
    fix = f"{partner.fix}, or remove it" if partner.fix else "remove it"
    for name in partner.fields.split():
        value = recipe.setting(name)
        # A resolved recipe holds the defaults too, of TRL's other fields only those that were written.
        home, _, key = key_in_home(name).rpartition(".")
        is_written = key in attrgetter(home)(recipe).extras
        if value != default_of(name) or (value is True and is_written):
            yield Issue(f"{effect}: {why}", fix, f"{home}.{key}", level=partner.level)


def _check_scheduler(recipe: Recipe, steps: int | None) -> Iterator[Issue]:
    """Find schedulers without what they need, and arguments that they do not take.

    Source: transformers 5.24, `transformers.optimization`.
    """
    name = str(recipe.setting("lr_scheduler_type"))
    given = recipe.setting("lr_scheduler_kwargs") or {}
    path = f"training.lr_scheduler_{'kwargs' if given else 'type'}"
    if name in _BY_METRIC and recipe.training.eval_strategy == "no":
        seen = f"`{name}` reads a metric of evaluations, and `eval_strategy` is `no`"
        fix = "set `training.eval_strategy: steps`, or another scheduler"
        yield Issue(seen, fix, "training.lr_scheduler_type")
    if name not in SCHEDULERS or not isinstance(given, dict):
        return
    known = SCHEDULERS[name]
    for key in given.keys() - known:
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        close = nearest(key, known)
        fix = f"write `{close}`" if close else f"remove it; {takes}"
        yield Issue(f"`{name}` has no argument `{key}`", fix, f"{path}.{key}")
    least = given.keys() & {"min_lr", "min_lr_rate"}
    if "min_lr_rate" in known and len(least) != 1:
        seen = f"`{name}` needs one of `min_lr` and `min_lr_rate`, where the learning rate ends"
        fix = "add `lr_scheduler_kwargs: {min_lr_rate: 0.1}`, a tenth of the learning rate"
        yield Issue(f"{seen} (got both)" if least else seen, "remove one" if least else fix, path)
    if "num_decay_steps" in known and "num_decay_steps" not in given:
        seen = f"`{name}` needs `num_decay_steps`, the steps in which the learning rate falls at the end"
        tenth = max((steps or 100) // 10, 1)
        yield Issue(seen, f"add `lr_scheduler_kwargs: {{num_decay_steps: {tenth}}}`", path)


def _check_needed(recipe: Recipe) -> Iterator[Issue]:
    """Find optimizers and losses without what they need."""
    optimizer = str(recipe.setting("optim"))
    projects = "galore" in optimizer or "apollo" in optimizer
    if projects and not recipe.setting("optim_target_modules"):
        seen = f"is needed with `optim: {optimizer}`: the modules whose gradients it projects"
        fix = "set `training.optim_target_modules: all-linear`"
        yield Issue(seen, fix, "training.optim_target_modules")
    if recipe.setting("router_aux_loss_coef"):
        config = read_config(recipe.model)
        if config and "expert" not in str(config):
            seen = "weighs the routing loss of a mixture of experts, and this model has no experts"
            yield Issue(seen, "remove it", "training.router_aux_loss_coef")


def _check_reentrant(recipe: Recipe, processes: int) -> Iterator[Issue]:
    """Find checkpointing that fails in the first backward pass of several processes.

    Source: torch 2.13, `DistributedDataParallel`: a reentrant backward pass marks parameters ready twice.
    """
    looks = recipe.setting("ddp_find_unused_parameters")
    if processes > 1 and looks and recipe.is_reentrant:
        seen = (
            "with `ddp_find_unused_parameters`, the first backward pass of several processes fails"
        )
        fix = "set `use_reentrant: false`, or remove `training.ddp_find_unused_parameters`"
        yield Issue(seen, fix, "training.gradient_checkpointing_kwargs.use_reentrant")
