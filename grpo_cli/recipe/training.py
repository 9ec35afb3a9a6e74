"""The `training` section: optimization, schedule, checkpoints."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from grpo_cli.errors import nearest
from grpo_cli.recipe.asynchronous import AsyncConfig
from grpo_cli.recipe.base import Integer, Number, OneOrMany, OpenSection, Section
from grpo_cli.recipe.fast import FastConfig, FastSwitch

StoppingRule = Literal[
    "nan_loss",
    "entropy_collapse",
    "entropy_explosion",
    "kl_runaway",
    "gradient_spike",
    "clip_share",
    "no_signal",
    "all_solved",
    "repeated_answers",
    "truncation",
    "length_explosion",
    "length_collapse",
    "rewards_apart",
    "reward_swamped",
    "absent_reward",
    "constant_reward",
    "early_peak",
    "falling_reward",
    "held_out_gap",
    "too_high_learning_rate",
    "too_low_learning_rate",
    "sampling_mismatch",
]
"""Names of the rules of `grpo diagnose` that may stop a run: all but `_IDLE`."""
_IDLE = {
    "slow_reward": "costs time and spoils nothing",
    "sampling_starves": "costs time and spoils nothing",
    "held_out_collapse": "is looked for after training",
    "held_out_loss": "is looked for after training",
}
"""The rules that stop no run, and why."""


def _check_rule(value: object) -> object:
    """Keeps the names of all rules out of a message that needs none of them."""
    if not isinstance(value, str):
        return value
    if (why := _IDLE.get(value)) is not None:
        raise PydanticCustomError(
            "grpo_rule", f"`{value}` {why}, so it stops no run", {"fix": f"remove `{value}`"}
        )
    names = get_args(StoppingRule)
    if value not in names and nearest(value, names) is None:
        raise PydanticCustomError(
            "grpo_rule",
            "is no rule that stops a run",
            {"fix": "choose from those that `grpo diagnose --rules` lists"},
        )
    return value


def _check_steps(value: int) -> int:
    """TRL takes every negative number for -1, and trains one step for 0."""
    if value < 1 and value != -1:
        raise PydanticCustomError("grpo_steps", "should be at least 1, or -1 to train by epochs")
    return value


class EarlyStoppingConfig(Section):
    """Stop when an evaluation metric no longer gets better."""

    metric: str = "eval_reward"
    """The metric to watch; higher is better unless it ends in `loss`."""
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
    """Optimizer steps in all; -1 leaves it to `num_train_epochs`."""
    learning_rate: Number = Field(default=1e-6, ge=0)
    """Peak learning rate. The default suits full fine-tuning; LoRA wants 1e-5 to 5e-4."""
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    """When to evaluate during training."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when an evaluation metric no longer gets better."""
    stop_when: OneOrMany[Annotated[StoppingRule, BeforeValidator(_check_rule)]] = ()
    """Rules of `grpo diagnose` that stop the run where they find something, such as
    `[nan_loss, entropy_collapse]`; the checkpoint of that step is saved. `grpo diagnose --rules` lists them."""

    fast: FastSwitch = FastConfig()
    """Less work for the same gradient: `false` trains as TRL does, a section switches single parts. What would
    not be exact with a recipe is left off, and said."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` samples a batch, then learns from it. `async` (experimental) has a vLLM server sample all the
    time, with weights that are some steps old, by TRL's `AsyncGRPOTrainer`; it knows fewer settings, and
    `grpo check` names those that it does not."""
    asynchronous: AsyncConfig = AsyncConfig()
    """How far sampling may run ahead, where `mode` is `async`."""
    OURS: ClassVar[frozenset[str]] = frozenset(
        {"early_stopping", "stop_when", "fast", "mode", "asynchronous"}
    )

    def mixed_precision(self, *, cpu: bool) -> Literal["bf16", "fp16", "no"]:
        """Return what the model is computed in, whatever its weights are in; `no` is their own precision.

        That is bf16 unless told otherwise; on a CPU, which may only emulate it, it has to be asked for.
        """
        if self.extras.get("fp16"):
            return "fp16"
        return "bf16" if self.extras.get("bf16", not cpu) else "no"

    def trl_fields(self) -> dict[str, Any]:
        """Every `GRPOConfig` field this section sets, under TRL's names."""
        return self.model_dump(exclude=set(self.OURS))
