"""Builds what a training is made of: datasets, model, trainer, and what measures the model."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from transformers.integrations import is_deepspeed_zero3_enabled

from grpo_cli.batch.plan import BatchPlan, batch_inputs, plan_batch
from grpo_cli.data.build import BuiltData, build_datasets
from grpo_cli.errors import RunError
from grpo_cli.fast.completion_reader import CompletionReader, build_reader
from grpo_cli.fast.completions import all_eos_token_ids
from grpo_cli.fast.prompts import count_prompt_tokens
from grpo_cli.fast.trainer import shares_weights
from grpo_cli.models.loading import (
    build_peft_config,
    load_generation_config,
    load_model,
    load_trainable,
    refer_to_base,
)
from grpo_cli.models.processor import tokenizer_of
from grpo_cli.models.source import fingerprint_model
from grpo_cli.recipe.fast import requested_parts
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.training import leave_off
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.metrics import append_record
from grpo_cli.training.checkpoints import save_reward_states
from grpo_cli.training.reference import reference_on
from grpo_cli.training.rollout.completion_log import CompletionLog
from grpo_cli.training.session import Session
from grpo_cli.training.trainer import Parts, RunTrainer

if TYPE_CHECKING:
    from grpo_cli.environments.player import Player
    from grpo_cli.training.asynchronous.trainer import AsyncRunTrainer
    from grpo_cli.training.measurement import Measurer

    AnyTrainer = RunTrainer | AsyncRunTrainer


@dataclass(frozen=True)
class Inputs:
    """What a trainer is built from, besides the recipe."""

    args: Any
    """TRL's arguments, a `GRPOConfig`."""
    processing_class: Any
    """A tokenizer, or a processor if the recipe has images."""
    data: BuiltData
    rewards: list[Reward]
    player: "Player | None"
    """Plays episodes, if the recipe has some."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or the processor's."""
        return tokenizer_of(self.processing_class)


def build_data(session: Session, processing_class: Any) -> BuiltData:
    """Return the datasets; refuse those on which TRL would silently train nothing."""
    template = session.recipe.setting("chat_template_kwargs")
    count = partial(count_prompt_tokens, processing_class, chat_template_kwargs=template)
    has_template = bool(processing_class.chat_template)
    options: dict[str, Any] = {"has_chat_template": has_template, "count_tokens": count}
    with session.processes.local_main_process_first():
        data = build_datasets(session.recipe, **options)
    if session.recipe.dataset.streams:
        from grpo_cli.data.streaming import stream_rows

        data = replace(data, stream=stream_rows(session.recipe, data, **options))
    report, known = data.report.as_json(), session.folder.read_manifest()["data"]
    if known.get("fingerprint_version") == report["fingerprint_version"]:
        session.refuse_change("the data", known.get("fingerprint"), str(report["fingerprint"]))
    session.annotate_manifest(data=report, accelerator=session.describe_device())
    if session.recipe.model.adapter is not None:
        _identify_adapter(session)
    plan = plan_run(session, data)
    if plan.problems:
        raise RunError("\n".join(str(problem) for problem in plan.problems))
    return data


def _identify_adapter(session: Session) -> None:
    from grpo_cli.models.adapter import fingerprint_adapter

    adapter = fingerprint_adapter(session.recipe.model)
    before = session.folder.read_manifest().get("adapter")
    session.refuse_change("`model.adapter`", before, adapter)
    session.annotate_manifest(adapter=adapter)


def plan_run(session: Session, data: BuiltData) -> BatchPlan:
    """Return the run's batch plan: with its processes and the prompts that it trains on."""
    processes = session.processes.num_processes
    return plan_batch(batch_inputs(session.recipe, processes, data.report.train_rows))


def build_trainer(session: Session, inputs: Inputs, start: ModelConfig) -> "AnyTrainer":
    """Return the trainer of a run, which begins with the model `start`.

    Raises:
        GrpoError: Something that a user can fix.
    """
    recipe, data, tokenizer = session.recipe, inputs.data, inputs.tokenizer
    if recipe.training.mode == "async":
        from grpo_cli.training.asynchronous.trainer import build_async_trainer

        session.annotate_manifest(model=fingerprint_model(recipe.model))
        reader = _build_reader(session, load_generation_config(recipe.model), tokenizer)
        log = _open_completion_log(session, reader)
        return build_async_trainer(session, inputs.args, reader, data.train, inputs.rewards, log)
    model = load_base(session, start, tokenizer)
    dtype = str(model.dtype).removeprefix("torch.")
    session.annotate_manifest(model=fingerprint_model(recipe.model), dtype=dtype)
    parts = _build_parts(session, inputs, start, model)
    options = {
        "args": inputs.args,
        "processing_class": inputs.processing_class,
        **_adapt(model, start, parts),
    }
    linked: Any = nullcontext()
    if recipe.generation.backend == "vllm":
        from grpo_cli.training.vllm_generation import linked_vllm

        linked, mode = linked_vllm(session), recipe.generation.vllm.mode
        session.report(f"loading vLLM ({mode})" if mode == "colocate" else "waiting for vLLM")
    with linked, reference_on(loading_device(session)):
        if recipe.is_sampled:
            evaluated = data.eval if recipe.training.eval_strategy != "no" else None
            rows = {"train_dataset": data.stream or data.train, "eval_dataset": evaluated}
            trainer = RunTrainer(parts=parts, **rows, **options)
        else:
            from grpo_cli.training.scored import build_scored_trainer

            trainer = build_scored_trainer(session, data, model, tokenizer, parts, options)
    if start.adapter is not None and start.adapter.reference == "base":
        refer_to_base(trainer.model)
    _speed_up(session, trainer)
    return trainer


def _adapt(model: Any, start: ModelConfig, parts: Parts) -> dict[str, Any]:
    """Return the model with its adapter, or the adapter that TRL adds to it."""
    trains_own = start.adapter is not None or parts.syncs_adapter
    return {
        "model": load_trainable(model, start, adds_fresh=parts.syncs_adapter),
        "peft_config": None if trains_own else build_peft_config(start.lora, model),
    }


def load_base(session: Session, config: ModelConfig, tokenizer: Any) -> Any:
    """Return the weights of a model, without an adapter.

    All processes at once: with ZeRO-3 they load together. Downloads and conversions have locks of their own.
    """
    session.report("loading the model")
    device = loading_device(session)
    return load_model(config, tokenizer, device_is_cuda=not session.cpu, device=device)


def loading_device(session: Session) -> torch.device | None:
    """Return the GPU that the weights are read to; None on a CPU, and if they are sharded while they are read.

    Source: transformers 5.17, `PreTrainedModel.from_pretrained`: with ZeRO-3 each process keeps its part of a
    weight (`deepspeed.zero.Init`); with FSDP the first of a machine reads them, and accelerate spreads them.
    """
    sharded = is_deepspeed_zero3_enabled() or parse_flag_from_env("ACCELERATE_USE_FSDP")
    return None if session.cpu or sharded else session.processes.device


def _build_parts(session: Session, inputs: Inputs, start: ModelConfig, model: Any) -> Parts:
    recipe = session.recipe
    # A state that cannot be saved is reported before the first step.
    save_reward_states(inputs.rewards)
    reader = _build_reader(session, model.generation_config, inputs.tokenizer)
    dynamic = recipe.generation.dynamic_sampling
    difficulty = teacher = None
    if recipe.is_sampled and recipe.dataset.difficulty is not None:
        from grpo_cli.training.difficulty import build_sampler

        difficulty = build_sampler(recipe, recipe.dataset.difficulty, inputs.data.train)
    if recipe.teacher is not None:
        from grpo_cli.training.teacher import open_teacher

        teacher = open_teacher(session, recipe.teacher, loading_device(session))
    return Parts(
        rewards=inputs.rewards,
        seed=f"{recipe.seed}:{session.processes.process_index}",
        reader=reader,
        log=_open_completion_log(session, reader),
        player=inputs.player,
        sampling_parts=recipe.generation.sampling_parts,
        difficulty=difficulty,
        max_resample=None if dynamic is None else dynamic.max_resample,
        sources=tuple(recipe.dataset.shares),
        forced=bool(session.folder.read_resumption().get("forced")),
        teacher=teacher,
        syncs_adapter=start.lora is not None and bool(recipe.setting("sync_ref_model")),
        held_out_sets=partial(_build_held_out_sets, session, inputs)
        if recipe.evaluation.during
        else None,
    )


def _build_held_out_sets(session: Session, inputs: Inputs, trainer: RunTrainer) -> Any:
    """Return the sets of `evaluation.during`; None if no process has a model that it could sample from."""
    from grpo_cli.training.held_out_sets import build_held_out_sets

    if shares_weights(trainer):
        return None
    make = partial(_build_measurer, session, inputs, trainer)
    return build_held_out_sets(session, trainer, inputs.data.eval, make)


def build_measurer(session: Session, inputs: Inputs, trainer: "AnyTrainer") -> "Measurer | None":
    """Return what measures the model before and after training, if anything does."""
    if shares_weights(trainer) or inputs.data.eval is None:
        # No process has a model that it could sample from, or there is nothing to measure on.
        return None
    from grpo_cli.training.measurement import select_rows

    evaluation = session.recipe.evaluation
    rows = select_rows(inputs.data.eval, evaluation.limit)
    if rows is None:
        return None
    if not session.recipe.is_sampled:
        from grpo_cli.training.scored import ScoredMeasurer

        return ScoredMeasurer(session, inputs.rewards, rows, evaluation, trainer)
    return _build_measurer(session, inputs, trainer, rows, evaluation)


def _build_measurer(
    session: Session, inputs: Inputs, trainer: Any, rows: Dataset, evaluation: Any, **more: Any
) -> "Measurer":
    from grpo_cli.training.measurement import Measurer

    return Measurer(
        session,
        inputs.rewards,
        rows,
        evaluation,
        vllm=getattr(trainer, "vllm_generation", None),
        player=inputs.player,
        processor=trainer.processing_class if session.recipe.has_images else None,
        **more,
    )


def _build_reader(session: Session, config: Any, tokenizer: Any) -> CompletionReader:
    ends = all_eos_token_ids(config, tokenizer)
    return build_reader(tokenizer, ends, **session.recipe.generation.reading)


def _open_completion_log(session: Session, reader: CompletionReader) -> CompletionLog:
    path = session.folder.completions / f"rank_{session.processes.process_index}.jsonl"
    return CompletionLog(
        path if session.recipe.logging.log_completions else None,
        reader.is_terminated,
        session.thumbnails,
    )


def _speed_up(session: Session, trainer: RunTrainer) -> None:
    """Switch on the exact fast step; the manifest says which parts are off, and why."""
    fast = requested_parts(session.recipe)

    def record_parts(left_off: dict[str, str]) -> None:
        switches = leave_off(fast, left_off).model_dump()
        session.annotate_manifest(fast=switches | {"left_off": left_off})
        if left_off and session.processes.is_main_process:
            record = {"event": "fast", "step": trainer.state.global_step, "left_off": left_off}
            append_record(session.folder.metrics, record)

    trainer.speed_up(fast, record_parts)
