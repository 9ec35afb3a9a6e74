"""The warm-up: supervised steps before GRPO, with TRL's `SFTTrainer`.

What is learned from is written to `warmup/examples.jsonl` before the first step, and what came of it to
`warmup/model/`: an attempt that finds either goes on from there.
"""

import gc
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils as trl_utils

from grpo_cli.errors import RunError
from grpo_cli.models.loading import build_peft_config, load_trainable
from grpo_cli.recipe.model import AdapterConfig, ModelConfig
from grpo_cli.runs.checkpoints import whole_checkpoints
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import append_record
from grpo_cli.training.build import Inputs, load_base
from grpo_cli.training.callbacks import is_stop_requested
from grpo_cli.training.checkpoints import (
    AtomicCheckpoints,
    accept_numbered_cpus,
    loading_weights_only,
    save_model,
)
from grpo_cli.training.examples import (
    WARMING,
    Example,
    has_examples,
    read_examples,
    read_rows,
    sample_best,
    save_examples,
    section_of,
    write_examples,
)
from grpo_cli.training.measurement import Measurer, select_rows
from grpo_cli.training.session import Session, Stopped
from grpo_cli.units import spread
from grpo_cli.upstream import replaced

_RATES = {True: 2e-4, False: 1e-5}
"""Learning rates with LoRA and without."""
_FEWEST_TO_HOLD_OUT = 10


def warm_up(session: Session, inputs: Inputs) -> ModelConfig:
    """Train the warm-up, unless an earlier attempt has; return the model that GRPO begins with.

    Raises:
        GrpoError: Something that a user can fix.
        Stopped: A stop was requested.
    """
    if not (session.folder.warmup / "model").is_dir():
        _train_warmup(session, inputs)
        # Its model and trainer refer to each other: without this they would stay in memory beside GRPO's.
        _clean_up(session)
    return _warmed_up(session.folder, session.recipe.model)


def _train_warmup(session: Session, inputs: Inputs) -> None:
    folder, config, processes = session.folder, session.recipe.model, session.processes
    data, tokenizer, player = inputs.data, inputs.tokenizer, inputs.player
    session.report(WARMING)
    rows = read_rows(session.recipe, data.train, tokenizer)
    # One process makes them, and all read the same: environments need not answer twice alike.
    with processes.main_process_first():
        if section_of(session.recipe).answer and not has_examples(folder):
            save_examples(folder, write_examples(session, tokenizer, rows, player))
    model = load_trainable(load_base(session, config, tokenizer), config)
    held_out = select_rows(data.eval, session.recipe.evaluation.limit)
    if held_out is not None and not (folder.evaluations / "before.json").is_file():
        sources = tuple(data.report.sources or ())
        measurer = Measurer(
            session,
            inputs.rewards,
            held_out,
            session.recipe.evaluation,
            player=player,
            sources=sources,
        )
        measurer.measure("before", model, tokenizer)
    processes.wait_for_everyone()
    if not has_examples(folder):
        best = sample_best(session, model, tokenizer, rows, inputs.rewards, player)
        if processes.is_main_process:
            save_examples(folder, best)
    processes.wait_for_everyone()
    peft_config = None if config.adapter else build_peft_config(config.lora, model)
    trainer = _learn(session, inputs.args, model, tokenizer, peft_config, read_examples(folder))
    save_model(session, trainer, folder.warmup / "model")
    trainer.accelerator.free_memory()


def _warmed_up(folder: RunFolder, model: ModelConfig) -> ModelConfig:
    """Return the model that GRPO begins with once the warm-up is done."""
    end = str(folder.warmup / "model")
    if model.lora is None:
        return model.model_copy(update={"path": end, "revision": None})
    adapter = (model.adapter or AdapterConfig(path=end)).model_copy(update={"path": end})
    return model.model_copy(update={"adapter": adapter})


class _Trainer(AtomicCheckpoints, SFTTrainer):
    """`SFTTrainer` whose checkpoints are complete or absent."""


class _Progress(TrainerCallback):
    """Writes records and status, and ends the loop on request."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._started = 0.0
        self.is_stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._started = time.monotonic()
        self._session.show(phase=WARMING, detail="")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the time that it took."""
        if state.is_world_process_zero:
            seconds = round(time.monotonic() - self._started, 2)
            record = {"event": "warmup_end", "warmup_step": state.global_step, "seconds": seconds}
            append_record(self._session.folder.metrics, record)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give a sign of life."""
        self._session.heartbeat.beat()

    on_prediction_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop all processes at this step if any of them was requested to."""
        self._session.heartbeat.beat()
        if is_stop_requested(self._session):
            self.is_stopped = control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Append a record, and say how far it is.

        Raises:
            RunError: The loss is not finite.
        """
        values = {
            name: value for name, value in (logs or {}).items() if name in ("loss", "eval_loss")
        }
        if not values or not state.is_world_process_zero:
            return
        step = state.global_step
        record = {"event": "warmup", "warmup_step": step, "total_steps": state.max_steps, **values}
        append_record(self._session.folder.metrics, record)
        if not all(map(math.isfinite, values.values())):
            raise RunError(
                f"the loss of step {step} of the warm-up is not finite",
                "a lower warmup.learning_rate",
            )
        said = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        # Not `session.report`, which would raise before a requested stop has saved the step.
        self._session.show(
            phase=WARMING, done=step, planned=state.max_steps, detail=f"steps, {said}"
        )


def _learn(
    session: Session,
    args: Any,
    model: Any,
    tokenizer: Any,
    peft_config: Any,
    examples: list[Example],
) -> _Trainer:
    """Train on the examples, from the newest checkpoint if an earlier attempt left one.

    Args:
        args: The arguments of GRPO, whose precision and memory settings are taken.
        peft_config: Of a fresh adapter; None if there is one, or all weights are trained.

    Raises:
        Stopped: It was requested; the last step is saved.
        RunError: The loss is not finite.
    """
    warmup = section_of(session.recipe)
    train, held = _split(examples, warmup.eval_fraction)
    progress = _Progress(session)
    trainer = _Trainer(
        model=model,
        args=_sft_args(session, args, len(train), has_held_out=bool(held)),
        train_dataset=_as_dataset(train),
        eval_dataset=_as_dataset(held) if held else None,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    if held:
        trainer.add_callback(EarlyStoppingCallback(warmup.patience))
    accept_numbered_cpus()
    checkpoints = whole_checkpoints(RunFolder(session.folder.warmup))
    newest = checkpoints[max(checkpoints)] if checkpoints else None
    trusted = bool(session.resumption.get("trusted"))
    # On a CPU, TRL's output head computes the logits of prompts too, which take most of the memory.
    with (
        replaced(trl_utils, _use_triton=lambda device: True),
        loading_weights_only(trainer, newest, trusted=trusted) if newest else nullcontext(),
    ):
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    if progress.is_stopped:
        raise Stopped(
            f"stopped after step {trainer.state.global_step} of the warm-up, which is saved"
        )
    return trainer


def _split(examples: list[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Hold out a share of the examples, evenly spread; none of few."""
    count = min(round(fraction * len(examples)), len(examples) - 1)
    if not count or len(examples) < _FEWEST_TO_HOLD_OUT:
        return examples, []
    places = {*spread(len(examples), count)}
    held = [examples[place] for place in sorted(places)]
    return [each for place, each in enumerate(examples) if place not in places], held


def _as_dataset(examples: Sequence[Example]) -> Dataset:
    return Dataset.from_list([each.as_features() for each in examples])


def _sft_args(session: Session, args: Any, count: int, *, has_held_out: bool) -> SFTConfig:
    recipe, warmup = session.recipe, section_of(session.recipe)
    together = (
        warmup.per_device_train_batch_size
        * warmup.gradient_accumulation_steps
        * session.processes.num_processes
    )
    epoch = -(-count // together)
    best = {
        "eval_strategy": "steps",
        "eval_steps": epoch,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    return SFTConfig(
        output_dir=str(session.folder.warmup / "checkpoints"),
        seed=recipe.seed,
        learning_rate=warmup.learning_rate or _RATES[recipe.model.lora is not None],
        num_train_epochs=warmup.num_train_epochs,
        max_steps=warmup.max_steps or -1,
        per_device_train_batch_size=warmup.per_device_train_batch_size,
        per_device_eval_batch_size=warmup.per_device_train_batch_size,
        gradient_accumulation_steps=warmup.gradient_accumulation_steps,
        save_strategy="steps",
        save_steps=epoch,
        # The best and the newest: with 1, transformers would remove the newest in the end.
        save_total_limit=2,
        restore_callback_states_from_checkpoint=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        max_length=None,
        report_to=[],
        disable_tqdm=True,
        **(best if has_held_out else {}),
        **{
            name: getattr(args, name)
            for name in (
                "bf16",
                "fp16",
                "use_cpu",
                "optim",
                "max_grad_norm",
                "gradient_checkpointing",
                "gradient_checkpointing_kwargs",
                "ddp_find_unused_parameters",
                "dataloader_pin_memory",
            )
        },
    )


def _clean_up(session: Session) -> None:
    """Release the memory of a warm-up that is out of scope, and remove its checkpoints (main process)."""
    if session.processes.is_main_process:
        shutil.rmtree(session.folder.warmup / "checkpoints", ignore_errors=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
