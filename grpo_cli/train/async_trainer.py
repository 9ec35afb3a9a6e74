"""The trainer for `training.mode: async`: TRL's `AsyncGRPOTrainer` in a run of ours.

Owns building it with our rewards, our checkpoints and our way of sampling, and its metrics under the names
that the rest reads. The algorithm is TRL's (trl 1.16.0, experimental). It loads the model by itself.

Beside the protocols that TRL offers, things of it are used that are none of its interface:
`async_grpo_trainer.get_peak_flops_per_device` and `packing.TREE_ATTENTION`, on a CPU; `_sync_weight_merged` and
`_streaming_iter`, so that merging an adapter leaves the base as it is; and the names of its metrics.
`tests/integration/test_async.py` and `test_merging.py` fail where one of them changes.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.experimental.async_grpo.vllm_client import VLLMClient

from grpo_cli.errors import RunError
from grpo_cli.fast.completions import encode_prompt
from grpo_cli.launch.server_process import answers
from grpo_cli.models.adapters import without_wrapper
from grpo_cli.models.loading import build_peft_config, check_vocabulary
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.checkpoints import STATE
from grpo_cli.train import tree_attention
from grpo_cli.train.completion_log import CompletionLog
from grpo_cli.train.merging import base_kept, merge_weights
from grpo_cli.train.overlap import read_completions
from grpo_cli.train.rollouts import RolloutPlan, Rollouts
from grpo_cli.train.server_sampling import FolderTransfer, ServerSampler
from grpo_cli.train.session import Session
from grpo_cli.train.stopping import Stopped
from grpo_cli.train.trainer import WholeCheckpoints, take_numbered_cpus

_LOOK_S = 1.0
_LEAVE_S = 120.0
"""How long a request to stop waits for the samples of the step in hand."""
_MOST_WORKERS = 64
_TIMES = {
    "perf/rollout_wait_s": "time/sampling",
    "perf/weight_sync_s": "time/sync",
    "perf/fwd_bwd_s": "time/learning",
    "perf/step_s": "step_time",
}
"""TRL's names here, and those of the other mode. What is waited for is all of sampling that costs time."""


class AsyncRunTrainer(WholeCheckpoints, AsyncGRPOTrainer):
    """Saves aside and renames; goes on behind what was learned from."""

    groups_a_step = 1
    """Prompts that a step learns from."""

    def resume_from(self, checkpoint: Path, steps_an_epoch: int) -> None:
        """Trains from a checkpoint to the end, from the prompt that it stands at.

        Args:
            checkpoint: One of this run's.
            steps_an_epoch: Not read: prompts follow one another without end.
        """
        take_numbered_cpus()
        state = TrainerState.load_from_json(str(checkpoint / STATE))
        if self.rollout_worker is not None:
            self.rollout_worker.skip(state.global_step * self.groups_a_step)
        self.train(resume_from_checkpoint=str(checkpoint))

    def load_weights(self, checkpoint: Path) -> None:
        """Loads a checkpoint behind which nothing is left to train."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / STATE))

    def _sync_weight_merged(self, t0: float) -> Any:
        with base_kept(self.accelerator.unwrap_model(self.model)):
            return super()._sync_weight_merged(t0)

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.accelerator.unwrap_model(self.model)
        yield from merge_weights(model, super()._streaming_iter())

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One micro-step; a loss that is not finite ends the training before it ruins the weights.

        Raises:
            RunError: It is not.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not (self.args.fp16 or torch.isfinite(loss).all()):
            raise RunError(
                f"the loss of step {self.state.global_step + 1} is {loss.item()}; the last checkpoint is from "
                "before. Fix: a lower training.learning_rate; look for extreme rewards in completions/"
            )
        return loss


class _Bridge(TrainerCallback):
    """Has the model attend along packed paths while it trains; adds what the other mode's records have."""

    def __init__(self, trainer: AsyncRunTrainer) -> None:
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._tokens = 0.0
        self._step = 0
        self._attend("sdpa")

    def _attend(self, name: str) -> None:
        without_wrapper(self._model).set_attn_implementation(name)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Packed rows follow; a run that goes on has counted tokens before."""
        self._attend(TREE_ATTENTION)
        self._tokens, self._step = float(state.num_input_tokens_seen), state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Samples follow."""
        self._attend("sdpa")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """The tokens so far, and the time of each phase; before anybody writes them down."""
        if not logs or "loss" not in logs:
            return
        tokens = logs.get("batch/forwarded_tokens_per_step") or 0.0
        self._tokens += tokens * (state.global_step - self._step)
        self._step = state.global_step
        logs["num_tokens"] = state.num_input_tokens_seen = int(self._tokens)
        logs.update({ours: logs[theirs] for theirs, ours in _TIMES.items() if theirs in logs})


class _Patience:
    """Waits for samples, as long as nobody asks to stop for long."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: float | None = None

    def __call__(self) -> None:
        """Gives a sign of life.

        Raises:
            Stopped: The step in hand could not be ended in time.
        """
        self._session.heartbeat.beat()
        if not self._session.stop.seen_here():
            return
        self._asked = self._asked or time.monotonic()
        if time.monotonic() - self._asked > _LEAVE_S:
            raise Stopped(
                "stopped while waiting for samples; steps since the last checkpoint are lost"
            )


def build_async_trainer(
    session: Session,
    args: AsyncGRPOConfig,
    tokenizer: Any,
    rows: Dataset,
    rewards: list[Reward],
    log: CompletionLog,
) -> AsyncRunTrainer:
    """The trainer of a recipe with `training.mode: async`.

    Args:
        session: Of the run.
        args: From `build_async_args`.
        tokenizer: The model's.
        rows: What is asked.
        rewards: What scores.
        log: Takes the scores.

    Raises:
        Stopped: Somebody asked to stop while the server was waited for.
        RunError: There was no server in time.
    """
    _wait_for_server(session, args)
    session.report("loading the model")
    rollouts = _plan_rollouts(session, args, tokenizer, rows, rewards)
    transfer = None
    if session.cpu:
        client = VLLMClient(args.vllm_server_base_url, args.vllm_server_timeout)
        transfer = FolderTransfer(client, session.folder.launch / "weights")
    with _without_gpu() if session.cpu else nullcontext():
        trainer = AsyncRunTrainer(
            model=model_folder_or_id(session.recipe.model),
            args=args,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=build_peft_config(session.recipe.model.lora),
            rollout_worker=rollouts,
            weight_transfer=transfer,
        )
    if session.cpu or tree_attention.is_needed():
        tree_attention.register()
    check_vocabulary(trainer.model, tokenizer)
    trainer.groups_a_step = _completions_a_step(session, args) // args.num_generations

    def note(name: str, batch: Batch, scores: Sequence[Score]) -> None:
        log.add(name, batch, scores, step=trainer.state.global_step)

    rollouts.on_scored, rollouts.read_state = note, lambda: trainer.state
    trainer.add_callback(_Bridge(trainer))
    return trainer


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Has a trainer that is built inside do without what only GPUs have."""
    # It asks CUDA for the GPU's name, to know what share of its speed is used.
    name = "get_peak_flops_per_device"
    theirs = getattr(async_grpo_trainer, name, None)
    setattr(async_grpo_trainer, name, lambda accelerator, dtype: None)
    try:
        yield
    finally:
        setattr(async_grpo_trainer, name, theirs)


def _wait_for_server(session: Session, args: AsyncGRPOConfig) -> None:
    """Waits in a way that a request to stop can end."""
    deadline = time.monotonic() + args.vllm_server_timeout
    while not answers(f"{args.vllm_server_base_url}/health"):
        session.report("waiting for vLLM")
        if time.monotonic() > deadline:
            raise RunError(
                f"no vLLM server answers at {args.vllm_server_base_url} (waited "
                f"{args.vllm_server_timeout:.0f} s). Fix: see its log in logs/, or start one with `grpo serve`"
            )
        time.sleep(_LOOK_S)


def _completions_a_step(session: Session, args: AsyncGRPOConfig) -> int:
    micro_step = args.per_device_train_batch_size * session.processes.num_processes
    return int(micro_step * args.gradient_accumulation_steps)


def _plan_rollouts(
    session: Session, args: AsyncGRPOConfig, tokenizer: Any, rows: Dataset, rewards: list[Reward]
) -> Rollouts:
    recipe, group = session.recipe, args.num_generations
    ahead = args.max_staleness * _completions_a_step(session, args)
    template = args.chat_template_kwargs

    def read(prompt: Any, prompt_ids: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Any]:
        return read_completions(tokenizer, [prompt], [prompt_ids] * len(ids), ids)

    return Rollouts(
        plan=RolloutPlan(
            rows=rows,
            group=group,
            ahead=ahead,
            workers=max(1, min(_MOST_WORKERS, ahead // group)),
            seed=recipe.seed,
        ),
        sampler=ServerSampler(args.vllm_server_base_url, recipe.generation, recipe.seed),
        rewards=rewards,
        encode=lambda prompt: encode_prompt(tokenizer, prompt, template),
        read=read,
        while_waiting=_Patience(session),
    )
