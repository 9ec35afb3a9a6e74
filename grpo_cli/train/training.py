"""One training from start to end: data, model, rewards, trainer, measurements, final weights.

Reads top to bottom in the order in which things happen. It leaves the algorithm to TRL.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers
from accelerate import PartialState
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, PrinterCallback

from grpo_cli.batch import plan_batch
from grpo_cli.checks.arithmetic import batch_inputs
from grpo_cli.checks.contents import reward_context
from grpo_cli.checks.fast import wanted_parts
from grpo_cli.data.build import BuiltData, build_datasets
from grpo_cli.errors import RunError
from grpo_cli.fast.completions import all_eos_token_ids, count_prompt_tokens
from grpo_cli.fast.sampler_choice import shares_weights
from grpo_cli.machine import pick_device
from grpo_cli.models.fingerprint import fingerprint_model
from grpo_cli.models.loading import (
    build_peft_config,
    load_generation_config,
    load_model,
    load_tokenizer,
)
from grpo_cli.recipe.fast import leave_off
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.heartbeat import Heartbeat
from grpo_cli.runs.metrics import append_record
from grpo_cli.train.callbacks import RunCallback
from grpo_cli.train.completion_log import CompletionLog
from grpo_cli.train.distributed_checks import (
    check_device,
    check_machines,
    check_strategy,
    check_world,
)
from grpo_cli.train.dynamic_sampling import DynamicSampling
from grpo_cli.train.failures import atomic_dir
from grpo_cli.train.measurement import Measurer, select_rows
from grpo_cli.train.overlap import EarlyScoring
from grpo_cli.train.ranking import ScoredMeasurer, write_answers
from grpo_cli.train.reward_functions import build_reward_functions, save_states
from grpo_cli.train.rule_stop import RuleStop
from grpo_cli.train.scored_trainer import ScoredTrainer, build_scored_trainer
from grpo_cli.train.session import Session
from grpo_cli.train.stopping import Stopped, StopRequest
from grpo_cli.train.tracking import track
from grpo_cli.train.trainer import RunTrainer
from grpo_cli.train.trl_args import build_trl_args
from grpo_cli.train.vllm_generation import RunGeneration, patched_vllm

if TYPE_CHECKING:
    from grpo_cli.train.async_trainer import AsyncRunTrainer

    AnyTrainer = RunTrainer | AsyncRunTrainer


def train(folder: RunFolder, stop: StopRequest) -> None:
    """Trains the run in a folder; `runs/folder.py` lists the files it leaves.

    Raises:
        Stopped: Somebody asked to stop; what was trained is in the last checkpoint.
        GrpoError: Something that a person can mend.
    """
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    recipe = folder.read_recipe()
    device = pick_device(recipe.launch)
    check_device(folder.read_plan().get("device", device), device)
    cpu = device == "cpu"
    # Building the arguments starts the process group, which everything after may use.
    args = _build_args(recipe, folder, cpu=cpu)
    processes = PartialState()
    heartbeat = Heartbeat(folder, processes.process_index)
    session = Session(folder, recipe, stop, processes, cpu, heartbeat)
    check_world(session)
    check_machines(session)
    session.report("loading the tokenizer")
    with session.processes.local_main_process_first():
        tokenizer = load_tokenizer(recipe.model)
    session.report("preparing the data")
    data = _build_data(session, tokenizer)
    trainer, rewards = _build_trainer(session, args, tokenizer, data)
    callback, rules = _add_callbacks(session, trainer)
    check_strategy(session, trainer)
    measurer = _build_measurer(session, trainer, rewards, data)
    resumption = folder.read_resumption()
    if measurer and not resumption:
        measurer.measure("before", trainer.model, tokenizer)
    session.report("training", total_steps=_planned_steps(trainer))
    if not resumption:
        trainer.train()
    else:
        _go_on(session, trainer, data, resumption)
    if callback.stopped:
        raise Stopped(f"stopped after step {trainer.state.global_step}, which is saved")
    rules.raise_if_found()
    _check_steps(session, trainer)
    if measurer:
        measurer.measure("after", trainer.model, tokenizer)
    if not recipe.is_sampled and not shares_weights(trainer):
        write_answers(session, trainer.model, tokenizer, data.eval or data.train)
    session.report("saving the model")
    _save_model(session, trainer)
    session.finish(step=trainer.state.global_step, reason=_early_end(trainer))


def _build_args(recipe: Recipe, folder: RunFolder, *, cpu: bool) -> Any:
    """The arguments of the trainer that `training.mode` wants; TRL's experimental one is loaded for itself."""
    if recipe.training.mode == "async":
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from grpo_cli.train.async_args import build_async_args

        return build_async_args(recipe, folder, cpu=cpu)
    return build_trl_args(recipe, folder, cpu=cpu)


def _build_data(session: Session, tokenizer: PreTrainedTokenizerBase) -> BuiltData:
    """The datasets; refuses those that would train nothing, which TRL does in silence."""
    with session.processes.local_main_process_first():
        data = build_datasets(
            session.recipe,
            has_chat_template=bool(tokenizer.chat_template),
            count_tokens=partial(
                count_prompt_tokens,
                tokenizer,
                chat_template_kwargs=session.recipe.generation.extras.get("chat_template_kwargs"),
            ),
        )
    _check_same_data(session, data)
    session.annotate_manifest(data=data.report.as_json(), accelerator=_describe_device(session))
    processes = session.processes.num_processes
    plan = plan_batch(batch_inputs(session.recipe, processes, len(data.train)))
    if plan.problems:
        raise RunError("\n".join(str(problem) for problem in plan.problems))
    return data


def _check_same_data(session: Session, data: BuiltData) -> None:
    """Refuses to go on with rows that are not those it began with, unless that was forced.

    Raises:
        RunError: They are others.
    """
    resumption = session.folder.read_resumption()
    then = (session.folder.read_manifest().get("data") or {}).get("fingerprint")
    now = str(data.report.as_json()["fingerprint"])
    if resumption and not resumption.get("forced") and then not in (None, now):
        raise RunError(
            f"the data is not what this run began with (fingerprint {now[:12]}, it was {then[:12]}). "
            "Fix: put the old rows back, start a run of its own, or go on all the same with --force"
        )


def _describe_device(session: Session) -> dict[str, Any]:
    if session.cpu:
        return {"device": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(session.processes.device)
    return {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}


def _build_trainer(
    session: Session, args: Any, tokenizer: PreTrainedTokenizerBase, data: BuiltData
) -> tuple["AnyTrainer", list[Reward]]:
    recipe = session.recipe
    session.report("loading the rewards")
    context = reward_context(recipe, str(session.processes.device))
    rewards = build_rewards(recipe.rewards, context)
    if recipe.training.mode == "async":
        return _build_async_trainer(session, args, tokenizer, data, rewards), rewards
    session.report("loading the model")
    # All at once: with ZeRO-3 loading is common work. Downloads and conversions lock by themselves.
    model = load_model(recipe.model, tokenizer, device_is_cuda=not session.cpu)
    dtype = str(model.dtype).removeprefix("torch.")
    session.annotate_manifest(model=fingerprint_model(recipe.model), dtype=dtype)
    ends = [*all_eos_token_ids(model.generation_config, tokenizer), tokenizer.pad_token_id]
    # TRL tells training from evaluation in the same way.
    log = _open_completion_log(session, rewards, ends, lambda: model.training)
    if recipe.generation.backend == "vllm":
        place = recipe.generation.vllm.mode
        session.report(f"loading vLLM ({place})" if place == "colocate" else "waiting for vLLM")
    with patched_vllm(session.folder.launch / "weights", lambda: _wait_for_server(session)):
        lora = build_peft_config(recipe.model.lora)
        if recipe.is_sampled:
            early = EarlyScoring(rewards, recipe.generation.sampling_parts)
            seed = f"{recipe.seed}:{session.processes.process_index}"
            trainer = RunTrainer(
                model=model,
                reward_funcs=build_reward_functions(rewards, log, early, seed),
                early=early,
                args=args,
                train_dataset=data.train,
                eval_dataset=data.eval if args.eval_strategy != "no" else None,
                processing_class=tokenizer,
                peft_config=lora,
            )
            trainer.rewards = rewards
            # What cannot be kept is said before the first step.
            save_states(rewards)
        else:
            trainer = build_scored_trainer(
                session, data, model, tokenizer, args=args, peft_config=lora
            )
    trainer.forced = bool(session.folder.read_resumption().get("forced"))
    _note_returns(session, trainer)
    _speed_up(session, trainer)
    if (dynamic := recipe.generation.dynamic_sampling) is not None:
        trainer.dynamic_sampling = DynamicSampling(trainer, dynamic.max_resample, log)
    return trainer, rewards


def _build_async_trainer(
    session: Session,
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: BuiltData,
    rewards: list[Reward],
) -> "AsyncRunTrainer":
    from grpo_cli.train.async_trainer import build_async_trainer

    model = session.recipe.model
    session.annotate_manifest(model=fingerprint_model(model))
    known = all_eos_token_ids(load_generation_config(model), tokenizer)
    log = _open_completion_log(session, rewards, [*known, tokenizer.pad_token_id], lambda: True)
    return build_async_trainer(session, args, tokenizer, data.train, rewards, log)


def _add_callbacks(session: Session, trainer: "AnyTrainer") -> tuple[RunCallback, RuleStop]:
    """Those that write, and those that stop."""
    # It fills the log with what `metrics.jsonl` holds.
    trainer.remove_callback(PrinterCallback)
    rules, training = RuleStop(session), session.recipe.training
    callback = RunCallback(session, listeners=[rules.take] if training.stop_when else [])
    trainer.add_callback(callback)
    if training.stop_when:
        # Behind the callback that it hears the records from.
        trainer.add_callback(rules)
    track(trainer, session)
    if training.early_stopping:
        stopping = training.early_stopping
        trainer.add_callback(EarlyStoppingCallback(stopping.patience, stopping.min_delta))
    return callback, rules


def _speed_up(session: Session, trainer: RunTrainer) -> None:
    """Does with less work what is exact; the manifest tells what, and why anything is not."""
    fast = wanted_parts(session.recipe)

    def tell(left_off: dict[str, str]) -> None:
        switches = leave_off(fast, left_off).model_dump()
        session.annotate_manifest(fast=switches | {"left_off": left_off})
        if left_off and session.processes.is_main_process:
            record = {"event": "fast", "step": trainer.state.global_step, "left_off": left_off}
            append_record(session.folder.metrics, record)

    trainer.speed_up(fast, tell)


def _wait_for_server(session: Session) -> None:
    """Says what is being waited for; nothing else would heed a request to stop then."""
    if session.stop.seen_here():
        raise Stopped("stopped while waiting for vLLM; steps since the last checkpoint are lost")
    session.report("waiting for vLLM")


def _note_returns(session: Session, trainer: "AnyTrainer") -> None:
    """Writes down in which step a vLLM server came back and was given the weights again."""

    def note() -> None:
        session.report("training")
        record = {"event": "server", "step": trainer.state.global_step}
        append_record(session.folder.metrics, record)

    generation = getattr(trainer, "vllm_generation", None)
    if isinstance(generation, RunGeneration):
        generation.on_return = note


def _open_completion_log(
    session: Session,
    rewards: list[Reward],
    eos_token_ids: list[int],
    is_training: Callable[[], bool],
) -> CompletionLog:
    path = session.folder.completions / f"rank_{session.processes.process_index}.jsonl"
    wanted = path if session.recipe.logging.log_completions else None
    names = [reward.name for reward in rewards]
    return CompletionLog(wanted, names, eos_token_ids, is_training)


def _build_measurer(
    session: Session, trainer: "AnyTrainer", rewards: list[Reward], data: BuiltData
) -> Measurer | None:
    if shares_weights(trainer):
        # No process holds a model that it could sample from by itself.
        return None
    if isinstance(trainer, ScoredTrainer):
        rows, ranker = select_rows(data.eval, session.recipe.evaluation.limit), trainer.ranker
        return ScoredMeasurer(session, rewards, rows, ranker) if rows and ranker else None
    rows = select_rows(data.eval, session.recipe.evaluation.limit)
    generation = getattr(trainer, "vllm_generation", None)
    vllm = generation if isinstance(generation, RunGeneration) else None
    return Measurer(session, rewards, rows, vllm=vllm) if rows is not None else None


def _go_on(
    session: Session, trainer: "AnyTrainer", data: BuiltData, resumption: Mapping[str, Any]
) -> None:
    """Trains from a checkpoint to the end; where it is the end, only takes its weights."""
    checkpoint = session.folder.checkpoints / resumption["checkpoint"]
    inputs = batch_inputs(session.recipe, session.processes.num_processes, len(data.train))
    plan = plan_batch(inputs)
    if resumption["step"] >= (plan.total_optimizer_steps or 0):
        trainer.load_weights(checkpoint)
    else:
        trainer.resume_from(checkpoint, plan.optimizer_steps_per_epoch or 1)


def _planned_steps(trainer: "AnyTrainer") -> int | None:
    return trainer.args.max_steps if trainer.args.max_steps > 0 else None


def _check_steps(session: Session, trainer: "AnyTrainer") -> None:
    """Compares the steps done with those planned: a loop can end early without an error."""
    done, planned = trainer.state.global_step, trainer.state.max_steps
    if done < planned and not session.recipe.training.early_stopping:
        raise RunError(
            f"training ended after {done} of {planned} planned steps without being asked to. "
            "Fix: look at the end of the log in logs/, and at the number of prompts in manifest.json"
        )


def _early_end(trainer: "AnyTrainer") -> str | None:
    """Why training ended before its last step, where early stopping ended it."""
    state = trainer.state
    if state.global_step >= state.max_steps:
        return None
    metric, best = trainer.args.metric_for_best_model, state.best_metric
    return f"stopped early: {metric} no longer got better (best {best})"


def _save_model(session: Session, trainer: "AnyTrainer") -> None:
    """Writes the final weights (or adapter) and tokenizer to `model/`, whole or not at all."""
    partial = session.folder.path / ".model.partial"
    if session.processes.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    session.processes.wait_for_everyone()
    with atomic_dir(partial):
        trainer.save_model(str(partial))
    session.processes.wait_for_everyone()
    if session.processes.is_main_process:
        # A pickle of the arguments: of no use beside resolved.json, and unsafe to load.
        (partial / "training_args.bin").unlink(missing_ok=True)
        # peft's card is a form with nothing filled in.
        (partial / "README.md").unlink(missing_ok=True)
        os.replace(partial, session.folder.model)
