"""One training from start to end: data, model, rewards, trainer, measurements, final weights.

Reads top to bottom in the order in which things happen. The algorithm is TRL's.
"""

import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING

import datasets
import transformers
from accelerate import PartialState
from transformers import PrinterCallback

from grpo_cli.data.build import BuiltData
from grpo_cli.errors import RunError
from grpo_cli.fast.tokens import all_eos_token_ids
from grpo_cli.fast.trainer import shares_weights
from grpo_cli.machine import pick_device
from grpo_cli.models.loading import load_generation_config
from grpo_cli.models.processor import load_processing_class, tokenizer_of
from grpo_cli.rewards.building import build_rewards, reward_context
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import When
from grpo_cli.training.build import (
    Inputs,
    build_data,
    build_trainer,
    build_trl_args,
    plan_run,
)
from grpo_cli.training.callbacks import EarlyStoppingCallback, RunCallback
from grpo_cli.training.checkpoints import loading_weights_only, save_model
from grpo_cli.training.session import (
    Heartbeat,
    Session,
    StopRequest,
    check_device,
    check_processes,
    check_strategy,
)

if TYPE_CHECKING:
    from grpo_cli.training.build import AnyTrainer


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
    plan = folder.read_plan()
    check_device(plan.get("device", device), device)
    # Building the arguments starts the process group, which everything after may use.
    args = build_trl_args(recipe, folder, plan.get("server"), cpu=device == "cpu")
    processes = PartialState()
    heartbeat = Heartbeat(folder, processes.process_index)
    session = Session(folder, recipe, stop, processes, device == "cpu", heartbeat)
    check_processes(session)
    session.report("loading the tokenizer")
    with session.processes.local_main_process_first():
        processing_class = load_processing_class(recipe.model, has_images=recipe.has_images)
        tokenizer = tokenizer_of(processing_class)
        if recipe.teacher is not None:
            from grpo_cli.models.teacher import check_teacher_tokenizer

            check_teacher_tokenizer(recipe, tokenizer)
    session.report("preparing the data")
    data = build_data(session, processing_class)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder.sent_weights, ignore_errors=True)
        player = None
        if recipe.has_episodes:
            from grpo_cli.environments.player import open_player

            session.report("opening tools and environments")
            stops = all_eos_token_ids(load_generation_config(recipe.model), tokenizer)
            player = stack.enter_context(open_player(recipe, processing_class, stops=stops))
        session.report("loading the rewards")
        context = reward_context(recipe, str(processes.device), plan=plan_run(session, data))
        rewards = build_rewards(recipe.rewards, context)
        _train(session, Inputs(args, processing_class, tokenizer, data, rewards, player))


def _train(session: Session, inputs: Inputs) -> None:
    """Train from the inputs to the final weights."""
    recipe, folder, tokenizer = session.recipe, session.folder, inputs.tokenizer
    start, measured = recipe.model, False
    when: When = "before"
    if recipe.warmup is not None:
        from grpo_cli.training.warmup import warm_up

        start, when = warm_up(session, inputs), "warmup"
        # A run that was stopped after its warm-up has been measured there.
        measured = (folder.evaluations / f"{when}.json").is_file()
    trainer = build_trainer(session, inputs, start)
    callback = _add_callbacks(session, trainer)
    check_strategy(session, trainer)
    measurer = None
    # With sharded weights no process has a model that it could sample from.
    if inputs.data.eval is not None and not shares_weights(trainer):
        if recipe.is_sampled:
            from grpo_cli.training.measurement import build_measurer
        else:
            from grpo_cli.training.scored import build_measurer
        measurer = build_measurer(session, inputs, trainer)
    resumed = bool(session.resumption)
    if measurer and not (resumed or measured):
        measurer.measure(when, trainer.model, tokenizer)
    planned = trainer.args.max_steps if trainer.args.max_steps > 0 else None
    session.report("training", total_steps=planned)
    if resumed:
        _resume(session, trainer, inputs.data)
    else:
        trainer.train()
    callback.raise_if_stopped(trainer.state)
    reason = _why_early(session, trainer)
    if measurer:
        measurer.measure("after", trainer.model, tokenizer)
    if not recipe.is_sampled and not shares_weights(trainer):
        from grpo_cli.training.scored import write_answers

        write_answers(session, trainer.model, tokenizer, inputs.data.eval or inputs.data.train)
    session.report("saving the model")
    save_model(session, trainer, folder.model)
    session.show(state="completed", phase="done", step=trainer.state.global_step, reason=reason)


def _add_callbacks(session: Session, trainer: "AnyTrainer") -> RunCallback:
    recipe = session.recipe
    # It prints the records that `metrics.jsonl` holds.
    trainer.remove_callback(PrinterCallback)
    rules = None
    if recipe.training.stop_when:
        from grpo_cli.training.stop_rules import StopRules

        rules = StopRules(session)
    callback = RunCallback(session, rules)
    trainer.add_callback(callback)
    if trainer.args.report_to:
        from grpo_cli.training.trackers import track

        track(trainer, session)
    if (stopping := recipe.training.early_stopping) is not None:
        trainer.add_callback(EarlyStoppingCallback(stopping.patience, stopping.min_delta))
    if (sets := getattr(trainer, "held_out_sets", None)) is not None:
        trainer.add_callback(sets)
    return callback


def _resume(session: Session, trainer: "AnyTrainer", data: BuiltData) -> None:
    """Train from the checkpoint to the end; if it is the end, only load the final weights."""
    resumption, plan = session.resumption, plan_run(session, data)
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
            f"training ended after {state.global_step} of {state.max_steps} planned steps without being asked to",
            "look at the end of the log in logs/, and at the number of prompts in manifest.json",
        )
    metric, best = trainer.args.metric_for_best_model, state.best_metric
    # Before the first step there is nothing to go back to: that evaluation does not count.
    at = f"{best:.4g} at step {state.best_global_step}"
    return f"stopped early: {metric} no longer improved (best {at})"
