"""The micro-batches of an optimizer step, repacked from the rows that are learned from; and what they count."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grpo_cli.fast.layout import Padded, group_rows, upload

Rows = Mapping[str, Any]
"""What TRL hands to its loss: tensors with one entry a row, and numbers of the whole generation batch.

On the host: what is needed of it there, as arrays of float64."""
ENTROPY = "row_entropy"
"""Key of a batch: the sum over a row's tokens of the entropy they were sampled with; NaN if unknown."""
MEAN_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that are a mean over the rows of a micro-batch. `bnpo` is one over its tokens, all others are sums.

Source: `GRPOTrainer._compute_loss`, trl 1.16.0."""
_COPIED = 8
"""Prompt tokens that weigh as much as one computed token, for each completion that copies their keys and values.

In 16 bits a layer keeps 34 bytes × hidden size of a token (Korthikanti et al., 2022, section 4.1), of which keys
and values for all heads are 4."""
_PADDED = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
"""What the model reads of a row, side by side: token ids, and where there are any."""
_NEEDED = {*_PADDED[0], *_PADDED[1], "tool_mask", "advantages", ENTROPY}
"""What is needed on the host to pack rows, to lay them out and to count them."""


class MicroBatch(dict[str, Any]):
    """Rows of one forward and backward pass, as TRL's loss takes them."""

    def __init__(
        self, rows: Rows, on_host: Rows, tokens: float, *, loss_type: str = "", share: float = 1.0
    ) -> None:
        """Make a micro-batch.

        Args:
            rows: On the device.
            on_host: The same rows, by `read_window`.
            tokens: Number of tokens that the loss counts.
            loss_type: TRL's name of the loss.
            share: 1 / rows of TRL's micro-batches, for losses that are a mean over rows.
        """
        super().__init__(rows)
        self.tokens, self._loss_type, self._share = tokens, loss_type, share
        ids, mask = (
            np.concatenate([on_host[name] for name in names], 1).astype(np.int64)
            for names in _PADDED
        )
        self.padded: Padded = ids, mask
        """Its token ids and mask on the host, so that laying them out does not wait for the device."""

    @property
    def size(self) -> int:
        """Number of rows, empty ones too."""
        return len(self["advantages"])

    @property
    def scale(self) -> float:
        """Factor that makes the loss of this micro-batch its part of the loss of the step."""
        if self._loss_type == "bnpo":
            return max(self.tokens, 1.0)
        return self.size * self._share if self._loss_type in MEAN_OF_ROWS else 1.0

    def fill_up(self, size: int) -> None:
        """Append rows without tokens: TRL gathers one number a row, so processes need equally many rows."""
        if size <= self.size:
            return
        first = self.size
        rows = [*range(first), *[0] * (size - first)]
        ids, mask = (each[rows] for each in self.padded)
        mask[first:, self["prompt_ids"].shape[1] :] = 0
        self.padded = ids, mask
        self.update(_select(self, *upload([rows], self["advantages"].device)))
        # Old log-probabilities of 0 make the ratio 1, so that it does not overflow.
        for key in ("completion_mask", "advantages", "old_per_token_logps", "ref_per_token_logps"):
            if key in self:
                self[key] = self[key].clone()
                self[key][first:] = 0


def read_window(window: Sequence[Rows]) -> list[Rows]:
    """Return what is needed of the micro-batches on the host, read from the device in one copy."""
    needed = [
        {
            name: value
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and (name in _NEEDED or not value.dim())
        }
        for batch in window
    ]
    values = [value for batch in needed for value in batch.values()]
    # float64 holds token ids exactly too.
    together = torch.cat([value.detach().double().flatten() for value in values]).cpu()
    pieces = iter(together.split([value.numel() for value in values]))
    return [
        {name: next(pieces).view(value.shape).numpy() for name, value in batch.items()}
        for batch in needed
    ]


def loss_mask(rows: Rows) -> Any:
    """Return `[rows, tokens]`: 1 at the tokens that the loss counts."""
    mask = rows["completion_mask"]
    return mask * rows["tool_mask"] if "tool_mask" in rows else mask


def has_signal(rows: Rows) -> Any:
    """Return `[rows] bool`: whether a row adds to the gradient, if nothing but advantages does."""
    return (rows["advantages"] != 0) & loss_mask(rows).any(1)


def can_repack(window: Sequence[Rows]) -> bool:
    """Return whether every entry has one value a row, or one of the whole generation batch."""
    return all(
        isinstance(value, torch.Tensor)
        and (value.dim() == 0 or len(value) == len(batch["advantages"]))
        for batch in window
        for value in batch.values()
    )


def make_micro_batches(
    window: Sequence[Rows],
    on_host: Sequence[Rows],
    *,
    loss_type: str,
    leave_out: bool,
    share: bool,
    trim: bool,
    budget: int | None,
) -> list[MicroBatch]:
    """Make the micro-batches of one optimizer step, as few as the budget allows.

    Args:
        share: Equal prompts are computed once, and no padding is.
        trim: Otherwise: columns that are padding in every row are not read.
        budget: Most tokens of a micro-batch; None is as many as TRL's have with their padding.
    """
    if not can_repack(window):
        return [
            MicroBatch(batch, read, loss_mask(read).sum())
            for batch, read in zip(window, on_host, strict=True)
        ]
    made = []
    for numbers in _families(window, on_host):
        read = _join([on_host[number] for number in numbers], np.concatenate)
        kept = has_signal(read) if leave_out else loss_mask(read).any(1)
        places = np.flatnonzero(kept)
        if not len(places):
            continue
        first = window[numbers[0]]
        rows = _join([window[number] for number in numbers], torch.cat)
        if loss_type == "bnpo":
            _weigh_by_tokens(rows, [on_host[number] for number in numbers])
        most = budget or first["prompt_ids"].numel() + first["completion_ids"].numel()
        part = 1 / len(first["advantages"])
        packs = _pack(read, places, most, share=share, trim=trim)
        for chosen, index in zip(packs, upload(packs, first["advantages"].device), strict=True):
            own = _choose(read, chosen)
            tokens = float(loss_mask(own).sum())
            made.append(
                MicroBatch(_select(rows, index), own, tokens, loss_type=loss_type, share=part)
            )
    return made


def make_filler(window: Sequence[Rows], on_host: Sequence[Rows]) -> MicroBatch:
    """Return a micro-batch that adds nothing, for a process that has fewer than others."""
    batch, chosen, read = window[0], dict(window[0]), on_host[0]
    if can_repack(window):
        counted = loss_mask(read)
        tokens = counted.sum(1) + read["prompt_mask"].sum(1)
        shortest = int(np.where(counted.any(1), tokens, np.inf).argmin())
        read = _choose(read, [shortest])
        chosen = _select(batch, *upload([[shortest]], batch["advantages"].device))
    chosen["advantages"] = torch.zeros_like(chosen["advantages"])
    # Read by the model, and counted by nothing.
    chosen["tool_mask"] = torch.zeros_like(chosen["completion_mask"])
    return MicroBatch(chosen, read, 0.0)


def _families(window: Sequence[Rows], on_host: Sequence[Rows]) -> list[list[int]]:
    """Micro-batches that can be joined: equally wide, of generation batches with equally many tokens."""
    families: dict[tuple[Any, ...], list[int]] = {}
    for number, (batch, read) in enumerate(zip(window, on_host, strict=True)):
        widths = tuple(
            (key, value.shape[1:] if value.dim() else float(read[key]))
            for key, value in batch.items()
        )
        families.setdefault(widths, []).append(number)
    return list(families.values())


def _join(family: Sequence[Rows], join: Callable[[list[Any]], Any]) -> dict[str, Any]:
    return {
        key: join([batch[key] for batch in family]) if value.ndim else value
        for key, value in family[0].items()
    }


def _weigh_by_tokens(rows: dict[str, Any], family: Sequence[Rows]) -> None:
    """Give each row the weight of `bnpo`, a mean over the tokens of the micro-batch that it came in.

    The loss of a row is proportional to its advantage, which can carry that weight.
    """
    weights = [
        np.full(len(batch["advantages"]), 1 / max(loss_mask(batch).sum(), 1.0)) for batch in family
    ]
    advantages = rows["advantages"]
    rows["advantages"] = advantages * torch.from_numpy(np.concatenate(weights)).to(advantages)


def _choose(on_host: Rows, places: Sequence[int]) -> dict[str, Any]:
    return {key: value[places] if value.ndim else value for key, value in on_host.items()}


def _select(rows: Rows, places: torch.Tensor) -> dict[str, Any]:
    return {
        key: value.index_select(0, places) if value.dim() else value for key, value in rows.items()
    }


def _pack(
    rows: Rows, places: np.ndarray, budget: int, *, share: bool, trim: bool
) -> list[list[int]]:
    prompt_mask, completion_mask = rows["prompt_mask"][places], rows["completion_mask"][places]
    prompts, lengths = (mask.sum(1).astype(int).tolist() for mask in (prompt_mask, completion_mask))
    if share:
        groups = group_rows(rows["prompt_ids"][places], prompts)
        packs = pack_groups(groups, prompts, lengths, budget)
    elif trim:
        packs = pack_padded(prompts, lengths, budget)
    else:
        count = len(places)
        widths = prompt_mask.shape[1], completion_mask.shape[1]
        packs = pack_padded([widths[0]] * count, [widths[1]] * count, budget)
    return [places[pack.rows].tolist() for pack in packs]


@dataclass
class Pack:
    """Rows of one micro-batch."""

    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    """Their cost, in computed tokens."""


def pack_groups(
    groups: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    budget: int,
) -> list[Pack]:
    """Pack rows that share prompts, so that a group stays together and pays for its prompt once.

    First fit over the pieces of groups in order of their longest completion, the longest first. A row that alone
    exceeds the budget gets a micro-batch of its own.
    """
    packs: list[Pack] = []
    pieces = [piece for rows in groups for piece in _split(rows, prompt_lengths, lengths, budget)]
    for piece in sorted(pieces, key=lambda piece: -max(lengths[row] for row in piece.rows)):
        pack = next((pack for pack in packs if pack.tokens + piece.tokens <= budget), None)
        if pack is None:
            packs.append(piece)
        else:
            pack.rows += piece.rows
            pack.tokens += piece.tokens
    return packs


def _split(
    rows: Sequence[int], prompt_lengths: Sequence[int], lengths: Sequence[int], budget: int
) -> list[Pack]:
    """Cut a group into pieces that fit, rows of similar length together."""
    pieces: list[Pack] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        # The last token of a completion is not computed.
        own = max(lengths[row] - 1, 0) + prompt_lengths[row] // _COPIED
        if not pieces or pieces[-1].tokens + own > budget:
            pieces.append(Pack(tokens=prompt_lengths[row]))
        pieces[-1].rows.append(row)
        pieces[-1].tokens += own
    return pieces


def pack_padded(prompt_lengths: Sequence[int], lengths: Sequence[int], budget: int) -> list[Pack]:
    """Pack rows that are padded to the longest prompt and completion of their micro-batch, the longest first."""
    packs: list[Pack] = []
    for row in sorted(range(len(lengths)), key=lambda row: -(prompt_lengths[row] + lengths[row])):
        for pack in packs:
            rows = [*pack.rows, row]
            width = max(prompt_lengths[each] for each in rows) + max(lengths[each] for each in rows)
            if len(rows) * width <= budget:
                pack.rows, pack.tokens = rows, len(rows) * width
                break
        else:
            packs.append(Pack([row], prompt_lengths[row] + lengths[row]))
    return packs


@dataclass(frozen=True)
class Logged:
    """What TRL logged of one batch, the same on all processes, and what this process has in the batch."""

    metrics: Mapping[str, Sequence[float]]
    rows: float
    tokens: Any = 0.0
    """Tokens that the loss counts; a tensor without dimensions if reading it would wait for the device."""
    loss: Any = 0.0
    """TRL's loss of this process's rows, likewise."""


@dataclass(frozen=True)
class Counts:
    """What a process has besides its batches, or what all have in all."""

    tokens: float
    rows: float
    """Completions of the step or the evaluation, with those that were left out of batches."""
    known_tokens: float = 0.0
    """Tokens that were left out, of which the entropy is known."""
    known_entropy: float = 0.0
    """Its sum over them."""


def count_batch(inputs: Rows, loss: Any, metrics: Mapping[str, Sequence[float]]) -> Logged:
    """Return what was logged of a batch with its counts."""
    rows = len(inputs["advantages"])
    tokens = inputs.tokens if isinstance(inputs, MicroBatch) else loss_mask(inputs).sum()
    return Logged(metrics, rows, tokens, loss.detach())


def count_window(on_host: Sequence[Rows], *, leave_out: bool) -> Counts:
    """Return what the micro-batches of a step hold, before rows without signal were left out."""
    tokens = rows = known = entropy = 0.0
    for batch in on_host:
        lengths = loss_mask(batch).sum(1)
        tokens, rows = tokens + float(lengths.sum()), rows + len(lengths)
        if leave_out and ENTROPY in batch:
            counted = ~has_signal(batch) & ~np.isnan(batch[ENTROPY])
            known += float(lengths[counted].sum())
            entropy += float(batch[ENTROPY][counted].sum())
    return Counts(tokens, rows, known, entropy)
