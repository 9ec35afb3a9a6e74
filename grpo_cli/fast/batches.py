"""The micro-batches of an optimizer step, made anew of the rows that are learned from.

Owns which rows these are, and by what TRL's loss of a micro-batch is multiplied so that the sum over all is
the loss of the step. How many tokens travel together is decided by `packing.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_cli.fast.layout import group_rows
from grpo_cli.fast.packing import Cut, pack_groups, pack_padded

Rows = Mapping[str, Any]
"""What TRL hands to its loss: tensors with one entry a row, and numbers of the whole generation batch."""

_MEAN_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that are a mean over the rows of a micro-batch. `bnpo` is one over its tokens, all others are sums.

Source: `GRPOTrainer._compute_loss`, trl 1.16.0."""


_LOG_PROBS = ("old_per_token_logps", "ref_per_token_logps")


class MicroBatch(dict[str, Any]):
    """Rows of one forward and backward pass."""

    def __init__(self, rows: Rows, *, loss_type: str, share: float) -> None:
        """Takes rows.

        Args:
            rows: As TRL's loss takes them.
            loss_type: TRL's name of the loss.
            share: One over the rows that TRL's micro-batches have, where the loss is a mean over rows.
        """
        super().__init__(rows)
        self._loss_type, self._share = loss_type, share

    @property
    def size(self) -> int:
        """Rows, empty ones too."""
        return len(self["advantages"])

    @property
    def tokens(self) -> float:
        """Tokens that the loss counts."""
        return float(loss_mask(self).sum())

    @property
    def scale(self) -> float:
        """What the loss of this micro-batch is multiplied by to be its part of the loss of the step."""
        if self._loss_type == "bnpo":
            return max(self.tokens, 1.0)
        return self.size * self._share if self._loss_type in _MEAN_OF_ROWS else 1.0

    def fill_up(self, size: int) -> None:
        """Appends rows without tokens: TRL gathers numbers of rows, as many from each process."""
        if size > self.size:
            kept = [*range(self.size), *[0] * (size - self.size)]
            empty = torch.arange(size) >= self.size
            self.update(_select(self, kept))
            # Log-probabilities that are learned from are 0 there too, and so their ratio is 1.
            for key in ("completion_mask", "advantages", *_LOG_PROBS):
                if key in self:
                    self[key] = self[key].clone()
                    self[key][empty.to(self[key].device)] = 0


def loss_mask(rows: Rows) -> torch.Tensor:
    """`[rows, tokens]`: 1 at the tokens that the loss counts."""
    mask: torch.Tensor = rows["completion_mask"]
    return mask * rows["tool_mask"] if "tool_mask" in rows else mask


def has_signal(rows: Rows) -> torch.Tensor:
    """`[rows] bool`: whether a row adds to the gradient, where nothing but advantages does."""
    return (rows["advantages"] != 0) & loss_mask(rows).any(1)


def can_repack(window: Sequence[Rows]) -> bool:
    """Whether every entry has one value a row, or one of the whole generation batch."""
    return all(
        isinstance(value, torch.Tensor)
        and (value.dim() == 0 or len(value) == len(batch["advantages"]))
        for batch in window
        for value in batch.values()
    )


def make_micro_batches(
    window: Sequence[Rows],
    *,
    loss_type: str,
    leave_out: bool,
    share: bool,
    budget: int | None,
    cut: Cut,
) -> list[MicroBatch]:
    """Makes the micro-batches of one optimizer step.

    Args:
        window: TRL's micro-batches of the step.
        loss_type: TRL's name of the loss.
        leave_out: Whether rows without signal are.
        share: Whether equal prompts are computed once, and no padding.
        budget: Tokens of a micro-batch at most; those of TRL's with their padding where it is None.
        cut: What padding is not read where prompts are not shared.

    Returns:
        As few as the budget allows; none where no row is learned from.
    """
    if not can_repack(window):
        return [MicroBatch(batch, loss_type="", share=1.0) for batch in window]
    found = []
    for family in _families(window):
        part = 1 / len(family[0]["advantages"])
        rows = _join(family, loss_type)
        kept = has_signal(rows) if leave_out else loss_mask(rows).any(1)
        places = kept.nonzero().flatten().tolist()
        if places:
            most = budget or _padded_tokens(family[0])
            for chosen in _pack(rows, places, most, None if share else cut):
                batch = _select(rows, chosen)
                found.append(MicroBatch(batch, loss_type=loss_type, share=part))
    return found


def make_filler(window: Sequence[Rows]) -> MicroBatch:
    """A micro-batch that adds nothing, for a process that has fewer than others."""
    batch = window[0]
    tokens = loss_mask(batch).sum(1) + batch["prompt_mask"].sum(1)
    tokens[~loss_mask(batch).any(1)] = torch.iinfo(tokens.dtype).max
    chosen = _select(batch, [int(tokens.argmin())]) if can_repack(window) else dict(batch)
    chosen["advantages"] = torch.zeros_like(chosen["advantages"])
    # Read by the model, and counted by nothing.
    chosen["tool_mask"] = torch.zeros_like(chosen["completion_mask"])
    return MicroBatch(chosen, loss_type="", share=1.0)


def _families(window: Sequence[Rows]) -> list[list[Rows]]:
    """Micro-batches whose rows can stand in one: as wide, and of generation batches with as many tokens."""
    found: dict[tuple[Any, ...], list[Rows]] = {}
    for batch in window:
        widths = tuple(
            (key, value.shape[1:] if value.dim() else float(value)) for key, value in batch.items()
        )
        found.setdefault(widths, []).append(batch)
    return list(found.values())


def _join(family: Sequence[Rows], loss_type: str) -> dict[str, Any]:
    rows = {
        key: torch.cat([batch[key] for batch in family]) if value.dim() else value
        for key, value in family[0].items()
    }
    if loss_type == "bnpo":
        # Its loss is a mean over the tokens of the micro-batch that a row came in. The loss of a row is
        # proportional to its advantage, so that the weight can travel there.
        weights = [1 / loss_mask(batch).sum().clamp(min=1.0) for batch in family]
        counts = torch.tensor([len(batch["advantages"]) for batch in family])
        advantages = rows["advantages"]
        each = torch.stack(weights).repeat_interleave(counts.to(advantages.device))
        rows["advantages"] = advantages * each
    return rows


def _pack(rows: Rows, places: Sequence[int], budget: int, cut: Cut | None) -> list[list[int]]:
    """ServerLocation of rows that travel together: sharing prompts where there is nothing to cut, else padded."""
    ids = rows["prompt_ids"][places].cpu().numpy()
    prompt_lengths = rows["prompt_mask"][places].sum(1).cpu().numpy()
    lengths = rows["completion_mask"][places].sum(1).tolist()
    if cut is None:
        groups = group_rows(ids, prompt_lengths)
        packs = pack_groups(groups, prompt_lengths.tolist(), lengths, budget)
    else:
        edge, width = rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1]
        fronts = prompt_lengths.tolist() if cut.front else [edge] * len(places)
        behind = lengths if cut.behind(edge + width) else [width] * len(places)
        packs = pack_padded(fronts, behind, budget)
    return [[places[row] for row in pack.rows] for pack in packs]


def _padded_tokens(batch: Rows) -> int:
    return int(batch["prompt_ids"].numel() + batch["completion_ids"].numel())


def _select(rows: Rows, places: Sequence[int]) -> dict[str, Any]:
    return {key: value[list(places)] if value.dim() else value for key, value in rows.items()}
