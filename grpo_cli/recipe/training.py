"""The `training` section: optimization, schedule, checkpoints, the fast step, asynchronous training."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from grpo_cli.errors import nearest
from grpo_cli.recipe.base import Integer, Number, OneOrMany, OpenSection, Section, ShortForm

if TYPE_CHECKING:
    pass

StoppingRule = Literal[
    "nan_loss",
    "entropy_collapse",
    "entropy_explosion",
    "kl_runaway",
    "gradient_spike",
    "clip_share",
    "no_signal",
    "source_starves",
    "source_forgets",
    "all_solved",
    "repeated_answers",
    "truncation",
    "tools_unused",
    "malformed_calls",
    "tool_failures",
    "budget_ends_episodes",
    "repeated_calls",
    "length_explosion",
    "length_collapse",
    "rewards_apart",
    "reward_swamped",
    "reward_failures",
    "absent_reward",
    "constant_reward",
    "early_peak",
    "falling_reward",
    "flat_reward",
    "held_out_gap",
    "too_high_learning_rate",
    "too_low_learning_rate",
    "sampling_mismatch",
]
"""Names of the rules of `grpo diagnose` that may stop a run: all but `_IDLE`."""
_IDLE = {
    **dict.fromkeys(
        ("slow_reward", "slow_tool", "sampling_starves"), "costs time and spoils nothing"
    ),
    **dict.fromkeys(("held_out_collapse", "held_out_loss"), "is checked after training"),
}
"""The rules that stop no run, and why."""
PARTS = ("no_signal", "shared_prompts", "sampling")
GRAPHS = "cuda_graphs"
BUDGET = "max_tokens_per_micro_batch"
IMAGES = "images"
"""Whether prompts have images; beside the fields of `GRPOConfig`."""
ATTENTION = ("sdpa", "eager", "flash")
"""Parts of the names of attention implementations that prompts can be shared with."""
_SAMPLED_BY = frozenset(
    "max_new_tokens max_length do_sample temperature top_k top_p min_p repetition_penalty pad_token_id "
    "bos_token_id eos_token_id disable_compile transformers_version use_cache _from_model_config".split()
)
"""Settings of `generate()` that `fast/decoding.py` honours, or that change nothing."""
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "typical_p": 1.0, "guidance_scale": 1.0}
"""Other settings, and the values that change nothing."""


class FastConfig(Section):
    """Less work for the same gradient; each part is on if it is exact for the recipe."""

    no_signal: bool = True
    """Skip completions with advantage 0 in the forward and backward pass: they add nothing to the gradient."""
    shared_prompts: bool = True
    """Compute the prompt of a group once in the forward and backward pass, without padding."""
    sampling: bool = True
    """Compute the prompt of a group once while sampling, and stop computing completions that have ended."""
    cuda_graphs: bool = False
    """On a GPU with `generation.backend: transformers`, sample each token by replaying a CUDA graph, with adapters
    merged in a copy of the weights. Needs `sampling`. Off by default, since it has not been measured on a GPU."""
    max_tokens_per_micro_batch: Integer | None = Field(default=None, ge=1)
    """Maximum tokens in one forward and backward pass, which limits training memory. By default, as many as
    `per_device_train_batch_size` completions have, including padding. A longer completion gets a separate
    pass."""


def _read_switch(value: Any) -> Any:
    if isinstance(value, bool):
        return dict.fromkeys(PARTS, value)
    if not isinstance(value, Mapping | FastConfig):
        meant = "false" if str(value).lower() in ("no", "off", "0", "none") else "true"
        raise PydanticCustomError(
            "grpo_switch", "should be true, false, or a mapping", {"fix": f"write `{meant}`"}
        )
    return value


FastSwitch = Annotated[FastConfig, ShortForm(_read_switch, lambda full: {"type": "boolean"})]
"""`true`, `false`, or the section."""


class AsyncConfig(Section):
    """Sampling and training at the same time; used if `mode` is `async`."""

    max_staleness: Integer = Field(default=4, ge=1)
    """Number of weight updates (steps, if `weight_sync_steps` is 1) that a sample may lag behind. Older samples
    are dropped, and no more samples are generated ahead than that many steps use."""
    weight_sync_steps: Integer = Field(default=1, ge=1)
    """Steps between updates of the server's weights."""
    token_budget: Integer | None = Field(default=None, ge=1)
    """Maximum tokens in one micro-step on each device: a micro-step takes as many completions as fit, and longer
    completions are dropped. By default a micro-step takes `per_device_train_batch_size` completions."""


def _check_rule(value: object) -> object:
    """Keep the names of all rules out of a message that needs none of them."""
    if not isinstance(value, str):
        return value
    if (why := _IDLE.get(value)) is not None:
        raise PydanticCustomError(
            "grpo_rule", f"`{value}` {why}, so it stops no run", {"fix": f"remove `{value}`"}
        )
    names = get_args(StoppingRule)
    if value not in names and nearest(value, names) is None:
        fix = "choose from those that `grpo diagnose --rules` lists"
        raise PydanticCustomError("grpo_rule", "is not a rule that stops a run", {"fix": fix})
    return value


def _check_steps(value: int) -> int:
    """TRL takes every negative number for -1, and trains one step for 0."""
    if value < 1 and value != -1:
        raise PydanticCustomError("grpo_steps", "should be at least 1, or -1 to train by epochs")
    return value


class EarlyStoppingConfig(Section):
    """Stop when an evaluation metric no longer improves."""

    metric: str | None = None
    """The metric to watch, by default `training.metric_for_best_model`; higher is better unless it ends in `loss`
    or `kl`."""
    patience: Integer = Field(default=5, ge=1)
    """Evaluations without improvement before stopping."""
    min_delta: Number = Field(default=0.0, ge=0)
    """Smallest change that counts as an improvement."""


class TrainingConfig(OpenSection):
    """Optimization; any other `GRPOConfig` field goes here by its own name."""

    per_device_train_batch_size: Integer = Field(default=8, ge=1)
    """Completions in one micro-step on each device."""
    per_device_eval_batch_size: Integer = Field(default=8, ge=1)
    """Completions in one evaluation step on each device."""
    gradient_accumulation_steps: Integer = Field(default=1, ge=1)
    """Micro-steps in one optimizer step."""
    num_iterations: Integer = Field(default=1, ge=1)
    """Passes over each generation batch (μ in the GRPO paper)."""
    num_train_epochs: Number = Field(default=3.0, gt=0)
    """Passes over the prompts; `max_steps` overrides it."""
    max_steps: Annotated[Integer, AfterValidator(_check_steps)] = -1
    """Total optimizer steps; -1 uses `num_train_epochs`."""
    learning_rate: Number = Field(default=1e-6, ge=0)
    """Peak learning rate. The default suits full fine-tuning; LoRA needs 1e-5 to 5e-4."""
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    """When to evaluate during training."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when an evaluation metric no longer improves."""
    stop_when: OneOrMany[Annotated[StoppingRule, BeforeValidator(_check_rule)]] = ()
    """Rules of `grpo diagnose` that stop the run if they apply, such as `[nan_loss, entropy_collapse]`; a
    checkpoint of that step is saved. `grpo diagnose --rules` lists them."""
    fast: FastSwitch = FastConfig.model_construct()
    """Less work for the same gradient: `false` trains as TRL does, a mapping switches individual parts. Parts that
    would not be exact for the recipe are turned off with a note."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` samples a batch, then trains on it. With `async` (experimental), a vLLM server samples continuously,
    with weights that are some steps old, through TRL's `AsyncGRPOTrainer`; it supports fewer settings, and
    `grpo check` reports unsupported ones."""
    asynchronous: AsyncConfig = AsyncConfig.model_construct()
    """How far sampling may run ahead if `mode` is `async`."""
    OURS: ClassVar[frozenset[str]] = frozenset(
        {"early_stopping", "stop_when", "fast", "mode", "asynchronous"}
    )

    def trl_fields(self) -> dict[str, Any]:
        """Return every `GRPOConfig` field this section sets, under TRL's names."""
        return self.model_dump(exclude=set(self.OURS))


def leave_off(fast: FastConfig, parts: Iterable[str]) -> FastConfig:
    """Return the same without these parts."""
    off: dict[str, bool | None] = {part: None if part == BUDGET else False for part in parts}
    if "sampling" in off:
        off[GRAPHS] = False
    return fast.model_copy(update=off)


def find_beyond(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of `generate()` that the fast sampler does not support."""
    beyond = [
        name
        for name, value in settings.items()
        if name not in _SAMPLED_BY and value not in (None, False, _NEUTRAL.get(name))
    ]
    return sorted(beyond + ["use_cache"] * (settings.get("use_cache") is False))


def find_left_off(fast: FastConfig, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts that would change what is sampled or learned, or cost time; and why.

    Args:
        fast: The switches.
        settings: `GRPOConfig` fields by name, and `IMAGES`; those that are not there have TRL's defaults.
    """
    if settings.get(IMAGES):
        why = "prompts have images, which TRL's own step places"
        return {part: why for part in (*PARTS, BUDGET, GRAPHS) if getattr(fast, part)}
    repacking = _why_no_repacking(settings)
    reasons: dict[str, str | None] = {
        "no_signal": repacking,
        "shared_prompts": repacking,
        BUDGET: repacking,
    }
    if settings.get("beta") and not repacking:
        reason = f"every completion has a KL term, of weight {settings['beta']:g}"
        reasons["no_signal"] = reason
    # Either of the last two turns compilation on by itself.
    compiles = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    if any(map(settings.get, compiles)) and not repacking:
        reasons["shared_prompts"] = "torch_compile would compile each batch again"
    if settings.get("neftune_noise_alpha"):
        reasons["sampling"] = "neftune_noise_alpha makes other noise for every copy of a prompt"
    if beyond := find_beyond(settings.get("generation_kwargs") or {}):
        reasons["sampling"] = f"only generate() knows {', '.join(beyond)} (generation_kwargs)"
    reasons[GRAPHS] = reasons.get("sampling") or (None if fast.sampling else "`sampling` is off")
    return {part: reason for part, reason in reasons.items() if reason and getattr(fast, part)}


def _why_no_repacking(settings: Mapping[str, Any]) -> str | None:
    """Return what binds completions to the micro-batch that they came in.

    Source: `GRPOTrainer._compute_loss`, trl 1.16.0; `Trainer`, transformers 5.17.
    """
    optimizer = settings.get("optim")
    # A recipe has its name, `TrainingArguments` an enumeration.
    optimizer = str(getattr(optimizer, "value", optimizer))
    for name in ("entropy_coef", "use_adaptive_entropy"):
        if settings.get(name):
            return f"the entropy of every completion is learned from ({name})"
    if settings.get("top_entropy_quantile", 1.0) < 1:
        return "top_entropy_quantile chooses among all tokens of a micro-batch"
    if settings.get("beta") and settings.get("loss_type") == "bnpo":
        return "loss_type bnpo weighs the KL term by the micro-batch"
    if settings.get("neftune_noise_alpha"):
        return "neftune_noise_alpha makes noise by the width of a micro-batch"
    if optimizer in ("lomo", "adalomo") or optimizer.endswith("layerwise"):
        return f"optim {optimizer} updates the weights within the backward pass"
    return None
