"""`GRPOTrainer` with checkpoints that are whole or not there, and from which a run goes on exactly.

The only file that touches private names of TRL and transformers: `_save_checkpoint`, `_get_output_dir`,
`_get_train_sampler`, `_load_from_checkpoint`, `_step` and `_buffered_inputs`, as read in trl 1.16.0 and
transformers 5.17; for the sums of a record `_metrics`, `_tr_loss`, `_total_loss_scalar` and
`_globalstep_last_logged`. `tests/integration/test_resuming.py` fails where one of them changes its meaning.
For groups without a signal `_generate_and_score_completions`, `_calculate_rewards`, `_metrics` and `_logs`,
with `tests/integration/test_dynamic_sampling.py`.
`_generate` and `_calculate_rewards` are timed; where TRL no longer calls them, no phases are logged, and
`tests/integration/test_training.py` fails. `_generate_and_score_completions` and `_generate_single_turn` are
where scoring beside sampling begins (`overlap.py`); where TRL no longer calls them, rewards are asked
afterwards, and `tests/integration/test_overlap.py` fails.
"""

import functools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer_utils import rotate_checkpoints

from grpo_cli.errors import RunError
from grpo_cli.fast.sampler_choice import shares_weights
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.checkpoints import REFERENCE, STAGING, STATE
from grpo_cli.runs.folder import RunFolder
from grpo_cli.train.dynamic_sampling import DynamicSampling, Sampled
from grpo_cli.train.failures import atomic_dir
from grpo_cli.train.group_signal import GroupSignal
from grpo_cli.train.overlap import EarlyScoring
from grpo_cli.train.phases import PhaseClock
from grpo_cli.train.reward_functions import load_states, save_states


class WholeCheckpoints:
    """What a trainer of ours inherits before one of TRL's: checkpoints that are whole or not there."""

    _saving = False
    args: Any
    accelerator: Any
    state: Any

    def _save_more(self, staged: Path) -> None:
        """Adds what the trainer leaves out."""

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)  # type: ignore[misc]
        return os.path.join(folder, STAGING) if self._saving else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoints = Path(self.args.output_dir)
        staged = checkpoints / STAGING / f"checkpoint-{self.state.global_step}"
        self._saving = True
        try:
            with atomic_dir(staged.parent):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self._save_more(staged)
                if self.args.should_save:
                    self._note_best(staged)
        finally:
            self._saving = False
        self.accelerator.wait_for_everyone()
        # A folder that machine 0 shares is machine 0's to change: a second hand would first remove what
        # the first has put in place, and then find nothing to put there.
        shared = RunFolder(checkpoints.parent).shares_checkpoints
        if self.accelerator.is_local_main_process and not shared:
            _put_in_place(staged, checkpoints / staged.name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            rotate_checkpoints(
                str(checkpoints), self.args.save_total_limit, self.state.best_model_checkpoint
            )

    def _note_best(self, staged: Path) -> None:
        """Names the best checkpoint by where it will lie, in the state that was just written."""
        best = self.state.best_global_step
        if best is None:
            return
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{best}"
        if checkpoint.is_dir() or checkpoint.name == staged.name:
            self.state.best_model_checkpoint = str(checkpoint)
        self.state.save_to_json(str(staged / STATE))


class RunTrainer(WholeCheckpoints, FastTrainer):
    """Saves aside and renames; saves and restores what TRL leaves out of a checkpoint."""

    dynamic_sampling: DynamicSampling | None = None
    """Replaces groups without signal; None where they stay."""
    rewards: Sequence[Reward] = ()
    """Those whose state checkpoints keep, if they offer one."""
    forced = False
    """Whether a run goes on although a checkpoint lacks some of that."""
    _epochs_done = 0
    _sums: dict[str, Any] | None = None
    """What the next record has added up so far, of a run that goes on."""

    def __init__(self, *args: Any, early: EarlyScoring | None = None, **given: Any) -> None:
        self._clock = PhaseClock()
        self._early = early or EarlyScoring([])
        super().__init__(*args, **given)
        self.add_callback(self._clock)

    def resume_from(self, checkpoint: Path, steps_an_epoch: int) -> None:
        """Trains from a checkpoint to the end, as if it had never been interrupted.

        What TRL does not restore is taken up here: it keeps a batch of generations for
        `steps_per_generation` × `num_iterations` micro-steps, and shuffles every epoch with a generator
        that starts anew in each process.

        Args:
            checkpoint: One of this run's.
            steps_an_epoch: Optimizer steps of one epoch.
        """
        take_numbered_cpus()
        state = TrainerState.load_from_json(str(checkpoint / STATE))
        self._epochs_done = state.global_step // steps_an_epoch
        path = _generations(checkpoint, self.accelerator.process_index)
        if path.is_file():
            saved = torch.load(path, map_location=self.accelerator.device, weights_only=True)
            self._step, self._buffered_inputs = saved["step"], saved["inputs"]
        path = checkpoint / REFERENCE
        if path.is_file() and self.args.sync_ref_model and not shares_weights(self):
            reference = torch.load(path, map_location="cpu", weights_only=True)
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(reference)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):
                kept = state.stateful_callbacks.get(EarlyStoppingCallback.__name__, {})
                vars(callback).update(kept.get("attributes", {}))
        self._load_process(checkpoint)
        # That was before the first step.
        self.args.eval_on_start = False
        self.train(resume_from_checkpoint=str(checkpoint))

    def load_weights(self, checkpoint: Path) -> None:
        """Loads a checkpoint behind which nothing is left to train."""
        take_numbered_cpus()
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / STATE))
        self._load_process(checkpoint)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One micro-step; a loss that is not finite ends the training before it ruins the weights.

        Raises:
            RunError: It is not; what it was computed from is kept.
        """
        self._take_up_sums()
        loss = super().training_step(model, inputs, num_items_in_batch)
        # In fp16 the gradient scaler skips such steps by itself.
        if not (self.args.fp16 or torch.isfinite(loss).all()):
            kept = (
                Path(self.args.output_dir).parent / f"bad_batch_{self.accelerator.process_index}.pt"
            )
            # Whole: a step may be learned from in other micro-batches than TRL's.
            inputs = self._learned_from or self._buffered_inputs
            torch.save({"step": self.state.global_step + 1, "inputs": inputs}, kept)
            raise RunError(
                f"the loss of step {self.state.global_step + 1} is {loss.item()}. The batch is kept in "
                f"{kept}, and the last checkpoint is from before. Fix: a lower training.learning_rate; "
                "look for extreme rewards in completions/"
            )
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the time of each phase to the records of training steps."""
        if "loss" in logs:
            logs.update(self._clock.take())
        super().log(logs, start_time)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.dynamic_sampling is None or not self.model.training:
            return self._sample_and_score(inputs)
        filled = self.dynamic_sampling.sample(inputs, self._sample)
        for name, value in filled.rates.items():
            self._metrics["train"][name].append(value)
        # Like `num_tokens`: the newest of a count, not the mean.
        self._metrics["train"].update({name: [value] for name, value in filled.totals.items()})
        return filled.batch

    def _sample(self, rows: list[Any], *, fresh: bool) -> Sampled:
        """Samples rows as TRL does; its metrics are of the first sampling alone, but for tokens and seconds."""
        metrics = self._metrics["train"]
        before = {name: list(values) for name, values in metrics.items()} if fresh else None
        batch = self._sample_and_score(rows)
        if before is not None:
            before["num_tokens"] = metrics["num_tokens"]
            for reward in self.reward_func_names:
                if (name := f"rewards/{reward}/seconds") in before:
                    before[name][-1] += metrics[name][-1]
            metrics.clear()
            metrics.update(before)
        return Sampled(batch, self._rewards)

    def _sample_and_score(self, rows: Any) -> Any:
        with self._early.expecting(rows if self.model.training else None, self.state):
            batch = super()._generate_and_score_completions(rows)
        self._clear_equal_groups(batch["advantages"])
        return batch

    def _clear_equal_groups(self, advantages: torch.Tensor) -> None:
        """Set the advantages of groups whose totals are equal to exactly 0, and count these groups.

        Args:
            advantages: Of this process's completions, [completions] float32.
        """
        training = self.model.training
        mode, size = (
            ("train", self.num_generations) if training else ("eval", self.num_generations_eval)
        )
        silent = GroupSignal.of(self, size).find_silent(self._rewards)
        completions = len(self._rewards)
        self._metrics[mode]["frac_reward_zero_std"][-1] = len(silent) * size / completions
        places = [group * size + member for group in silent for member in range(size)]
        first = self.accelerator.process_index * len(advantages)
        # One write: on a GPU each costs a kernel.
        advantages[[at - first for at in places if 0 <= at - first < len(advantages)]] = 0.0
        logged = self._logs["advantages"]
        for place in places:
            if completions - place <= len(logged):
                logged[place - completions] = 0.0

    def _generate(self, prompts: Any) -> Any:
        synced_s = self._synced_s()
        with self._clock.inside("sampling"):
            found = super()._generate(prompts)
        if synced_s is not None:
            self._clock.move("sync", (self._synced_s() or 0.0) - synced_s, out_of="sampling")
        return found

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, fields: Any, num_generations: int, *rest: Any
    ) -> Any:
        sample_rows = super()._generate_single_turn
        if images or fields or rest:
            return sample_rows(prompt_ids, images, fields, num_generations, *rest)

        def draw(rows: slice) -> Any:
            return sample_rows(prompt_ids[rows], None, {}, num_generations)

        return self._early.sample(draw, self._tokenizer, prompt_ids, num_generations)

    def _synced_s(self) -> float | None:
        """Seconds spent so far on giving vLLM the weights; None where another backend samples."""
        return getattr(getattr(self, "vllm_generation", None), "synced_s", None)

    def _calculate_rewards(self, *args: Any, **given: Any) -> Any:
        with self._clock.inside("scoring"):
            self._rewards = super()._calculate_rewards(*args, **given)
        return self._rewards

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        if sampler.shuffle:
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _save_more(self, staged: Path) -> None:
        """The generations that later steps still learn from, sums and rewards' states, one file a process."""
        staged.mkdir(parents=True, exist_ok=True)
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every:
            saved = {"step": self._step % every, "inputs": self._buffered_inputs}
            torch.save(saved, _generations(staged, self.accelerator.process_index))
        sums = {
            "metrics": dict(self._metrics["train"]),
            "loss": self._tr_loss.item(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
        }
        own = {"sums": sums, "rewards": save_states(self.rewards)}
        torch.save(own, _process(staged, self.accelerator.process_index))
        wanted = self.args.sync_ref_model and not (
            self.args.save_only_model or shares_weights(self)
        )
        if wanted and self.args.should_save:
            reference = self.accelerator.unwrap_model(self.ref_model)
            torch.save(reference.state_dict(), staged / REFERENCE)

    def _load_process(self, checkpoint: Path) -> None:
        """Read what `_save_more` wrote of this process; checkpoints of earlier versions have nothing."""
        path = _process(checkpoint, self.accelerator.process_index)
        own: dict[str, Any] = {}
        if path.is_file():
            own = torch.load(path, map_location="cpu", weights_only=True)
        self._sums = own.get("sums")
        load_states(self.rewards, own.get("rewards", {}), checkpoint, force=self.forced)

    def _take_up_sums(self) -> None:
        """Add up on from the checkpoint; the trainer has begun its sums anew by the first step."""
        sums, self._sums = self._sums, None
        if sums is None:
            return
        self._metrics["train"].update(sums["metrics"])
        self._tr_loss += sums["loss"]
        self._total_loss_scalar = sums["total_loss"]
        self._globalstep_last_logged = sums["last_logged"]


@functools.cache
def take_numbered_cpus() -> None:
    """Lets torch load to `cpu:0`: so the Trainer calls the device of a process among several on a CPU.

    Source: `torch.serialization.register_package`; torch 2.13 by itself knows only `cpu`.
    """
    torch.serialization.register_package(
        11,
        lambda storage: None,
        lambda storage, location: storage if location.startswith("cpu:") else None,
    )


def _process(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"process_{rank}.pt"


def _generations(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"generations_{rank}.pt"


def _put_in_place(staged: Path, checkpoint: Path) -> None:
    """Gives a finished checkpoint its name; a machine may have written nothing to its own disk."""
    if staged.is_dir():
        shutil.rmtree(checkpoint, ignore_errors=True)
        staged.replace(checkpoint)
