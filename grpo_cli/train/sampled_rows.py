"""Rows of TRL's generation batches: cut out without their padding, and padded together again.

Owns which tensors a batch may hold and how each is padded. Which rows go where is `dynamic_sampling.py`'s.

Source: trl 1.16.0, the end of `GRPOTrainer._generate_and_score_completions`.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from trl.trainer.utils import pad

from grpo_cli.errors import RunError
from grpo_cli.fast.metrics import ENTROPY

Row = dict[str, torch.Tensor]
"""One completion: what a batch holds of it, each tensor as long as it is without padding."""
_PROMPT = {"prompt_ids", "prompt_mask"}
"""Padded on the left; all others on the right."""
_RATIO = "importance_sampling_ratio"
"""One number a token, or one a completion, by `generation.vllm.importance_sampling_mode`."""
_PADDING = {
    "prompt_mask": 0,
    "completion_mask": 0,
    "tool_mask": 1,
    "old_per_token_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    _RATIO: 1.0,
    # The KL term takes exp(reference - policy) of padding too before it is masked: it must stay finite.
    "ref_per_token_logps": -1000.0,
}
_NUMBERS = {"advantages", ENTROPY}
"""One number a completion."""
_OF_BATCH = {"num_items_in_batch"}


def cut_rows(
    batch: Mapping[str, torch.Tensor], pad_token_id: int, places: Iterable[int]
) -> list[Row]:
    """The completions at some places of a batch.

    Args:
        batch: As TRL makes it: [completions, tokens] each, prompts padded on the left.
        pad_token_id: What it is padded with.
        places: From 0.

    Raises:
        RunError: It holds something that cannot be moved from one batch to another.
    """
    known = {"prompt_ids", "completion_ids", *_PADDING, *_NUMBERS, *_OF_BATCH}
    if other := sorted(batch.keys() - known):
        raise RunError(
            f"`generation.dynamic_sampling` cannot put batches together that hold {', '.join(other)}. "
            "Fix: remove it from the recipe"
        )
    # Of a completion that was cut off and is masked whole, the ids alone tell how long it is.
    said = (batch["completion_mask"] != 0) | (batch["completion_ids"] != pad_token_id)
    rows = []
    for place in places:
        asked = int(batch["prompt_mask"][place].sum())
        length = int(said[place].nonzero().max()) + 1
        row = {}
        for name in batch:
            if name in _OF_BATCH:
                continue
            whole = batch[name][place]
            if name in _NUMBERS:
                row[name] = whole
            else:
                row[name] = whole[len(whole) - asked :] if name in _PROMPT else whole[:length]
        rows.append(row)
    return rows


def join_rows(
    rows: Sequence[Row], pad_token_id: int, pad_to_multiple_of: int | None
) -> dict[str, torch.Tensor]:
    """A batch of these completions, padded as TRL pads.

    Args:
        rows: In the order of the batch, with the same tensors each.
        pad_token_id: Fills the ids.
        pad_to_multiple_of: TRL's setting.
    """
    joined = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        if name in _NUMBERS or (name == _RATIO and all(len(part) == 1 for part in parts)):
            joined[name] = torch.stack(parts)
            continue
        joined[name] = pad(
            parts,
            padding_value=_PADDING.get(name, pad_token_id),
            padding_side="left" if name in _PROMPT else "right",
            pad_to_multiple_of=pad_to_multiple_of,
        )
    return joined
