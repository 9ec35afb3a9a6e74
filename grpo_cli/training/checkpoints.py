"""Checkpoints that are complete or absent, and from which a run resumes exactly."""

import copy
import errno
import functools
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy
import torch
from transformers import EarlyStoppingCallback, PreTrainedModel, TrainerCallback, TrainerState
from transformers.trainer_utils import rotate_checkpoints

from grpo_cli.errors import RewardError, RunError
from grpo_cli.fast.trainer import shares_weights
from grpo_cli.models.processor import copy_processor
from grpo_cli.models.weights import unpickling_error, weights_only
from grpo_cli.rewards.scoring import Reward, has_state, read_state
from grpo_cli.runs.checkpoints import REFERENCE, STAGING, STATE
from grpo_cli.runs.folder import RunFolder
from grpo_cli.training.session import Session
from grpo_cli.units import format_bytes
from grpo_cli.upstream import replaced

if TYPE_CHECKING:
    from grpo_cli.training.difficulty import DifficultySampler

_FULL_BYTES = 2**26
"""With less than this left, or less than was written, a failed write means a full disk."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_Mixin: Any = object
"""Attributes and methods of the trainer that a mixin comes before."""


@contextmanager
def atomic_dir(partial: Path) -> Iterator[None]:
    """Write a folder completely, or remove what was written.

    Raises:
        RunError: The disk is full.
    """
    try:
        yield
    except BaseException as error:
        written = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        left = shutil.disk_usage(partial.parent).free
        shutil.rmtree(partial, ignore_errors=True)
        full = _is_no_space(error) or left < min(written, _FULL_BYTES)
        if isinstance(error, Exception) and full:
            raise RunError(
                f"the disk of {partial.parent} is full: {format_bytes(written)} were written and "
                f"{format_bytes(left)} are left. What was saved before is complete",
                "free some space "
                "(training.save_total_limit bounds the checkpoints), then `grpo train … --resume`",
            ) from error
        raise


def _is_no_space(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _NO_SPACE
    # Safetensors reserves the file's space first, so that much may be left, and is written in Rust.
    return any(f"(os error {number})" in str(error) for number in _NO_SPACE)


def save_reward_states(rewards: Sequence[Reward]) -> dict[str, Any]:
    """Return the state of each reward that has one, by name; see `read_state` for what it raises."""
    return {reward.name: read_state(reward) for reward in rewards if has_state(reward)}


def load_reward_states(rewards: Sequence[Reward], states: Mapping[str, Any]) -> None:
    """Restore the states that `save_reward_states` returned.

    Raises:
        RewardError: A reward refuses its state.
    """
    for reward in filter(has_state, rewards):
        if reward.name not in states:
            continue
        try:
            reward.scorer.load_state_dict(states[reward.name])  # type: ignore[attr-defined]
        except Exception as error:
            raise RewardError(
                f"load_state_dict() of reward {reward.name!r} failed: {error!r:.300}",
                "accept what state_dict() returned",
            ) from error


@contextmanager
def states_kept(rewards: Sequence[Reward]) -> Iterator[None]:
    """Keep the states of rewards, and of random numbers, as they are for the training, whatever is scored inside.

    An attempt that resumes does not repeat what an earlier one did before its first checkpoint, so that must leave
    no trace in the training.
    """
    states = copy.deepcopy(save_reward_states(rewards))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    own, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(own)
        numpy.random.set_state(arrays)
        load_reward_states(rewards, states)


class AtomicCheckpoints(_Mixin):
    """Mixin before one of TRL's trainers: checkpoints are staged and then renamed."""

    forced = False
    """Whether to resume even if the checkpoint lacks a reward's state."""

    def load_state(self, checkpoint: Path, last_step: int) -> None:
        """Load what a checkpoint says about the training so far, which tells whether a step is left.

        Args:
            last_step: Of the whole training as it is planned now.
        """
        self.state = TrainerState.load_from_json(str(checkpoint / STATE))
        self.state.max_steps = last_step
        # It was written by the main process.
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        if (stopping := self._early_stopping) is not None:
            kept = self.state.stateful_callbacks.get(EarlyStoppingCallback.__name__, {})
            vars(stopping).update(kept.get("attributes", {}))

    @property
    def is_done(self) -> bool:
        """True if no step is left: the last one was done, or early stopping ended the training."""
        stopping = self._early_stopping
        stopped = stopping is not None and (
            stopping.early_stopping_patience_counter >= stopping.early_stopping_patience
        )
        return stopped or self.state.global_step >= self.state.max_steps

    def finish(self, checkpoint: Path) -> None:
        """Load what training ends with, if no step is left: the last weights, or the best."""
        self.load_weights(checkpoint)
        # The path in the state is where the run folder was then.
        best = checkpoint.with_name(f"checkpoint-{self.state.best_global_step}")
        if self.args.load_best_model_at_end and best != checkpoint and best.is_dir():
            self._load_from_checkpoint(str(best))

    def load_weights(self, checkpoint: Path) -> None:
        """Load the weights of a checkpoint, and what belongs to them, but train nothing."""
        accept_numbered_cpus()
        self._load_from_checkpoint(str(checkpoint))
        self._load_more(checkpoint)

    def replace_state(self, checkpoint: Path) -> None:
        """Replace the state in a checkpoint, of which an evaluation was missing."""
        if (stopping := self._early_stopping) is not None:
            self.state.stateful_callbacks[EarlyStoppingCallback.__name__] = stopping.state()
        self._record_best(checkpoint)
        if self.args.should_save:
            partial = checkpoint / f"{STATE}.partial"
            self.state.save_to_json(str(partial))
            partial.replace(checkpoint / STATE)
        self.accelerator.wait_for_everyone()

    @property
    def _early_stopping(self) -> Any:
        callbacks = self.callback_handler.callbacks
        return next((each for each in callbacks if isinstance(each, EarlyStoppingCallback)), None)

    def _save_more(self, staged: Path) -> None:
        """Add what the trainer leaves out."""

    def _load_more(self, checkpoint: Path) -> None:
        """Load it."""

    def _restore_rewards(
        self, rewards: Sequence[Reward], states: Mapping[str, Any], checkpoint: Path
    ) -> None:
        for name in (reward.name for reward in rewards if has_state(reward)):
            if name not in states and not self.forced:
                raise RewardError(
                    f"{checkpoint} holds no state of reward {name!r}, which would start afresh",
                    "start a new run, or resume anyway with --force",
                )
        load_reward_states(rewards, states)

    def _own_file(self, checkpoint: Path, name: str) -> Path:
        return checkpoint / f"{name}_{self.accelerator.process_index}.pt"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoints = Path(self.args.output_dir)
        staged = checkpoints / STAGING / f"checkpoint-{self.state.global_step}"
        staging = replaced(self.args, output_dir=str(staged.parent))
        with atomic_dir(staged.parent), self._naming_as_loaded():
            with staging:
                super()._save_checkpoint(model, trial)
            self._save_more(staged)
            self._record_best(staged)
            if self.args.should_save:
                self.state.save_to_json(str(staged / STATE))
        self.accelerator.wait_for_everyone()
        # Only machine 0 renames in a folder that it shares: a second process would remove the renamed one.
        shared = RunFolder(checkpoints.parent).shares_checkpoints
        # A machine may have written nothing to its own disk.
        if self.accelerator.is_local_main_process and not shared and staged.is_dir():
            shutil.rmtree(checkpoints / staged.name, ignore_errors=True)
            staged.replace(checkpoints / staged.name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(checkpoints), self.args.save_total_limit, best)

    def _naming_as_loaded(self) -> AbstractContextManager[None]:
        """Save weights by the names that they have in memory.

        By those of the hub, which some models have besides, `Trainer` (transformers 5.17) would find none of them
        when it resumes, and go on with others.
        """
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, PreTrainedModel):
            return nullcontext()
        save = functools.partial(model.save_pretrained, save_original_format=False)
        return replaced(model, save_pretrained=save)

    def _record_best(self, staged: Path) -> None:
        """Name the best checkpoint by its final path, for all processes."""
        best = self.state.best_global_step
        if best is None:
            return
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{best}"
        if checkpoint.is_dir() or checkpoint.name == staged.name:
            self.state.best_model_checkpoint = str(checkpoint)

    def check_loss(self, loss: torch.Tensor, inputs: Any = None) -> None:
        """End the training before a loss that is not finite ruins the weights.

        Raises:
            RunError: It is not finite; `inputs`, what it was computed from, are kept in the run folder.
        """
        # In fp16 the gradient scaler skips such steps itself.
        if self.args.fp16 or math.isfinite(loss):
            return
        step, kept = self.state.global_step + 1, ""
        if inputs is not None:
            name = f"bad_batch_{self.accelerator.process_index}.pt"
            path = Path(self.args.output_dir).parent / name
            torch.save({"step": step, "inputs": inputs}, path)
            kept = f" The batch is kept in {path}."
        raise RunError(
            f"the loss of step {step} is {loss.item()}.{kept} The last checkpoint is from before",
            "a lower training.learning_rate; look for extreme rewards in completions/",
        )


class ExactResume(AtomicCheckpoints):
    """Mixin before `GRPOTrainer`: saves and restores what TRL leaves out of a checkpoint."""

    rewards: Sequence[Reward]
    difficulty: "DifficultySampler | None"
    """Draws the prompts; None if TRL does."""
    synced_adapter: torch.nn.Module | None = None
    """The reference, if that is an adapter that `sync_ref_model` changes."""
    _sums: dict[str, Any] | None = None
    """Sums of the record in progress, from the checkpoint."""

    def resume_from(self, checkpoint: Path, steps_per_epoch: int) -> None:
        """Train to the end from the checkpoint whose state was loaded, as if the run had never been interrupted.

        TRL keeps a batch of generations for `steps_per_generation` × `num_iterations` micro-steps, and shuffles
        every epoch with a generator that starts afresh in each process; both are restored here.
        """
        accept_numbered_cpus()
        if saved := load_saved(self._own_file(checkpoint, "generations"), self.accelerator.device):
            self._step, self._buffered_inputs = saved["step"], saved["inputs"]
        reference = self._synced_reference
        if reference is not None and (weights := load_saved(checkpoint / REFERENCE)):
            reference.load_state_dict(weights)
        self._load_more(checkpoint)
        # That was before the first step.
        self.args.eval_on_start = False
        epochs_done = self.state.global_step // steps_per_epoch
        self.add_callback(_Resumption(self.restore_sums, epochs_done))
        self.train(resume_from_checkpoint=str(checkpoint))

    def restore_sums(self) -> None:
        """Restore the sums of the record in progress, once."""
        sums, self._sums = self._sums, None
        if sums is None:
            return
        self._metrics["train"].update(sums["metrics"])
        self._tr_loss += sums["loss"]
        self._total_loss_scalar = sums["total_loss"]
        # transformers 5.24 divides the sum by the steps since this one.
        self._initial_global_step = 0
        self._globalstep_last_logged = sums["last_logged"]

    def _save_more(self, staged: Path) -> None:
        staged.mkdir(parents=True, exist_ok=True)
        # Later micro-steps still learn from these generations.
        step = self._step % (self.args.steps_per_generation * self.num_iterations)
        if step:
            saved = {"step": step, "inputs": self._buffered_inputs}
            torch.save(saved, self._own_file(staged, "generations"))
        sums = {
            "metrics": dict(self._metrics["train"]),
            "loss": self._tr_loss.item(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
        }
        own = {"sums": sums, "rewards": save_reward_states(self.rewards)}
        if self.difficulty is not None:
            own["difficulty"] = self.difficulty.state()
        torch.save(own, self._own_file(staged, "process"))
        reference = self._synced_reference
        if reference is not None and self.args.should_save and not self.args.save_only_model:
            torch.save(reference.state_dict(), staged / REFERENCE)

    def _load_more(self, checkpoint: Path) -> None:
        # Checkpoints of earlier versions have no such file.
        own = load_saved(self._own_file(checkpoint, "process")) or {}
        self._sums = own.get("sums")
        if self.difficulty is not None and "difficulty" in own:
            self.difficulty.restore(own["difficulty"])
        self._restore_rewards(self.rewards, own.get("rewards", {}), checkpoint)

    @property
    def _synced_reference(self) -> torch.nn.Module | None:
        """The reference that `sync_ref_model` changes, if each process holds all of it."""
        if shares_weights(self):
            return None
        if self.args.sync_ref_model:
            return self.accelerator.unwrap_model(self.ref_model)
        return self.synced_adapter


@contextmanager
def loading_weights_only(trainer: Any, checkpoint: Path, *, trusted: bool) -> Iterator[None]:
    """Let the trainer unpickle nothing but tensors and plain values until its first step; see `weights_only`."""
    with ExitStack() as loading:
        loading.enter_context(weights_only(checkpoint, trusted=trusted))
        trainer.add_callback(_LoadingEnds(loading))
        try:
            yield
        except UnpicklingError as error:
            # The random states are loaded later, and never with anything else.
            raise unpickling_error(checkpoint, error) from error


class _Resumption(TrainerCallback):
    """Restores what the trainer resets when a training begins: its sums, and the order of the prompts."""

    def __init__(self, restore_sums: Callable[[], None], epochs_done: int) -> None:
        self._restore_sums, self._epochs_done = restore_sums, epochs_done

    def on_train_begin(self, *args: Any, train_dataloader: Any, **kwargs: Any) -> None:
        """Shuffle as often as there were epochs: TRL's sampler has a generator of its own, which starts afresh."""
        batches = train_dataloader.batch_sampler
        # With several processes, accelerate gives each its shard of the batches.
        sampler: Any = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
        if getattr(sampler, "shuffle", False):
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Restore the sums."""
        self._restore_sums()


class _LoadingEnds(TrainerCallback):
    def __init__(self, loading: ExitStack) -> None:
        self._loading = loading

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Leave what rewards load from now on to them."""
        self._loading.close()


def save_model(session: Session, trainer: Any, target: Path) -> None:
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


def load_saved(path: Path, device: Any = "cpu") -> Any:
    """Return what a checkpoint's file of our own holds; None if it has none."""
    return torch.load(path, map_location=device, weights_only=True) if path.is_file() else None


@functools.cache
def accept_numbered_cpus() -> None:
    """Let torch load to `cpu:0`, the name that Trainer gives the device if several processes share a CPU.

    Source: `torch.serialization.register_package`; torch 2.13 itself knows only `cpu`.
    """
    torch.serialization.register_package(
        11,
        lambda storage: None,
        lambda storage, location: storage if location.startswith("cpu:") else None,
    )
