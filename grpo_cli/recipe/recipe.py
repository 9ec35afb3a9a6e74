"""The whole recipe: one frozen object, the only input of everything downstream."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from grpo_cli.recipe.base import (
    AS_PATH,
    NAME,
    Integer,
    Number,
    OneOrMany,
    OpenSection,
    Section,
    ShortForm,
    read_fields,
)
from grpo_cli.recipe.dataset import DatasetConfig, EnvironmentDataset, MixtureDataset, ScoredDataset
from grpo_cli.recipe.episode import EpisodeConfig, KindConfig
from grpo_cli.recipe.evaluation import EvaluationConfig
from grpo_cli.recipe.expect import ExpectConfig
from grpo_cli.recipe.generation import GenerationConfig
from grpo_cli.recipe.launch import SHARED_WEIGHTS, LaunchConfig
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.recipe.teacher import TeacherConfig
from grpo_cli.recipe.training import (
    ATTENTION,
    BUDGET,
    GRAPHS,
    IMAGES,
    PARTS,
    FastConfig,
    TrainingConfig,
    find_left_off,
    leave_off,
)
from grpo_cli.recipe.warmup import WarmupConfig


def _none_as_empty(value: Any) -> Any:
    """Read TRL's `none` as no tracker at all."""
    return () if value in (None, "none", ["none"]) else value


class LoggingConfig(OpenSection):
    """Where metrics and samples go; `metrics.jsonl` in the run folder is always written."""

    report_to: Annotated[OneOrMany[str], BeforeValidator(_none_as_empty)] = ()
    """Trackers: `tensorboard`, `wandb`, `trackio`, `mlflow`, …; `all` uses every installed tracker."""
    log_completions: bool = True
    """Write every sampled group with its scores to `completions/`."""
    logging_steps: Number = Field(default=1, gt=0)
    """Optimizer steps between two records (TRL's own default is 10)."""

    def trl_fields(self) -> dict[str, Any]:
        """Return every `GRPOConfig` field this section sets, under TRL's names."""
        fields = self.model_dump(exclude={"log_completions"})
        return {**fields, "report_to": list(self.report_to)}


OneOrManyKinds = Annotated[
    tuple[KindConfig, ...],
    ShortForm(
        lambda value: (value,) if isinstance(value, dict | KindConfig) else value,
        lambda full: full["items"],
    ),
]
"""A list that may be written as its only entry."""


class Recipe(Section):
    """A GRPO training, from the model to the launch."""

    name: str = Field(pattern=NAME)
    """Name of the runs: they go to `runs/<name>/<timestamp>/`."""
    description: str | None = None
    """What this recipe is for."""
    seed: Integer = Field(default=42, ge=0, lt=2**32)
    """Seed for data order, adapters and sampling."""
    model: ModelConfig
    """The model to train."""
    dataset: DatasetConfig
    """The rows, and how they become prompts."""
    teacher: Annotated[TeacherConfig, AS_PATH] | None = None
    """A model whose answers are learned from, beside the rewards or without any."""
    rewards: tuple[RewardConfig, ...] = Field(default=(), validate_default=True)
    """How completions are scored: the weighted sum of the list. Left out only with `dataset.kind: scored`, or with
    a `teacher`; beside that, rewards of weight 0 only measure."""
    tools: tuple[KindConfig, ...] = ()
    """Tools without a state that the model may call."""
    environment: OneOrManyKinds = Field(default=(), validate_default=True)
    """What the model acts in: one entry, or a list in which each row takes the first entry whose `when` holds."""
    episode: EpisodeConfig = EpisodeConfig.model_construct()
    """Limits of an episode, and what happens to calls that fail."""
    generation: GenerationConfig = GenerationConfig.model_construct()
    """How completions are sampled."""
    training: TrainingConfig = TrainingConfig.model_construct()
    """How the model is trained."""
    warmup: WarmupConfig | None = None
    """Supervised steps before GRPO; leave out for none."""
    launch: LaunchConfig = LaunchConfig.model_construct()
    """The devices to train on."""
    logging: LoggingConfig = LoggingConfig.model_construct()
    """What is logged, and where."""
    evaluation: EvaluationConfig = EvaluationConfig.model_construct()
    """How the model is evaluated before, during and after training."""
    expect: ExpectConfig | None = None
    """The expected ranges of metrics, and the runs that they come from."""

    @field_validator("teacher")
    @classmethod
    def _check_teacher(cls, teacher: Any, info: ValidationInfo) -> Any:
        """Refuse a teacher of answers that the model has not sampled."""
        if teacher is not None and isinstance(info.data.get("dataset"), ScoredDataset):
            message = "corrects answers that the model samples, and with `dataset.kind: scored` it samples none"
            raise PydanticCustomError("grpo_teacher", message, {"fix": "remove it"})
        return teacher

    @field_validator("rewards", mode="before")
    @classmethod
    def _check_rewards(cls, rewards: Any, info: ValidationInfo) -> Any:
        """Require rewards, except with rows that are scored already or with a teacher."""
        dataset = info.data.get("dataset")
        # None if there is none; absent if it is wrong.
        has_teacher = info.data.get("teacher", True) is not None
        if isinstance(dataset, ScoredDataset):
            if rewards:
                message = "is for sampled completions; with `dataset.kind: scored` the rewards are in the rows"
                fix = (
                    "remove it (`rewards: []` if a parent has some), or use another `dataset.kind`"
                )
                raise PydanticCustomError("grpo_scored", message, {"fix": fix})
        elif has_teacher:
            return rewards
        elif rewards == []:
            length = {"field_type": "Tuple", "min_length": 1, "actual_length": 0}
            raise PydanticKnownError("too_short", length)
        elif rewards == () and dataset is not None:
            raise PydanticKnownError("missing")
        return rewards

    @field_validator("environment")
    @classmethod
    def _check_environment(
        cls, environment: tuple[KindConfig, ...], info: ValidationInfo
    ) -> tuple[KindConfig, ...]:
        """Require one if the environment asks, and none if nothing is sampled."""
        dataset = info.data.get("dataset")
        parts = dataset.parts if dataset is not None else ()
        if any(isinstance(each, EnvironmentDataset) for each in parts) and not environment:
            message = "is missing: with `kind: environment` in the dataset it is what gives the model its prompts"
            fix = "add it, such as `environment: {kind: python, path: ./env.py:Game}`"
            raise PydanticCustomError("grpo_environment", message, {"fix": fix})
        if isinstance(dataset, ScoredDataset) and environment:
            message = (
                "is for sampled completions, and with `dataset.kind: scored` nothing is sampled"
            )
            raise PydanticCustomError("grpo_environment", message, {"fix": "remove it"})
        return environment

    @property
    def has_episodes(self) -> bool:
        """True if completions have several turns."""
        return bool(self.tools or self.environment)

    @property
    def has_images(self) -> bool:
        """True if the model may read images: those of prompts, or what tools and environments return."""
        return self.dataset.has_images or (self.has_episodes and self.episode.images)

    @property
    def stages(self) -> dict[str, str]:
        """What comes before GRPO or beside its rewards, in words."""
        adapter, teacher, warmup = self.model.adapter, self.teacher, self.warmup
        told = {}
        if adapter is not None:
            told["adapter"] = adapter.path
        if warmup is not None:
            told["warm-up"] = warmup.described
        if teacher is not None:
            told["teacher"] = f"{teacher.place} × {teacher.weight:g}"
        return told

    @property
    def kl_weight(self) -> float:
        """Weight of the KL term: to the teacher, or by `training.beta` to the reference model."""
        beta = self.setting("beta") or 0.0
        return float(beta if self.teacher is None else self.teacher.weight)

    @property
    def learns_from_rewards(self) -> bool:
        """True if rewards decide what is learned; otherwise only a teacher does."""
        return self.teacher is None or any(reward.weight for reward in self.rewards)

    @property
    def best_metric(self) -> str | None:
        """The logged metric that decides on the best checkpoint and on early stopping; None if nothing does."""
        training, during = self.training, self.evaluation.during
        stopping = training.early_stopping
        named = self.setting("metric_for_best_model")
        if stopping is not None and stopping.metric is not None:
            named = stopping.metric
        if named is not None:
            return f"eval_{str(named).removeprefix('eval_')}"
        if training.eval_strategy != "no":
            if not self.is_sampled:
                return "eval_ranking"
            return "eval_reward" if self.learns_from_rewards else "eval_kl"
        return f"{during[0].prefix}reward" if during else None

    @property
    def is_best_of_held_out_set(self) -> bool:
        """True if `best_metric` is of a set of `evaluation.during`."""
        metric = self.best_metric or ""
        return any(metric.startswith(each.prefix) for each in self.evaluation.during)

    @property
    def loads_best(self) -> bool:
        """True if the final model is the best checkpoint."""
        return bool(self.setting("load_best_model_at_end"))

    @property
    def is_reentrant(self) -> bool:
        """True if activations are computed again in a backward pass inside the backward pass."""
        options = self.setting("gradient_checkpointing_kwargs") or {}
        return bool(self.setting("gradient_checkpointing") and options.get("use_reentrant"))

    def mixed_precision(self, *, cpu: bool) -> Literal["bf16", "fp16", "no"]:
        """Return the precision of the computation, whatever the weights are in; `no` is their own.

        That is bf16 by default on a GPU; on a CPU, which may only emulate it, the recipe has to set it.
        """
        if self.setting("fp16"):
            return "fp16"
        bf16 = self.setting("bf16")
        return "bf16" if (not cpu if bf16 is None else bf16) else "no"

    def setting(self, name: str) -> Any:
        """Return the value of a `GRPOConfig` field that has a place in the recipe, or else TRL's default.

        Args:
            name: TRL's name of the field, such as `beta` or `vllm_max_model_length`.

        Returns:
            The value; None for a default that is worked out when TRL runs.
        """
        sections: tuple[OpenSection, ...] = (self.training, self.generation, self.logging)
        if name.startswith("vllm_"):
            sections = (self.generation.vllm,)
        key = name.removeprefix("vllm_")
        for section in sections:
            if key in type(section).model_fields or key in (section.model_extra or ()):
                return getattr(section, key)
        return read_fields("GRPOConfig")[name].default

    def sampling_settings(self, evaluation: EvaluationConfig | None = None) -> dict[str, Any]:
        """Return how completions are sampled outside of training, as `sample_completions` takes it."""
        evaluation = evaluation or self.evaluation
        return {
            "max_new_tokens": self.generation.max_completion_length,
            "temperature": evaluation.temperature,
            "batch_size": evaluation.batch_size,
            "chat_template_kwargs": self.setting("chat_template_kwargs"),
            **self.generation.reading,
        }

    def trl_fields(self) -> dict[str, Any]:
        """Return every `GRPOConfig` field that the sections set, under TRL's names.

        Not `load_best_model_at_end` by a set of `evaluation.during`, for which `GRPOConfig` insists on an
        `eval_strategy` all the same.
        """
        sections = (self.training, self.generation, self.logging)
        fields = {name: value for each in sections for name, value in each.trl_fields().items()}
        if isinstance(self.dataset, MixtureDataset) or self.dataset.streams:
            # Their rows are in the order in which they are drawn.
            fields["shuffle_dataset"] = False
        if self.is_best_of_held_out_set:
            fields.pop("load_best_model_at_end", None)
        return fields

    @property
    def is_sampled(self) -> bool:
        """True if training samples completions; with scored data it does not."""
        return not isinstance(self.dataset, ScoredDataset)


def read_resolved(values: dict[str, Any]) -> Recipe:
    """Return the recipe of `resolved.json`, also of one that an earlier version wrote; raises `ValueError`."""
    # Earlier versions chose the held-out rows by the recipe's seed.
    values["dataset"].setdefault("eval_seed", values["seed"])
    # And some could evaluate tasks of lm-eval during training.
    during = values["evaluation"].get("during", ())
    values["evaluation"]["during"] = [each for each in during if not each.pop("task", None)]
    return Recipe.model_validate(values)


def describe_fast(
    recipe: Recipe, *, cpu: bool = False, excluded: Mapping[str, str] | None = None
) -> str:
    """Return the parts that are on, and why others are off: `shared_prompts; off: no_signal (beta is …)`.

    Args:
        recipe: Whose `training.fast` is described.
        cpu: Whether the machine has no GPU.
        excluded: Parts that the training turned off on the model, and why.
    """
    if recipe.training.mode == "async":
        return "as TRL's asynchronous trainer does"
    if cpu:
        launch = recipe.launch.model_copy(update={"use_cpu": True})
        recipe = recipe.model_copy(update={"launch": launch})
    left_off = {**_find_left_off(recipe), **(excluded or {})}
    resolved = leave_off(resolve_fast(recipe), left_off)
    on = [part for part in (*PARTS, GRAPHS) if getattr(resolved, part)]
    if resolved.max_tokens_per_micro_batch:
        on.append(f"{BUDGET} {resolved.max_tokens_per_micro_batch}")
    off: dict[str, list[str]] = {}
    more = [BUDGET] * (BUDGET in left_off) + [GRAPHS] * recipe.training.fast.cuda_graphs
    for part in (*PARTS, *more):
        samples_itself = part == "sampling" and recipe.generation.backend == "vllm"
        if part not in on and not samples_itself:
            off.setdefault(left_off.get(part) or _why_not_wanted(recipe, part), []).append(part)
    reasons = "; ".join(f"{', '.join(parts)} ({why})" for why, parts in off.items())
    return "; ".join(filter(None, [", ".join(on), f"off: {reasons}" if off else ""]))


def _why_not_wanted(recipe: Recipe, part: str) -> str:
    if not getattr(recipe.training.fast, part):
        return "switched off"
    if not recipe.is_sampled:
        return "scored data is not sampled"
    return f"backend {recipe.generation.backend} samples in its own way"


def resolve_fast(recipe: Recipe) -> FastConfig:
    """Return the switches without the parts that are not exact with this recipe; a model may exclude more."""
    off = (*PARTS, BUDGET) if recipe.training.mode == "async" else _find_left_off(recipe)
    return leave_off(requested_parts(recipe), off)


def requested_parts(recipe: Recipe) -> FastConfig:
    """Return the switches; `sampling` only if transformers samples."""
    fast = recipe.training.fast
    if recipe.is_sampled and recipe.generation.backend in ("transformers", "auto"):
        return fast
    return leave_off(fast, ["sampling"])


def _find_left_off(recipe: Recipe) -> dict[str, str]:
    fast, training, model = requested_parts(recipe), recipe.training, recipe.model
    options = recipe.generation.backend_kwargs
    settings = {**training.extras, "beta": recipe.kl_weight, "generation_kwargs": options}
    settings[IMAGES] = recipe.has_images
    left_off = find_left_off(fast, settings)
    if fast.cuda_graphs and (why := _why_no_graphs(recipe)):
        left_off.setdefault(GRAPHS, why)
    strategy = recipe.launch.strategy
    if fast.sampling and strategy in SHARED_WEIGHTS:
        why = f"with strategy {strategy} each process holds a part of the weights"
        left_off |= {"sampling": why} | ({GRAPHS: why} if fast.cuda_graphs else {})
    dropout = model.lora.lora_dropout if model.lora else 0.0
    attention = model.attn_implementation or ATTENTION[0]
    if not fast.shared_prompts or "shared_prompts" in left_off:
        return left_off
    if dropout and not recipe.setting("disable_dropout"):
        why = f"lora_dropout is {dropout:g}, drawn again for each copy of a prompt"
        left_off["shared_prompts"] = why
    elif not any(part in attention for part in ATTENTION):
        why = f"attn_implementation {attention} takes no such rows"
        left_off["shared_prompts"] = why
    return left_off


def _why_no_graphs(recipe: Recipe) -> str | None:
    """Return what of `graph_decoding.graph_unsupported_reason` the recipe decides."""
    model, attention = recipe.model, recipe.model.attn_implementation or ATTENTION[0]
    if attention != ATTENTION[0]:
        return f"attention {attention} needs other masks"
    if model.quantization is not None:
        return "adapters cannot be merged in a copy of quantized weights"
    if model.lora and model.lora.lora_dropout and not recipe.setting("disable_dropout"):
        return "dropout in an adapter ends when it is merged"
    return "there is no GPU" if recipe.launch.use_cpu else None
