"""`AsyncGRPOTrainer` with our rewards, checkpoints and sampling; its metrics under the names of the other mode."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import requests
import torch
from datasets import Dataset
from transformers import AttentionInterface, TrainerCallback, TrainerState
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.experimental.async_grpo.vllm_client import VLLMClient

from grpo_cli.errors import RunError
from grpo_cli.fast.attention import attend_segments
from grpo_cli.fast.decoding import without_wrapper
from grpo_cli.fast.layout import Segments
from grpo_cli.fast.tokens import CompletionReader, encode_prompt
from grpo_cli.launch.server_process import answers
from grpo_cli.models.loading import build_peft_config, check_vocabulary
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.rewards.scoring import Reward
from grpo_cli.training.asynchronous.rollouts import SERVER_TIMEOUT_S, Rollouts, ServerSampler
from grpo_cli.training.checkpoints import (
    AtomicCheckpoints,
    accept_numbered_cpus,
    load_saved,
    save_reward_states,
)
from grpo_cli.training.rollout.samplers import read_completions
from grpo_cli.training.rollout.step import CompletionLog
from grpo_cli.training.session import Session, Stopped
from grpo_cli.training.vllm_weights import (
    SyncWatch,
    base_kept,
    merge_weights,
    reload_from_folder,
)
from grpo_cli.upstream import replaced
from grpo_cli.upstream.trl import (
    ASYNC_LEARNING,
    ASYNC_STEP,
    ASYNC_SYNC,
    ASYNC_TOKENS,
    ASYNC_WAIT,
    NUM_TOKENS,
    STEP_TIME,
)
from grpo_cli.upstream.vllm import COLLECTIVE_RPC, FINISH_UPDATE

_POLL_S = 1.0
_STOP_TIMEOUT_S = 120.0
"""How long a request to stop waits for the samples of the current step."""
_HOPPER = 9
"""Major CUDA capability of the only GPUs with FlashAttention 3, and of AMD's, which have a kernel of their own."""
_TIMES = {
    # Waiting is all of sampling that costs time.
    ASYNC_WAIT: "time/sampling",
    ASYNC_SYNC: "time/sync",
    ASYNC_LEARNING: "time/learning",
    ASYNC_STEP: STEP_TIME,
}


class AsyncRunTrainer(AtomicCheckpoints, AsyncGRPOTrainer):
    """The trainer of an asynchronous run; resumes after the prompts that were learned from."""

    watch: SyncWatch
    _learned = 0.0
    """Completions that were learned from: `token_budget` decides how many a step takes."""

    def __init__(
        self, *args: Any, groups_per_step: int, forced: bool, watch: SyncWatch, **options: Any
    ) -> None:
        """Make a trainer; `args` and `options` are those of `AsyncGRPOTrainer`.

        Args:
            forced: Whether to resume even if the checkpoint lacks a reward's state.
            watch: Of the requests that send weights.
        """
        self.groups_per_step, self.forced, self.watch = groups_per_step, forced, watch
        super().__init__(*args, **options)
        if self.rollout_worker is not None:
            self.rollout_worker.follow(lambda: self.state)
        self._watch_sending()

    def resume_from(self, checkpoint: Path, steps_per_epoch: int) -> None:
        """Train to the end from the checkpoint whose state was loaded; prompts continue across epochs."""
        accept_numbered_cpus()
        self._load_more(checkpoint)
        self.train(resume_from_checkpoint=str(checkpoint))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run one micro-step; see `check_loss` for what it raises."""
        before = self._step_samples
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._learned += self._step_samples - before
        self.check_loss(loss)
        return loss

    def _save_more(self, staged: Path) -> None:
        if self.rollout_worker is None:
            return
        staged.mkdir(parents=True, exist_ok=True)
        with self.rollout_worker.scoring:
            states = save_reward_states(self.rollout_worker.rewards)
        own = {"rewards": states, "learned": round(self._learned)}
        torch.save(own, self._own_file(staged, "process"))

    def _load_more(self, checkpoint: Path) -> None:
        if self.rollout_worker is None:
            return
        # Checkpoints of earlier versions have no such file.
        own = load_saved(self._own_file(checkpoint, "process")) or {}
        group = self.args.num_generations
        self._learned = own.get("learned", self.state.global_step * self.groups_per_step * group)
        self.rollout_worker.first = int(self._learned) // group
        self._restore_rewards(self.rollout_worker.rewards, own.get("rewards", {}), checkpoint)

    def _init_lora_sync(self, model: Any) -> bool:
        # Samples are asked of the base's name: adapters are merged, whatever the server could load.
        return False

    def _watch_sending(self) -> None:
        """Watch the requests that send weights: the main process makes them, and waits for others in between."""
        watch = self.watch
        if self.weight_transfer is None:
            return
        target = f"the vLLM server at {self.args.vllm_server_base_url}"
        fix = "see the server's log, restart it, and resume the run with --resume"
        active = watch.active(target, fix)
        for name in ("pause", "send_weights", "resume"):
            setattr(self.weight_transfer, name, active(getattr(self.weight_transfer, name)))
        client = self.weight_transfer.vllm
        for path in ("/pause", "/start_weight_update", "/update_weights", FINISH_UPDATE, "/resume"):
            name = path.removeprefix("/")
            setattr(client, name, partial(_request, watch, path, getattr(client, name)))

    def _sync_weight_merged(self, t0: float) -> Any:
        with base_kept(self.accelerator.unwrap_model(self.model)):
            return super()._sync_weight_merged(t0)

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.accelerator.unwrap_model(self.model)
        yield from self.watch.count(merge_weights(model, super()._streaming_iter()))


def _request(
    watch: SyncWatch, path: str, send: Callable[..., None], *args: Any, **options: Any
) -> None:
    watch.note(f"{path} was asked", watch.sent_bytes if path == FINISH_UPDATE else 0)
    send(*args, **options)
    watch.note(f"{path} was answered")


@dataclass
class FolderTransfer(async_grpo_trainer.WeightTransferProtocol):
    """Passes weights to a server on a CPU of this machine."""

    vllm: VLLMClient
    """As TRL's own transfer names it."""
    folder: Path
    """Holds the weights until they are read."""
    watch: SyncWatch

    def pause(self) -> None:
        """Let the server hold its requests."""
        self.vllm.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the weights, and let the server read them.

        Raises:
            RunError: It refuses.
        """
        url = f"{self.vllm.server_url}{COLLECTIVE_RPC}"

        def post(body: Any, num_bytes: int) -> requests.Response:
            self.watch.note(f"{COLLECTIVE_RPC} was asked", num_bytes)
            return requests.post(url, json=body, timeout=SERVER_TIMEOUT_S)

        response = reload_from_folder(iterator, self.folder, self.watch, post)
        if not response.ok:
            raise RunError(
                f"the vLLM server refused the weights: {response.status_code} {response.text[:300]}",
                "see its log in logs/",
            )

    def resume(self) -> None:
        """Let the server go on with the new weights."""
        self.vllm.resume()


class _StepRecords(TrainerCallback):
    """Uses tree attention during training, and adds the metrics that the other mode logs."""

    def __init__(self, trainer: AsyncRunTrainer) -> None:
        self._model = without_wrapper(trainer.accelerator.unwrap_model(trainer.model))
        self._tokens = 0.0
        self._step = 0
        self._model.set_attn_implementation("sdpa")

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Packed rows follow; a resumed run has counted tokens before."""
        self._model.set_attn_implementation(TREE_ATTENTION)
        self._tokens, self._step = float(state.num_input_tokens_seen), state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Sampling follows."""
        self._model.set_attn_implementation("sdpa")

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any
    ) -> None:
        """Add the tokens so far and the time of each phase, before other callbacks read them."""
        if not logs or "loss" not in logs:
            return
        self._tokens += (logs.get(ASYNC_TOKENS) or 0.0) * (state.global_step - self._step)
        self._step = state.global_step
        logs[NUM_TOKENS] = state.num_input_tokens_seen = int(self._tokens)
        logs.update({name: logs[source] for source, name in _TIMES.items() if source in logs})


def build_async_trainer(
    session: Session,
    args: AsyncGRPOConfig,
    reader: CompletionReader,
    rows: Dataset,
    rewards: list[Reward],
    log: CompletionLog,
) -> AsyncRunTrainer:
    """Return the trainer of a recipe with `training.mode: async`; it loads the model itself.

    Raises:
        Stopped: A stop was requested while waiting for the server.
        RunError: There was no server in time.
    """
    _wait_for_server(session, args)
    session.report("loading the model")
    rollouts, tokenizer = (
        _plan_rollouts(session, args, reader, rows, rewards, log),
        reader.tokenizer,
    )
    transfer, watch, changes = None, SyncWatch(session.end_hung), dict[str, Any]()
    if session.cpu:
        client = VLLMClient(args.vllm_server_base_url, args.vllm_server_timeout)
        transfer = FolderTransfer(client, session.folder.sent_weights, watch)
        # It asks CUDA for the GPU's name.
        changes = {"get_peak_flops_per_device": lambda accelerator, dtype: None}
    with replaced(async_grpo_trainer, **changes):
        trainer = AsyncRunTrainer(
            model=model_folder_or_id(session.recipe.model),
            args=args,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=build_peft_config(session.recipe.model.lora),
            rollout_worker=rollouts,
            weight_transfer=transfer,
            groups_per_step=_completions_per_step(session, args) // args.num_generations,
            forced=bool(session.resumption.get("forced")),
            watch=watch,
        )
    if session.cpu or _lacks_kernel():
        register_attention()
    check_vocabulary(trainer.model, tokenizer)
    # A state that cannot be saved is reported before the first step.
    save_reward_states(rewards)
    trainer.add_callback(_StepRecords(trainer))
    return trainer


def _wait_for_server(session: Session, args: AsyncGRPOConfig) -> None:
    deadline = time.monotonic() + args.vllm_server_timeout
    while not answers(f"{args.vllm_server_base_url}/health"):
        session.report("waiting for vLLM")
        if time.monotonic() > deadline:
            raise RunError(
                f"no vLLM server answers at {args.vllm_server_base_url} (waited "
                f"{args.vllm_server_timeout:.0f} s)",
                "see its log in logs/, or start one with `grpo serve`",
            )
        time.sleep(_POLL_S)


def _completions_per_step(session: Session, args: AsyncGRPOConfig) -> int:
    processes = session.processes.num_processes
    return args.per_device_train_batch_size * processes * args.gradient_accumulation_steps


def _plan_rollouts(
    session: Session,
    args: AsyncGRPOConfig,
    reader: CompletionReader,
    rows: Dataset,
    rewards: list[Reward],
    log: CompletionLog,
) -> Rollouts:
    generation, seed = session.recipe.generation, session.recipe.seed
    requested_at: float | None = None

    def read(prompt: Any, prompt_ids: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Any]:
        return read_completions(reader, [prompt], [prompt_ids] * len(ids), ids)

    def stop_in_time() -> None:
        nonlocal requested_at
        session.heartbeat.beat()
        if not session.stop.seen_here():
            return
        requested_at = requested_at or time.monotonic()
        if time.monotonic() - requested_at > _STOP_TIMEOUT_S:
            raise Stopped(
                "stopped while waiting for samples; steps since the last checkpoint are lost"
            )

    return Rollouts(
        rows=rows,
        group=args.num_generations,
        ahead=args.max_staleness * _completions_per_step(session, args),
        seed=seed,
        sampler=ServerSampler(args.vllm_server_base_url, generation, seed),
        rewards=rewards,
        encode=lambda prompt: encode_prompt(reader.tokenizer, prompt, args.chat_template_kwargs),
        read=read,
        while_waiting=stop_in_time,
        log=log,
    )


def _lacks_kernel() -> bool:
    """Return whether TRL's kernel (FlashAttention 3, fetched by `kernels`) does not run here."""
    if not torch.cuda.is_available() or importlib.util.find_spec("kernels") is None:
        return True
    return torch.cuda.get_device_capability()[0] != _HOPPER


def register_attention() -> None:
    """Compute TRL's tree attention by `attend` from now on."""
    AttentionInterface.register(TREE_ATTENTION, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    tree_max_seqlen_q: int,
    tree_max_seqlen_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention of each segment to itself and its path, [1, tokens, heads, width].

    Args:
        query: [1, heads, tokens, width]; the segments lie end to end.
        key: [1, key heads, tokens, width].
        sliding_window: How many tokens back are visible; None is all.
        softcap: Largest score of a model that limits them.

    Raises:
        RunError: The model limits its scores, as Gemma 2 does.

    Source: trl 1.16.0, `packing.tree_attention`, whose kernel aligns a causal mask to the path's end.
    """
    if softcap:
        raise RunError(
            f"this model limits its attention scores to {softcap:g}, for which asynchronous training needs the "
            "package `kernels` and a Hopper GPU",
            "set `training.mode: sync`",
        )
    tree = tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k
    segments = _read_tree(*tree, tree_max_seqlen_q, tree_max_seqlen_k, query.shape[2])
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = attend_segments(query, key, value, segments, scale=scaling, window=sliding_window)
    return output[None], None


@lru_cache(maxsize=1)
def _read_tree(*tree: Any) -> Segments:
    """Return the segments of a forward pass; all its layers name the same tensors."""
    return Segments(*tree)
