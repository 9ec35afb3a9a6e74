"""One training from start to end: data, model, rewards, trainer, measurements, final weights.

Reads top to bottom in the order in which things happen. The algorithm is TRL's.
"""

import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedTokenizerBase, PrinterCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from grpo_cli.batch import BatchPlan, plan_batch
from grpo_cli.checks.arithmetic import batch_inputs, reward_context
from grpo_cli.checks.settings import read_setting, wanted_parts
from grpo_cli.data.build import BuiltData, build_datasets
from grpo_cli.data.streaming import stream_rows
from grpo_cli.environments.player import Player, open_player
from grpo_cli.errors import RunError
from grpo_cli.fast.completion_reader import CompletionReader, build_reader
from grpo_cli.fast.completions import all_eos_token_ids
from grpo_cli.fast.prompts import count_prompt_tokens
from grpo_cli.fast.trainer import shares_weights
from grpo_cli.machine import pick_device
from grpo_cli.models.adapter import fingerprint_adapter
from grpo_cli.models.loading import (
    build_peft_config,
    load_generation_config,
    load_model,
    load_trainable,
    refer_to_base,
)
from grpo_cli.models.processor import copy_processor, load_processing_class, tokenizer_of
from grpo_cli.models.source import fingerprint_model
from grpo_cli.models.teacher import check_teacher_tokenizer, find_teacher, fingerprint_teacher
from grpo_cli.models.teacher_server import TeacherServer
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import leave_off
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import When, append_record
from grpo_cli.runs.status import Heartbeat
from grpo_cli.training.callbacks import EarlyStoppingCallback, RunCallback, track
from grpo_cli.training.checkpoints import atomic_dir, loading_weights_only, save_reward_states
from grpo_cli.training.difficulty import build_sampler
from grpo_cli.training.examples import (
    WARMING,
    has_examples,
    read_examples,
    read_rows,
    sample_best,
    save_examples,
    section_of,
    write_examples,
)
from grpo_cli.training.held_out_sets import add_held_out_sets
from grpo_cli.training.measurement import Measurer, select_rows
from grpo_cli.training.reference import reference_on, sync_adapter
from grpo_cli.training.rollout.completion_log import CompletionLog
from grpo_cli.training.scored import (
    ScoredMeasurer,
    ScoredTrainer,
    build_scored_trainer,
    write_answers,
)
from grpo_cli.training.session import (
    Session,
    Stopped,
    StopRequest,
    check_device,
    check_processes,
    check_strategy,
)
from grpo_cli.training.teacher import attach_teacher
from grpo_cli.training.trainer import Parts, RunTrainer
from grpo_cli.training.trl_args import build_trl_args
from grpo_cli.training.vllm_generation import patched_vllm, watch_server
from grpo_cli.training.warmup import clean_up, learn, warmed_up

if TYPE_CHECKING:
    from grpo_cli.training.asynchronous.trainer import AsyncRunTrainer

    AnyTrainer = RunTrainer | AsyncRunTrainer


def train(folder: RunFolder, stop: StopRequest) -> None:
    """Train the run in a folder; `runs/folder.py` lists the files it leaves.

    Raises:
        Stopped: A stop was requested; what was trained is in the last checkpoint.
        GrpoError: Something that a user can fix.
    """
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    recipe = folder.read_recipe()
    device = pick_device(recipe.launch)
    check_device(folder.read_plan().get("device", device), device)
    # Building the arguments starts the process group, which everything after may use.
    args = build_trl_args(recipe, folder, cpu=device == "cpu")
    processes = PartialState()
    heartbeat = Heartbeat(folder, processes.process_index)
    session = Session(folder, recipe, stop, processes, device == "cpu", heartbeat)
    check_processes(session)
    session.report("loading the tokenizer")
    with session.processes.local_main_process_first():
        processing_class = load_processing_class(recipe.model, has_images=recipe.has_images)
        tokenizer = tokenizer_of(processing_class)
        check_teacher_tokenizer(recipe, tokenizer)
    session.report("preparing the data")
    data = _build_data(session, processing_class)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder.sent_weights, ignore_errors=True)
        player = None
        if recipe.has_episodes:
            session.report("opening tools and environments")
            stops = all_eos_token_ids(load_generation_config(recipe.model), tokenizer)
            player = stack.enter_context(open_player(recipe, processing_class, stops=stops))
        _train(session, args, processing_class, data, player)


def _train(
    session: Session,
    args: Any,
    processing_class: Any,
    data: BuiltData,
    player: Player | None,
) -> None:
    """Train from the data to the final weights; `player` plays episodes, if the recipe has some."""
    recipe, folder, tokenizer = session.recipe, session.folder, tokenizer_of(processing_class)
    session.report("loading the rewards")
    context = reward_context(recipe, str(session.processes.device), data.report.train_rows)
    rewards = build_rewards(recipe.rewards, context)
    start = recipe.model
    if recipe.warmup is not None:
        start = _warm_up(session, args, tokenizer, data, rewards, player)
    trainer = _build_trainer(session, args, processing_class, data, start, rewards, player)
    callback = _add_callbacks(session, trainer)
    check_strategy(session, trainer)
    measurer = _build_measurer(session, trainer, rewards, data, player)
    resumed = bool(folder.read_resumption())
    when: When = "warmup" if recipe.warmup else "before"
    # A run that was stopped after its warm-up has been measured there.
    measured = recipe.warmup is not None and (folder.evaluations / f"{when}.json").is_file()
    if measurer and not (resumed or measured):
        measurer.measure(when, trainer.model, tokenizer)
    planned = trainer.args.max_steps if trainer.args.max_steps > 0 else None
    session.report("training", total_steps=planned)
    if resumed:
        _resume(session, trainer, data)
    else:
        trainer.train()
    callback.raise_if_stopped(trainer.state)
    reason = _why_early(session, trainer)
    if measurer:
        measurer.measure("after", trainer.model, tokenizer)
    if not recipe.is_sampled and not shares_weights(trainer):
        write_answers(session, trainer.model, tokenizer, data.eval or data.train)
    session.report("saving the model")
    _save_model(session, trainer, folder.model)
    session.finish(step=trainer.state.global_step, reason=reason)


def _build_data(session: Session, processing_class: Any) -> BuiltData:
    """Return the datasets; refuse those on which TRL would silently train nothing."""
    template = session.recipe.generation.extras.get("chat_template_kwargs")
    count = partial(count_prompt_tokens, processing_class, chat_template_kwargs=template)
    has_template = bool(processing_class.chat_template)
    options: dict[str, Any] = {"has_chat_template": has_template, "count_tokens": count}
    with session.processes.local_main_process_first():
        data = build_datasets(session.recipe, **options)
    if session.recipe.dataset.streams:
        data = replace(data, stream=stream_rows(session.recipe, data, **options))
    report, adapter = data.report.as_json(), fingerprint_adapter(session.recipe.model)
    before = session.folder.read_manifest()
    known = before["data"]
    if known.get("fingerprint_version") == report["fingerprint_version"]:
        _refuse_change(session, "the data", known.get("fingerprint"), str(report["fingerprint"]))
    _refuse_change(session, "`model.adapter`", before.get("adapter"), adapter)
    session.annotate_manifest(data=report, accelerator=session.describe_device())
    if adapter is not None:
        session.annotate_manifest(adapter=adapter)
    plan = _plan_batch(session, data)
    if plan.problems:
        raise RunError("\n".join(str(problem) for problem in plan.problems))
    return data


def _plan_batch(session: Session, data: BuiltData) -> BatchPlan:
    processes = session.processes.num_processes
    return plan_batch(batch_inputs(session.recipe, processes, data.report.train_rows))


def _refuse_change(session: Session, what: str, before: str | None, now: str | None) -> None:
    """Refuse to resume with other rows, adapter or teacher than the run began with, unless forced."""
    resumption = session.folder.read_resumption()
    if resumption and not resumption.get("forced") and before not in (None, now):
        raise RunError(
            f"{what} is not what this run began with (fingerprint {str(now)[:12]}, it was {before[:12]}). "
            "Fix: restore it, start a new run, or resume anyway with --force"
        )


def _build_trainer(
    session: Session,
    args: Any,
    processing_class: Any,
    data: BuiltData,
    start: ModelConfig,
    rewards: list[Reward],
    player: Player | None,
) -> "AnyTrainer":
    recipe, tokenizer = session.recipe, tokenizer_of(processing_class)
    if recipe.training.mode == "async":
        from grpo_cli.training.asynchronous.trainer import build_async_trainer

        session.annotate_manifest(model=fingerprint_model(recipe.model))
        reader = _build_reader(recipe, load_generation_config(recipe.model), tokenizer)
        log = _open_completion_log(session, reader)
        return build_async_trainer(session, args, reader, data.train, rewards, log)
    model = _load_model(session, start, tokenizer)
    dtype = str(model.dtype).removeprefix("torch.")
    session.annotate_manifest(model=fingerprint_model(recipe.model), dtype=dtype)
    reader = _build_reader(recipe, model.generation_config, tokenizer)
    log = _open_completion_log(session, reader)
    if recipe.generation.backend == "vllm":
        mode = recipe.generation.vllm.mode
        session.report(f"loading vLLM ({mode})" if mode == "colocate" else "waiting for vLLM")
    syncs_adapter = start.lora is not None and bool(read_setting(recipe, "sync_ref_model"))
    trains_own = start.adapter is not None or syncs_adapter
    options = {
        "model": load_trainable(model, start, adds_fresh=syncs_adapter),
        "args": args,
        "processing_class": processing_class,
        "peft_config": None if trains_own else build_peft_config(start.lora, model),
    }
    patched = patched_vllm(session, lambda: _wait_for_server(session))
    with patched, reference_on(_loading_device(session)):
        forced = bool(session.folder.read_resumption().get("forced"))
        if recipe.is_sampled:
            parts = _build_parts(session, data, rewards, reader, log, player)
            evaluated = data.eval if recipe.training.eval_strategy != "no" else None
            trainer = RunTrainer(
                parts=replace(parts, forced=forced),
                train_dataset=data.stream or data.train,
                eval_dataset=evaluated,
                **options,
            )
        else:
            trainer = build_scored_trainer(session, data, model, tokenizer, options, forced=forced)
    _attach_teacher(session, trainer)
    if start.adapter is not None and start.adapter.reference == "base":
        refer_to_base(trainer.model)
    if syncs_adapter:
        sync_adapter(trainer)
    _speed_up(session, trainer)
    return trainer


def _warm_up(
    session: Session,
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: BuiltData,
    rewards: list[Reward],
    player: Player | None,
) -> ModelConfig:
    """Train the warm-up, unless an earlier attempt has; return the model that GRPO begins with."""
    if not (session.folder.warmup / "model").is_dir():
        _train_warmup(session, args, tokenizer, data, rewards, player)
        # Its model and trainer refer to each other: without this they would stay in memory beside GRPO's.
        clean_up(session)
    return warmed_up(session.folder, session.recipe.model)


def _train_warmup(
    session: Session,
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: BuiltData,
    rewards: list[Reward],
    player: Player | None,
) -> None:
    folder, config, processes = session.folder, session.recipe.model, session.processes
    session.report(WARMING)
    rows = read_rows(session.recipe, data.train, tokenizer)
    # One process makes them, and all read the same: environments need not answer twice alike.
    with processes.main_process_first():
        if section_of(session.recipe).answer and not has_examples(folder):
            save_examples(folder, write_examples(session, tokenizer, rows, player))
    model = load_trainable(_load_model(session, config, tokenizer), config)
    held_out = select_rows(data.eval, session.recipe.evaluation.limit)
    if held_out is not None and not (folder.evaluations / "before.json").is_file():
        measurer = Measurer(session, rewards, held_out, session.recipe.evaluation, player=player)
        measurer.measure("before", model, tokenizer)
    processes.wait_for_everyone()
    if not has_examples(folder):
        best = sample_best(session, model, tokenizer, rows, rewards, player)
        if processes.is_main_process:
            save_examples(folder, best)
    processes.wait_for_everyone()
    peft_config = None if config.adapter else build_peft_config(config.lora, model)
    trainer = learn(session, args, model, tokenizer, peft_config, read_examples(folder))
    _save_model(session, trainer, folder.warmup / "model")
    trainer.accelerator.free_memory()


def _load_model(session: Session, config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the weights of a model, without an adapter.

    All processes at once: with ZeRO-3 they load together. Downloads and conversions have locks of their own.
    """
    session.report("loading the model")
    device = _loading_device(session)
    return load_model(config, tokenizer, device_is_cuda=not session.cpu, device=device)


def _attach_teacher(session: Session, trainer: RunTrainer) -> None:
    config = session.recipe.teacher
    if config is None:
        return
    session.report("loading the teacher")
    teacher = find_teacher(session.recipe) or TeacherServer(str(config.base_url))
    if isinstance(teacher, TeacherServer):
        fingerprint: str | None = teacher.model
    else:
        fingerprint = fingerprint_teacher(teacher)
    before = session.folder.read_manifest().get("teacher")
    _refuse_change(session, "the teacher", before, fingerprint)
    attach_teacher(trainer, config, teacher, _loading_device(session))
    session.annotate_manifest(teacher=fingerprint)


def _loading_device(session: Session) -> torch.device | None:
    """Return the GPU that the weights are read to; None on a CPU, and if they are sharded while they are read.

    Source: transformers 5.17, `PreTrainedModel.from_pretrained`: with ZeRO-3 each process keeps its part of a
    weight (`deepspeed.zero.Init`); with FSDP the first of a machine reads them, and accelerate spreads them.
    """
    sharded = is_deepspeed_zero3_enabled() or parse_flag_from_env("ACCELERATE_USE_FSDP")
    return None if session.cpu or sharded else session.processes.device


def _build_parts(
    session: Session,
    data: BuiltData,
    rewards: list[Reward],
    reader: CompletionReader,
    log: CompletionLog,
    player: Player | None,
) -> Parts:
    recipe = session.recipe
    # A state that cannot be saved is reported before the first step.
    save_reward_states(rewards)
    dynamic = recipe.generation.dynamic_sampling
    return Parts(
        rewards=rewards,
        seed=f"{recipe.seed}:{session.processes.process_index}",
        reader=reader,
        log=log,
        player=player,
        sampling_parts=recipe.generation.sampling_parts,
        difficulty=build_sampler(recipe, data.train),
        max_resample=None if dynamic is None else dynamic.max_resample,
        sources=tuple(recipe.dataset.shares),
    )


def _build_reader(recipe: Recipe, config: Any, tokenizer: Any) -> CompletionReader:
    ends = all_eos_token_ids(config, tokenizer)
    return build_reader(tokenizer, ends, **recipe.generation.reading)


def _open_completion_log(session: Session, reader: CompletionReader) -> CompletionLog:
    """Open this process's log."""
    path = session.folder.completions / f"rank_{session.processes.process_index}.jsonl"
    return CompletionLog(
        path if session.recipe.logging.log_completions else None,
        reader.is_terminated,
        session.thumbnails,
    )


def _wait_for_server(session: Session) -> None:
    """Report the wait; nothing else obeys a request to stop meanwhile."""
    if session.stop.seen_here():
        raise Stopped("stopped while waiting for vLLM; steps since the last checkpoint are lost")
    session.report("waiting for vLLM")


def _speed_up(session: Session, trainer: RunTrainer) -> None:
    """Switch on the exact fast step; the manifest says which parts are off, and why."""
    fast = wanted_parts(session.recipe)

    def record_parts(left_off: dict[str, str]) -> None:
        switches = leave_off(fast, left_off).model_dump()
        session.annotate_manifest(fast=switches | {"left_off": left_off})
        if left_off and session.processes.is_main_process:
            record = {"event": "fast", "step": trainer.state.global_step, "left_off": left_off}
            append_record(session.folder.metrics, record)

    trainer.speed_up(fast, record_parts)


def _add_callbacks(session: Session, trainer: "AnyTrainer") -> RunCallback:
    # It prints the records that `metrics.jsonl` holds.
    trainer.remove_callback(PrinterCallback)
    callback = RunCallback(session)
    trainer.add_callback(callback)
    track(trainer, session)
    if (stopping := session.recipe.training.early_stopping) is not None:
        trainer.add_callback(EarlyStoppingCallback(stopping.patience, stopping.min_delta))
    return callback


def _build_measurer(
    session: Session,
    trainer: "AnyTrainer",
    rewards: list[Reward],
    data: BuiltData,
    player: Player | None,
) -> Measurer | None:
    """Return what measures before and after training, if anything does; add what does in between."""
    vllm, evaluation = watch_server(session, trainer), session.recipe.evaluation
    if shares_weights(trainer):
        # No process has a model that it could sample from.
        return None
    processor = trainer.processing_class if session.recipe.has_images else None
    make = partial(Measurer, session, rewards, vllm=vllm, player=player, processor=processor)
    if evaluation.during and isinstance(trainer, RunTrainer):
        add_held_out_sets(session, trainer, data.eval, make)
    rows = select_rows(data.eval, evaluation.limit)
    if rows is not None and isinstance(trainer, ScoredTrainer):
        return ScoredMeasurer(session, rewards, rows, evaluation, trainer)
    return None if rows is None else make(rows, evaluation)


def _resume(session: Session, trainer: "AnyTrainer", data: BuiltData) -> None:
    """Train from the checkpoint to the end; if it is the end, only load the final weights."""
    resumption, plan = session.folder.read_resumption(), _plan_batch(session, data)
    checkpoint = session.folder.checkpoints / resumption["checkpoint"]
    trainer.load_state(checkpoint, plan.total_optimizer_steps or 0)
    with loading_weights_only(trainer, checkpoint, trusted=bool(resumption.get("trusted"))):
        if trainer.is_done:
            trainer.finish(checkpoint)
        else:
            trainer.resume_from(checkpoint, plan.optimizer_steps_per_epoch or 1)


def _why_early(session: Session, trainer: "AnyTrainer") -> str | None:
    """Return why early stopping ended training, if it did; a loop can also end early without an error."""
    state = trainer.state
    if state.global_step >= state.max_steps:
        return None
    if not session.recipe.training.early_stopping:
        raise RunError(
            f"training ended after {state.global_step} of {state.max_steps} planned steps without being asked to. "
            "Fix: look at the end of the log in logs/, and at the number of prompts in manifest.json"
        )
    metric, best = trainer.args.metric_for_best_model, state.best_metric
    # Before the first step there is nothing to go back to: that evaluation does not count.
    at = f"{best:.4g} at step {state.best_global_step}"
    return f"stopped early: {metric} no longer improved (best {at})"


def _save_model(session: Session, trainer: Any, target: Path) -> None:
    """Write a trainer's weights (or adapter) and tokenizer to a folder, completely or not at all."""
    partial_folder = session.folder.path / ".model.partial"
    if session.processes.is_main_process:
        shutil.rmtree(partial_folder, ignore_errors=True)
    session.processes.wait_for_everyone()
    with atomic_dir(partial_folder):
        trainer.save_model(str(partial_folder))
    session.processes.wait_for_everyone()
    if session.processes.is_main_process:
        # A pickle of the arguments: useless beside resolved.json, and unsafe to load.
        (partial_folder / "training_args.bin").unlink(missing_ok=True)
        # peft's model card is an empty form.
        (partial_folder / "README.md").unlink(missing_ok=True)
        if not session.recipe.has_images:
            copy_processor(session.recipe.model, partial_folder)
        os.replace(partial_folder, target)
    session.processes.wait_for_everyone()
