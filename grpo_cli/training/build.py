"""Builds what a training is made of: TRL's arguments, datasets, model, trainer, and what measures the model."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig

from grpo_cli.batch.plan import BatchPlan, batch_inputs, plan_batch
from grpo_cli.data.build import BuiltData, build_datasets
from grpo_cli.errors import RunError
from grpo_cli.fast.tokens import (
    CompletionReader,
    all_eos_token_ids,
    build_reader,
    count_prompt_tokens,
)
from grpo_cli.models.loading import (
    build_peft_config,
    load_generation_config,
    load_model,
    load_trainable,
    refer_to_base,
)
from grpo_cli.models.source import fingerprint_model, reads_images
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe, requested_parts
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import append_record
from grpo_cli.training.checkpoints import save_reward_states
from grpo_cli.training.rollout.step import CompletionLog
from grpo_cli.training.session import Session
from grpo_cli.training.trainer import Parts, RunTrainer, reference_on

if TYPE_CHECKING:
    from grpo_cli.environments.player import Player
    from grpo_cli.training.asynchronous.trainer import AsyncRunTrainer

    AnyTrainer = RunTrainer | AsyncRunTrainer


@dataclass(frozen=True)
class Inputs:
    """What a trainer is built from, besides the recipe."""

    args: Any
    """TRL's arguments, a `GRPOConfig`."""
    processing_class: Any
    """A tokenizer, or a processor if the recipe has images."""
    tokenizer: Any
    """The tokenizer, or the processor's."""
    data: BuiltData
    rewards: list[Reward]
    player: "Player | None"
    """Plays episodes, if the recipe has some."""


def build_data(session: Session, processing_class: Any) -> BuiltData:
    """Return the datasets; refuse those on which TRL would silently train nothing."""
    template = session.recipe.setting("chat_template_kwargs")
    count = partial(count_prompt_tokens, processing_class, chat_template_kwargs=template)
    has_template = bool(processing_class.chat_template)
    options: dict[str, Any] = {"has_chat_template": has_template, "count_tokens": count}
    with session.processes.local_main_process_first():
        data = build_datasets(session.recipe, **options)
    if data.report.train_rows is None:
        from grpo_cli.data.streaming import stream_rows

        data = replace(data, stream=stream_rows(session.recipe, data, **options))
    report, known = data.report.as_json(), session.manifest["data"]
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
    before = session.manifest.get("adapter")
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
    held_out_sets = None
    if recipe.evaluation.during:
        from grpo_cli.training.held_out_sets import build_held_out_sets

        held_out_sets = partial(build_held_out_sets, session, inputs)
    return Parts(
        rewards=inputs.rewards,
        seed=f"{recipe.seed}:{session.processes.process_index}",
        reader=reader,
        log=_open_completion_log(session, reader),
        player=inputs.player,
        sampling_parts=recipe.generation.sampling_parts,
        difficulty=difficulty,
        max_resample=None if dynamic is None else dynamic.max_resample,
        sources=tuple(inputs.data.report.sources or ()),
        forced=bool(session.resumption.get("forced")),
        teacher=teacher,
        syncs_adapter=start.lora is not None and bool(recipe.setting("sync_ref_model")),
        held_out_sets=held_out_sets,
    )


def _build_reader(session: Session, config: Any, tokenizer: Any) -> CompletionReader:
    ends = all_eos_token_ids(config, tokenizer)
    return build_reader(tokenizer, ends, **session.recipe.generation.reading)


def _open_completion_log(session: Session, reader: CompletionReader) -> CompletionLog:
    path = session.folder.completions / f"rank_{session.processes.process_index}.jsonl"
    return CompletionLog(
        path if session.recipe.logging.log_completions else None,
        reader.is_terminated,
        session.thumbnails if session.recipe.has_images else None,
    )


def _speed_up(session: Session, trainer: RunTrainer) -> None:
    """Switch on the exact fast step; the manifest says which parts are off, and why."""

    def record_parts(left_off: dict[str, str]) -> None:
        session.annotate_manifest(fast=trainer.fast.model_dump() | {"left_off": left_off})
        if left_off and session.processes.is_main_process:
            record = {"event": "fast", "step": trainer.state.global_step, "left_off": left_off}
            append_record(session.folder.metrics, record)

    trainer.speed_up(requested_parts(session.recipe), record_parts)


_SERVER_TIMEOUT_S = 3600.0
"""Longest wait for a vLLM server to load; the supervisor notices a server that ends."""


def build_trl_args(recipe: Recipe, folder: RunFolder, server: Any, *, cpu: bool) -> Any:
    """Return the trainer's arguments: a `GRPOConfig`, or an `AsyncGRPOConfig` with `training.mode: async`.

    `server` is what the launch plan says of the vLLM server that `grpo train` started; None if it started none.
    On a CPU bf16 autocast is off unless the recipe asks for it: most processors emulate it.

    Raises:
        RunError: TRL refuses a combination that no earlier check covers.
    """
    asynchronous = recipe.training.mode == "async"
    values: dict[str, Any] = {
        # The same default in both modes.
        "lr_scheduler_type": "linear",
        **recipe.trl_fields(),
        **(_async_fields(recipe) if asynchronous else _grpo_fields(recipe)),
        **_server_fields(recipe, server),
        "output_dir": str(folder.checkpoints),
        "seed": recipe.seed,
        "trust_remote_code": recipe.model.trust_remote_code,
        "use_cpu": cpu,
        "disable_tqdm": True,
        "log_completions": False,
        "log_multimodal": False,
    }
    if recipe.loads_best and values.get("save_total_limit") == 1:
        # With 1, transformers (5.17, `Trainer._finalize_training`) removes the newest in the end, also if a stop
        # was requested.
        values["save_total_limit"] = 2
    if recipe.is_reentrant:
        # Transformers (5.24) looks for unused parameters of a PEFT model, and a reentrant backward pass would
        # then mark a parameter ready twice.
        values.setdefault("ddp_find_unused_parameters", False)
    elif reads_images(recipe.model):
        # TRL (1.16) sets it if prompts may have images; without, DDP would wait for the vision part's gradients.
        values.setdefault("ddp_find_unused_parameters", True)
    if cpu:
        values.setdefault("bf16", False)
        values.setdefault("dataloader_pin_memory", False)
    values.setdefault("run_name", f"{recipe.name}-{folder.path.name}")
    # Trackio's project; W&B's and MLflow's are environment variables.
    values.setdefault("project", recipe.name)
    config: Any = GRPOConfig
    if asynchronous:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.async_grpo import AsyncGRPOConfig

        config = AsyncGRPOConfig
        # What the class does not know was refused before the launch, by `checks`.
        known = {field.name for field in fields(config)}
        values = {name: value for name, value in values.items() if name in known}
    try:
        arguments = config(**values)
    except ValueError as error:
        raise RunError(
            f"TRL refuses these settings: {str(error).rstrip('.')}", "change them in the recipe"
        ) from error
    arguments.load_best_model_at_end = recipe.loads_best
    return arguments


def _grpo_fields(recipe: Recipe) -> dict[str, Any]:
    backend = recipe.generation.backend
    values: dict[str, Any] = {
        "use_vllm": backend == "vllm",
        "use_transformers_continuous_batching": backend == "transformers_continuous_batching",
        "reward_weights": [reward.weight for reward in recipe.rewards] or None,
        **_best_model(recipe),
    }
    if recipe.setting("generation_kwargs"):
        values["generation_kwargs"] = recipe.generation.backend_kwargs
    if recipe.model.lora is not None:
        # TRL refuses it; `reference.sync_adapter` does it.
        values["sync_ref_model"] = False
    if not recipe.is_sampled:
        # Evaluation samples nothing, but TRL's rule about group sizes would still apply.
        values["num_generations_eval"] = 1
    if recipe.setting("beta") and recipe.model.lora is None:
        # TRL loads the reference model itself.
        values["model_init_kwargs"] = _model_kwargs(recipe)
    if backend == "vllm":
        from grpo_cli.models.vllm_engine import model_length

        values["vllm_max_model_length"] = model_length(recipe)
    return values


def _async_fields(recipe: Recipe) -> dict[str, Any]:
    asynchronous, address = recipe.training.asynchronous, recipe.generation.vllm.address
    return {
        "max_staleness": asynchronous.max_staleness,
        "weight_sync_steps": asynchronous.weight_sync_steps,
        # 0 leaves the micro-batch to `per_device_train_batch_size`.
        "token_budget": asynchronous.token_budget or 0,
        "vllm_server_base_url": address,
        "vllm_server_timeout": _server_timeout(recipe),
        "dtype": recipe.model.dtype,
        "model_init_kwargs": _model_kwargs(recipe),
    }


def _server_fields(recipe: Recipe, server: dict[str, Any] | None) -> dict[str, Any]:
    """Return where the server that `grpo train` started is; None if it started none."""
    if server is None:
        return {}
    return {
        "vllm_server_base_url": f"http://{server['host']}:{server['port']}",
        "vllm_group_port": server["group_port"],
        "vllm_server_timeout": _server_timeout(recipe),
    }


def _server_timeout(recipe: Recipe) -> Any:
    return recipe.generation.vllm.extras.get("server_timeout", _SERVER_TIMEOUT_S)


def _best_model(recipe: Recipe) -> dict[str, Any]:
    """Return the metric that decides on the best checkpoint and on early stopping."""
    metric = recipe.best_metric
    if metric is None:
        return {}
    greater = recipe.setting("greater_is_better")
    if greater is None:
        greater = not metric.endswith(("loss", "kl"))
    return {"metric_for_best_model": metric, "greater_is_better": greater}


def _model_kwargs(recipe: Recipe) -> dict[str, Any]:
    revision = {"revision": recipe.model.revision} if recipe.model.revision else {}
    return {**recipe.model.init_kwargs, **revision}
