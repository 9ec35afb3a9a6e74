"""`GRPOTrainer` whose step computes what the gradient needs, and nothing else. The loss stays TRL's.

The names of TRL, transformers and accelerate that it builds on are listed in `upstream/`;
`tests/integration/test_fast.py` and `test_sampling.py` fail if one of them changes its meaning.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.utils import gather_object
from transformers import ProcessorMixin, Trainer
from trl import GRPOTrainer

from grpo_cli.fast import decoding
from grpo_cli.fast.attention import PackedModel, chunk_rows, read_plainly
from grpo_cli.fast.batches import (
    ENTROPY,
    Counts,
    Logged,
    MicroBatch,
    Rows,
    count_batch,
    count_window,
    loss_mask,
    make_filler,
    make_micro_batches,
    read_window,
)
from grpo_cli.fast.decoding import (
    find_difference,
    find_prompt_ties,
    ignores_padding,
    sharing_unsupported_reason,
    without_wrapper,
)
from grpo_cli.fast.layout import Padded
from grpo_cli.fast.metrics import merge_step
from grpo_cli.recipe.training import (
    BUDGET,
    GRAPHS,
    IMAGES,
    FastConfig,
    find_beyond,
    find_left_off,
    leave_off,
)

_OFF = FastConfig(no_signal=False, shared_prompts=False, sampling=False)


class FastTrainer(GRPOTrainer):
    """Trains as `GRPOTrainer` does until `speed_up` is called."""

    _current_train_step_time: float
    _merges_evaluation = False
    """Whether what TRL logs of the batches of an evaluation is kept for `log`, which merges it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._fast = _OFF
        self._requested = _OFF
        self._on_settled: Callable[[dict[str, str]], None] | None = None
        self._window: list[dict[str, Any]] = []
        self._learned_from: list[dict[str, Any]] = []
        self._logged: list[Logged] = []
        """What TRL logged of each batch, of the optimizer step or of the evaluation in progress."""
        self._packed: dict[int, PackedModel] = {}
        self._trims = False
        self._read_entropies: torch.Tensor | None = None
        self._padded: Padded | None = None
        super().__init__(*args, **options)

    def speed_up(self, fast: FastConfig, on_settled: Callable[[dict[str, str]], None]) -> None:
        """Switch parts on, from the first training step: only then are they verified on the loaded model.

        Args:
            on_settled: Called once, on every process, with the parts left off since they would not be exact, and
                why.
        """
        self._requested, self._on_settled = fast, on_settled

    @property
    def _repacks(self) -> bool:
        fast = self._fast
        return fast.no_signal or fast.shared_prompts or fast.max_tokens_per_micro_batch is not None

    @property
    def fast(self) -> FastConfig:
        """The parts that are on."""
        return self._fast

    @property
    def notes_entropies(self) -> bool:
        """True while rows that may not be read again are sampled for learning."""
        return self._fast.no_signal and bool(self.model.training)

    def check_loss(self, loss: torch.Tensor, inputs: Any = None) -> None:
        """Raise an error if a loss, of these inputs, is not to be learned from: a subclass may."""

    def add_fields(self, fields: dict[str, Any], input_ids: torch.Tensor) -> None:
        """Add what the model reads beside tokens and TRL has not got; nothing, unless a subclass does."""

    def _settle(self, model: Any) -> None:
        """Leave off what the loaded model does not allow; the same on all processes."""
        on_settled, self._on_settled = self._on_settled, None
        if on_settled is None:
            return
        self._fast = self._requested
        has_images = isinstance(self.processing_class, ProcessorMixin)
        reasons = find_left_off(self._fast, {**vars(self.args), IMAGES: has_images})
        if self.aux_loss_enabled:
            why = "a loss for the balance of experts is added"
            reasons |= dict.fromkeys(("no_signal", "shared_prompts", BUDGET), why)
        self._fast = leave_off(self._fast, reasons)
        for part, find_reason in (
            ("shared_prompts", self._why_not_shared),
            ("sampling", self._why_not_sampled),
            (GRAPHS, self._why_no_graphs),
        ):
            if getattr(self._fast, part) and (reason := find_reason(model)) is not None:
                reasons[part] = reason
        self._fast = leave_off(self._fast, reasons)
        self._trims = self._repacks and self._ignores_padding(model)
        on_settled({part: why for part, why in reasons.items() if getattr(self._requested, part)})

    def _why_not_shared(self, model: Any) -> str | None:
        """Return why prompts cannot be shared, by features of the model, or of the reference, and by a trial."""
        reason = None
        for each in self._and_reference(model):
            unwrapped = self.accelerator.unwrap_model(each)
            reason = reason or sharing_unsupported_reason(unwrapped, without_wrapper(unwrapped))
            if reason is None:
                packed = partial(self._pack_model(each).read, each)
                with self._comparing(each) as trial:
                    reason = find_difference(packed=packed, **trial)
        reasons = [each for each in gather_object([reason]) if each is not None]
        return reasons[0] if reasons else None

    def _and_reference(self, model: Any) -> list[Any]:
        """Return a model and the reference model, such as a teacher, if this process holds one of its own."""
        return [each for each in (model, self.ref_model) if isinstance(each, torch.nn.Module)]

    def _why_not_sampled(self, model: Any) -> str | None:
        """Return why only TRL's own way of sampling will do."""
        if shares_weights(self):
            # Reading a token takes all processes, and each would stop when its own rows have ended.
            return "each process holds a part of the weights"
        unwrapped = self.accelerator.unwrap_model(model)
        if (reason := decoding.unsupported_reason(unwrapped)) is not None:
            return reason
        configs = self.generation_config, without_wrapper(unwrapped).generation_config
        settings = decoding.read_decoding(*configs)
        if settings is None:
            beyond = find_beyond(decoding.merge_settings(*configs))
            return f"only generate() knows {', '.join(beyond) or 'these settings'}"
        if set(settings.eos_token_ids) != set(self.eos_token_ids):
            return "generation_kwargs end completions with other tokens than the tokenizer"
        return None

    def _why_no_graphs(self, model: Any) -> str | None:
        from grpo_cli.fast.graph_decoding import graph_unsupported_reason

        return graph_unsupported_reason(self.accelerator.unwrap_model(model))

    def _ignores_padding(self, model: Any) -> bool:
        """Return whether columns that are padding in every row need not be read."""
        if find_prompt_ties(self.accelerator.unwrap_model(model)) is not None:
            return False
        training, ignored = model.training, True
        model.eval()
        try:
            for each in self._and_reference(model):
                with self._comparing(each) as trial:
                    ignored = ignored and ignores_padding(**trial)
        finally:
            model.train(training)
        return all(gather_object([ignored]))

    @contextlib.contextmanager
    def _comparing(self, model: Any) -> Iterator[dict[str, Any]]:
        """TRL's pass, the model, and whether it computes in 16 bits."""
        plain = partial(super()._get_per_token_logps_and_entropies, model)
        bare = self._bare(model)
        with self.accelerator.autocast():
            coarse = bare.dtype.itemsize == 2 or torch.is_autocast_enabled(bare.device.type)
            yield {"plain": plain, "bare": bare, "coarse": coarse}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run one micro-step; if rows are repacked, all of an optimizer step is learned from in its last one.

        Returns:
            The loss, `[] float32`: if rows are repacked, 0 except in the last.
        """
        self._settle(model)
        started, window = time.perf_counter(), None
        if not self._repacks:
            loss = Trainer.training_step(self, model, inputs, num_items_in_batch)
        else:
            model.train()
            # Optimizers without a schedule evaluate with weights of their own.
            if callable(getattr(self.optimizer, "train", None)):
                self.optimizer.train()
            self._window.append(self._prepare_inputs(inputs))
            loss = torch.zeros((), device=self.accelerator.device)
            if self.accelerator.sync_gradients:
                self._learned_from, self._window = self._window, []
                loss, window = self._learn(model, self._learned_from)
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            self._log_step(window)
        # The whole step: it may be learned from in other micro-batches than TRL's.
        self.check_loss(loss, self._learned_from or self._buffered_inputs)
        return loss

    def _log_step(self, window: Counts | None) -> None:
        """Log an optimizer step, of which `window` is counted if rows were repacked."""
        logged, self._logged = self._logged, []
        merged = merge_step(
            logged,
            self.accelerator,
            loss_type=self.loss_type,
            by_token=self.importance_sampling_level == "token",
            window=window,
            leave_out=window is not None and self._fast.no_signal,
        )
        merged["step_time"], self._current_train_step_time = self._current_train_step_time, 0.0
        for name, value in merged.items():
            self._metrics["train"][name].append(value)

    def _learn(self, model: Any, window: list[dict[str, Any]]) -> tuple[torch.Tensor, Counts]:
        on_host = read_window(window)
        batches = make_micro_batches(
            window,
            on_host,
            loss_type=self.loss_type,
            leave_out=self._fast.no_signal,
            share=self._fast.shared_prompts,
            trim=self._trims,
            budget=self._fast.max_tokens_per_micro_batch,
        )
        self._fill_up(batches, window, on_host)
        losses = []
        for batch in batches:
            with self._syncing(model, last=batch is batches[-1]):
                losses.append(Trainer.training_step(self, model, batch))
        counts = count_window(on_host, leave_out=self._fast.no_signal)
        return torch.stack(losses).sum(), counts

    def _fill_up(
        self, batches: list[MicroBatch], window: list[dict[str, Any]], on_host: list[Rows]
    ) -> None:
        """Give all processes equally many micro-batches, at least one, each with equally many rows."""
        largest = [batch.size for batch in batches]
        if self.accelerator.num_processes > 1:
            sizes = torch.tensor([largest], dtype=torch.long, device=self.accelerator.device)
            sizes = self.accelerator.gather(self.accelerator.pad_across_processes(sizes, dim=1))
            largest = sizes.amax(0).tolist()
        while len(batches) < max(len(largest), 1):
            batches.append(make_filler(window, on_host))
        for batch, most in zip(batches, largest, strict=False):
            batch.fill_up(most)

    @contextlib.contextmanager
    def _syncing(self, model: Any, *, last: bool) -> Iterator[None]:
        """Let the processes exchange gradients, and DeepSpeed step, in the last micro-batch alone."""
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        alone = contextlib.nullcontext() if last or deepspeed else self.accelerator.no_sync(model)
        self.accelerator.sync_gradients = last
        try:
            with alone:
                yield
        finally:
            self.accelerator.sync_gradients = True

    @contextlib.contextmanager
    def _catching(self, mode: str) -> Iterator[dict[str, list[float]]]:
        """Keep what TRL logs of one batch out of what it logs of the step or the evaluation."""
        of_all, metrics = self._metrics[mode], defaultdict[str, list[float]](list)
        self._metrics[mode] = metrics
        try:
            yield metrics
        finally:
            self._metrics[mode] = of_all

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Add the entropy of each row to the batch, since rows that are left out are not read again."""
        self._read_entropies = None
        batch = self.make_batch(inputs)
        if self.notes_entropies and (read := self._read_entropies) is not None:
            batch[ENTROPY] = (read * loss_mask(batch)).sum(1)
        return batch

    def make_batch(self, rows: list[Any]) -> dict[str, Any]:
        """Return TRL's batch of a process's rows: completions, advantages and log-probabilities.

        It may hold the entropies of rows, `[rows] float32` under `ENTROPY`: sums over the tokens that are learned
        from, NaN if unknown.
        """
        return dict(super()._generate_and_score_completions(rows))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, MicroBatch):
            return generation_batch
        return super()._prepare_inputs(generation_batch)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return TRL's loss; of a repacked micro-batch, its part of the loss of the step.

        What TRL logs of a batch waits for the others of the step, or of the evaluation.
        """
        mode = "train" if self.model.training else "eval"
        if mode == "eval" and not self._merges_evaluation:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with self._catching(mode) as metrics:
            if isinstance(inputs, MicroBatch):
                self._padded = inputs.padded
                try:
                    loss = self._compute_loss(model, inputs) * inputs.scale
                finally:
                    self._padded = None
            else:
                loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._logged.append(count_batch(inputs, loss, metrics))
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **named: Any,
    ) -> Any:
        if not isinstance(model, torch.nn.Module):
            # A teacher on a server.
            return model.read(input_ids, attention_mask, logits_to_keep), None, None
        self.add_fields(named, input_ids)
        # The pass over a whole generation batch, before anything is learned from it.
        whole = model is self.model and batch_size is not None
        plain = partial(
            super()._get_per_token_logps_and_entropies,
            model,
            compute_entropy=compute_entropy or (whole and self._fast.no_signal),
            compute_aux_loss=compute_aux_loss,
        )
        chunk = input_ids, attention_mask, logits_to_keep
        # TRL alone places images, and a router balances all tokens, padding too.
        special = compute_aux_loss or any(value is not None for value in named.values())
        if not self._repacks or special:
            return plain(*chunk, batch_size=batch_size, **named)
        packed = self._pack_model(model) if self._fast.shared_prompts else None
        log_probs = input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32)
        entropies = log_probs.clone()
        padded = self._padded if batch_size is None else None
        for rows in chunk_rows(*chunk, batch_size):
            part = input_ids[rows], attention_mask[rows], logits_to_keep
            with self.accelerator.autocast():
                values = packed.read(model, *part, padded) if packed else None
            if values is None:
                values = read_plainly(plain, *part, padded, trim=self._trims)
            log_probs = log_probs.index_copy(0, rows, values[0])
            if values[1] is not None:
                entropies = entropies.index_copy(0, rows, values[1].detach())
        if whole:
            self._read_entropies = entropies
        return log_probs, entropies if compute_entropy else None, None

    def _pack_model(self, model: Any) -> PackedModel:
        bare = self._bare(model)
        if id(bare) not in self._packed:
            self._packed[id(bare)] = PackedModel(bare, self._plain_temperature())
        return self._packed[id(bare)]

    def _plain_temperature(self) -> float | None:
        """Divisor of logits if all may be computed at once; None if only TRL's head may."""
        whole = self.accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
        own = self.accelerator.device.type == "cpu" and not self.args.cast_lm_head_to_fp32
        return float(self.temperature) if whole and own else None

    def _bare(self, model: Any) -> Any:
        return without_wrapper(self.accelerator.unwrap_model(model))


def shares_weights(trainer: Trainer) -> bool:
    """Return whether the weights are sharded: each process holds a part of them."""
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.DEEPSPEED:
        return bool(state.deepspeed_plugin.zero_stage == 3)
    return bool(state.distributed_type == DistributedType.FSDP)
