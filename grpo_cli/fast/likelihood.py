"""How likely a model finds given answers.

Owns the forward passes. Samples nothing, and leaves the model as it found it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def mean_log_probabilities(
    model: Any,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    pad_token_id: int,
    batch_size: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Mean log-probability of an answer's tokens, at temperature 1.

    Args:
        model: A causal language model of transformers, with or without peft's adapters.
        sequences: Token ids of prompt and answer; neither is empty.
        pad_token_id: Fills shorter sequences.
        batch_size: Sequences in one forward pass.
        on_progress: Called after each batch with the sequences done and those to do.

    Returns:
        One number a sequence, in nats a token.
    """
    order = sorted(range(len(sequences)), key=lambda at: -sum(map(len, sequences[at])))
    found = [0.0] * len(sequences)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            values = _score_batch(model, [sequences[at] for at in batch], pad_token_id)
            for at, value in zip(batch, values, strict=True):
                found[at] = value
            if on_progress is not None:
                on_progress(start + len(batch), len(order))
    finally:
        for module, training in modes:
            module.training = training
    return found


@torch.no_grad()
def _score_batch(
    model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int
) -> list[float]:
    longest = max(len(prompt) + len(answer) for prompt, answer in sequences)
    ids = torch.full((len(sequences), longest), pad)  # [sequences, tokens] int64
    mask = torch.zeros_like(ids)  # [sequences, tokens] int64, 1 at tokens of prompt and answer
    answers = torch.zeros_like(ids, dtype=torch.bool)  # [sequences, tokens], true at the answer's
    for row, (prompt, answer) in enumerate(sequences):
        start, end = len(prompt), len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        mask[row, :end] = 1
        answers[row, start:end] = True
    ids, mask, answers = (each.to(model.device) for each in (ids, mask, answers))
    # The token at a place is foretold at the place before it.
    kept = longest - min(len(prompt) for prompt, _ in sequences) + 1
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=kept).logits[:, :-1]
    targets, counted = ids[:, 1 - kept :], answers[:, 1 - kept :]
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    sums = (chosen * counted).sum(-1) / counted.sum(-1)
    return [float(value) for value in sums]
