"""`GRPOTrainer` whose step computes what the gradient needs, and nothing else.

Owns the step: which rows of an optimizer step are learned from, in which micro-batches, and what TRL's metrics
would have been. The loss stays TRL's; `docs/performance.md` tells where a metric means something else.

Beside `trainer.py`, which builds on it, the file that touches private names of the step, as read in trl 1.16.0
and transformers 5.17: `_compute_loss`, `_get_per_token_logps_and_entropies`, `_generate_and_score_completions`,
`_prepare_inputs`, `_metrics`, `_current_train_step_time`, and accelerate's `GradientState._set_sync_gradients`.
`tests/integration/test_fast.py` fails where one of them changes its meaning. Where TRL no longer calls
`_generate_single_turn`, it samples by itself, and `tests/integration/test_sampling.py` fails.
"""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.utils import gather_object
from torch.nn.functional import pad
from transformers import Trainer
from trl import GRPOTrainer

from grpo_cli.fast import sampler_choice as sampling
from grpo_cli.fast.batches import MicroBatch, loss_mask, make_filler, make_micro_batches
from grpo_cli.fast.log_probs import PackedModel, chunk_rows
from grpo_cli.fast.metrics import ENTROPY, merge
from grpo_cli.fast.packing import Cut
from grpo_cli.fast.verification import (
    compare,
    ignores_padding,
    unsupported_reason,
    widest_cut,
)
from grpo_cli.models.adapters import find_prompt_ties, without_wrapper
from grpo_cli.recipe.fast import BUDGET, FastConfig, find_large_masks, find_left_off, leave_off

_OFF = FastConfig(no_signal=False, shared_prompts=False, sampling=False)


class FastTrainer(GRPOTrainer):
    """Trains as `GRPOTrainer` does until `speed_up` is called."""

    _current_train_step_time: float

    def __init__(self, *args: Any, **given: Any) -> None:
        # Nothing before the first step, where it is tried on the model.
        self._fast = _OFF
        self._wanted = _OFF
        self._tell: Callable[[dict[str, str]], None] | None = None
        self._window: list[dict[str, Any]] = []
        self._learned_from: list[dict[str, Any]] = []
        self._readers: dict[int, PackedModel] = {}
        self._cut = Cut(front=False, widest=0)
        self._read_entropies: torch.Tensor | None = None
        self._sampled_entropies: list[list[float]] = []
        super().__init__(*args, **given)

    def speed_up(self, fast: FastConfig, tell: Callable[[dict[str, str]], None]) -> None:
        """Switches parts on, from the first step that is trained.

        Args:
            fast: The parts wanted.
            tell: Told once, on every process, which of them are left off since they would not be exact, and why.
        """
        self._wanted, self._tell = fast, tell

    @property
    def _repacks(self) -> bool:
        fast = self._fast
        return fast.no_signal or fast.shared_prompts or fast.max_tokens_per_micro_batch is not None

    @property
    def _notes_entropies(self) -> bool:
        """Whether rows that nobody reads again are sampled for learning."""
        return self._fast.no_signal and bool(self.model.training)

    def _settle(self, model: Any) -> None:
        """Leaves off what the loaded model does not allow; tried where it is, shared among processes or not."""
        tell, self._tell = self._tell, None
        if tell is None:
            return
        self._fast = self._wanted
        found = find_left_off(self._fast, vars(self.args))
        if self.aux_loss_enabled:
            why = "a loss for the balance of experts is added"
            found |= dict.fromkeys(("no_signal", "shared_prompts", BUDGET), why)
        self._fast = leave_off(self._fast, found)
        if self._fast.shared_prompts and (obstacle := self._find_obstacle(model)):
            found["shared_prompts"] = obstacle
        if self._fast.sampling and (obstacle := sampling.unsupported_reason(self)):
            found["sampling"] = obstacle
        self._fast = leave_off(self._fast, found)
        if self._repacks:
            self._cut = Cut(self._ignores_padding(model), widest_cut(self._bare(model)))
        tell({part: why for part, why in found.items() if getattr(self._wanted, part)})

    def _find_obstacle(self, model: Any) -> str | None:
        """Why prompts cannot be shared; the same on all processes."""
        unwrapped = self.accelerator.unwrap_model(model)
        if self.accelerator.device.type == "cuda":
            args = self.args
            size = args.per_device_train_batch_size, args.max_completion_length
            if large := find_large_masks(*size):
                return large
        obstacle = unsupported_reason(unwrapped, self._bare(model)) or self._try_out(model)
        found = [one for one in gather_object([obstacle]) if one is not None]
        return found[0] if found else None

    def _try_out(self, model: Any) -> str | None:
        """How the model reads shared prompts in another way than TRL's; None where it does not."""
        try:
            reader = self._reader(model)
        except NotImplementedError as error:
            return str(error)
        with self._reading(model) as setting:
            return compare(packed=partial(reader.read, model), **setting)

    @contextlib.contextmanager
    def _reading(self, model: Any) -> Iterator[dict[str, Any]]:
        """TRL's way of reading, and what a trial of it needs to know."""
        plain = super()._get_per_token_logps_and_entropies
        bare = self._bare(model)
        with self.accelerator.autocast():
            coarse = bare.dtype.itemsize == 2 or torch.is_autocast_enabled(bare.device.type)
            yield {"plain": partial(plain, model), "bare": bare, "coarse": coarse}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One micro-step; all of an optimizer step is learned from in its last one.

        Returns:
            The loss, `[] float32`: 0 but in the last.
        """
        self._settle(model)
        if not self._repacks:
            return super().training_step(model, inputs, num_items_in_batch)
        started = time.perf_counter()
        model.train()
        # Optimizers without a schedule have weights of their own to evaluate with.
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._window.append(self._prepare_inputs(inputs))
        loss = torch.zeros((), device=self.accelerator.device)
        if self.accelerator.sync_gradients:
            self._learned_from, self._window = self._window, []
            loss = self._learn(model, self._learned_from)
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _learn(self, model: Any, window: list[dict[str, Any]]) -> torch.Tensor:
        """Forward and backward passes of one optimizer step."""
        batches = make_micro_batches(
            window,
            loss_type=self.loss_type,
            leave_out=self._fast.no_signal,
            share=self._fast.shared_prompts,
            budget=self._fast.max_tokens_per_micro_batch,
            cut=self._cut,
        )
        self._fill_up(batches, window)
        losses, found = [], []
        for number, batch in enumerate(batches):
            with self._syncing(model, last=number == len(batches) - 1), self._catching() as logged:
                losses.append(Trainer.training_step(self, model, batch))
            found.append((batch, logged))
        merged = merge(
            found,
            window,
            self.accelerator,
            leave_out=self._fast.no_signal,
            by_token=self.importance_sampling_level == "token",
        )
        for name, value in merged.items():
            self._metrics["train"][name].append(value)
        return torch.stack(losses).sum()

    def _fill_up(self, batches: list[MicroBatch], window: list[dict[str, Any]]) -> None:
        """Makes the processes' micro-batches as many, at least one, and each as many rows in all of them."""
        found = [[batch.size for batch in batches]]
        sizes = torch.tensor(found, dtype=torch.long, device=self.accelerator.device)
        sizes = self.accelerator.gather(self.accelerator.pad_across_processes(sizes, dim=1))
        while len(batches) < max(sizes.shape[1], 1):
            batches.append(make_filler(window))
        for batch, most in zip(batches, sizes.amax(0).tolist(), strict=False):
            batch.fill_up(most)

    @contextlib.contextmanager
    def _syncing(self, model: Any, *, last: bool) -> Iterator[None]:
        """Lets the processes exchange gradients, and DeepSpeed step, in the last micro-batch alone."""
        state = self.accelerator.gradient_state
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        alone = contextlib.nullcontext() if last or deepspeed else self.accelerator.no_sync(model)
        state._set_sync_gradients(last)
        try:
            with alone:
                yield
        finally:
            state._set_sync_gradients(True)
            # Gradients are there: layers are not computed again.
            for packed in self._readers.values():
                packed.rest()

    @contextlib.contextmanager
    def _catching(self) -> Iterator[dict[str, list[float]]]:
        """What TRL logs of one micro-batch, kept out of what it logs of the step."""
        whole, found = self._metrics["train"], defaultdict[str, list[float]](list)
        self._metrics["train"] = found
        try:
            yield found
        finally:
            self._metrics["train"] = whole

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *rest: Any, **given: Any
    ) -> Any:
        seen = images or multimodal_fields
        sampled = None
        if self._fast.sampling and not seen:
            sampled = sampling.sample(self, prompt_ids, entropies=self._notes_entropies)
        if sampled is None:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, *rest, **given
            )
        if self._notes_entropies:
            self._sampled_entropies += sampled.entropies
        return sampled.completion_ids, None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's, and the entropy of each row, since rows that are left out are not read again."""
        self._read_entropies, self._sampled_entropies = None, []
        found = super()._generate_and_score_completions(inputs)
        if self._notes_entropies:
            found[ENTROPY] = self._row_entropies(found)
        return found

    def _row_entropies(self, batch: dict[str, Any]) -> torch.Tensor:
        """`[rows] float32`: sums over tokens; NaN where nothing has computed them."""
        lengths = loss_mask(batch).sum(1)
        if self._read_entropies is not None:
            return (self._read_entropies * loss_mask(batch)).sum(1)
        if len(self._sampled_entropies) == len(lengths):
            sums = [math.fsum(entropies) for entropies in self._sampled_entropies]
            return torch.tensor(sums, device=lengths.device) * (lengths > 0)
        return torch.full_like(lengths, math.nan, dtype=torch.float32)

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
        """TRL's loss; of a micro-batch made anew, its part of the loss of the step."""
        if isinstance(inputs, MicroBatch):
            return self._compute_loss(model, inputs) * inputs.scale
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

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
        # The pass over a whole generation batch, before anything is learned from it.
        whole = model is self.model and batch_size is not None
        plainly = partial(
            super()._get_per_token_logps_and_entropies,
            model,
            compute_entropy=compute_entropy or (whole and self._fast.no_signal),
            compute_aux_loss=compute_aux_loss,
        )
        # Pictures are TRL's to place, and what a router balances are all tokens, padding too.
        if (
            not self._repacks
            or compute_aux_loss
            or any(value is not None for value in named.values())
        ):
            return plainly(
                input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **named
            )
        reader = self._reader(model) if self._fast.shared_prompts else None
        log_probs = input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32)
        entropies = log_probs.clone()
        for rows in chunk_rows(input_ids, attention_mask, logits_to_keep, batch_size):
            chunk = input_ids[rows], attention_mask[rows], logits_to_keep
            with self.accelerator.autocast():
                found = reader.read(model, *chunk) if reader else None
            if found is None:
                found = _read_plainly(plainly, *chunk, cut=self._cut)
            log_probs = log_probs.index_copy(0, rows, found[0])
            if found[1] is not None:
                entropies = entropies.index_copy(0, rows, found[1].detach())
        if whole:
            self._read_entropies = entropies
        return log_probs, entropies if compute_entropy else None, None

    def _reader(self, model: Any) -> PackedModel:
        """The model as one that reads rows without padding."""
        bare = self._bare(model)
        if id(bare) not in self._readers:
            self._readers[id(bare)] = PackedModel(bare, self._plain_temperature())
        return self._readers[id(bare)]

    def _plain_temperature(self) -> float | None:
        """What logits are divided by where all may be computed at once; None where only TRL's head may."""
        whole = self.accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
        own = self.accelerator.device.type == "cpu" and not self.args.cast_lm_head_to_fp32
        return float(self.temperature) if whole and own else None

    def _ignores_padding(self, model: Any) -> bool:
        """Whether padding in front of all prompts may go; the same on all processes."""
        if find_prompt_ties(self.accelerator.unwrap_model(model)) is not None:
            return False
        training = model.training
        model.eval()
        try:
            with self._reading(model) as setting:
                return all(gather_object([ignores_padding(**setting)]))
        finally:
            model.train(training)

    def _bare(self, model: Any) -> Any:
        """The model without what wraps it: processes, adapters."""
        return without_wrapper(self.accelerator.unwrap_model(model))


def _read_plainly(
    compute: Callable[..., Any],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    width: int,
    *,
    cut: Cut,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """TRL's own pass, over the rows that have a completion, and the columns that hold a token of one of them."""
    edge, shape = input_ids.shape[1] - width, (len(input_ids), width)
    answered = attention_mask[:, edge:].any(1).nonzero().flatten()
    if not len(answered):
        # Processes that share the model read together.
        answered = torch.zeros(1, dtype=torch.long, device=input_ids.device)
    ids, mask = input_ids[answered], attention_mask[answered]
    present = mask.any(0).nonzero().flatten()
    first = min(int(present[0]), edge - 1) if cut.front else 0
    behind = max(int(present[-1]) + 1, edge + 1) if cut.behind(edge + width) else edge + width
    log_probs, entropies, _ = compute(ids[:, first:behind], mask[:, first:behind], behind - edge)

    def put_back(values: torch.Tensor) -> torch.Tensor:
        wide = pad(values, (0, edge + width - behind))
        return wide.new_zeros(shape).index_copy(0, answered, wide)

    return put_back(log_probs), None if entropies is None else put_back(entropies)
