"""Log-probabilities and entropies of completions: of rows without padding, and of given answers.

A layout goes through the trained model's own forward, so that its wrappers (DDP, FSDP, ZeRO, PEFT) take part, and
through TRL's fused head, which never holds the logits of more than a tile of tokens; on a CPU through the
model's own head if all logits fit.

Source: `add_fused_lm_head` of trl 1.16.0, whose forward takes `fused_lm_head` and `shift_labels`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from grpo_cli.fast.attention import NO_MASK, accept_layouts
from grpo_cli.fast.completions import sampling_state
from grpo_cli.fast.cpu import holds_logits
from grpo_cli.fast.layout import Layout, Padded, group_rows, lay_out, read_padded, upload

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Token ids of prompts and answers; none is empty."""


class PackedModel:
    """A causal language model that reads layouts; it works as before for all other inputs."""

    def __init__(self, model: Any, plain_temperature: float | None = None) -> None:
        """Prepare a model.

        Args:
            model: A `PreTrainedModel` with TRL's fused head.
            plain_temperature: Divisor of logits that the model's own head computes; None allows only TRL's head.
        """
        self._plain_temperature = plain_temperature
        self._vocabulary = model.config.get_text_config().vocab_size
        self._model = model
        model.base_model.register_forward_hook(_select, with_kwargs=True)

    def read(
        self,
        wrapped: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        padded: Padded | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return log-probabilities and entropies of completions.

        Args:
            wrapped: The model as it is trained: with adapters, sharded.
            input_ids: `[rows, width of prompts and completions] int64`, padded on both sides.
            attention_mask: As wide; 1 at tokens.
            width: Columns of completions.
            padded: The batch on the host, where that is known; otherwise it is read from the device.

        Returns:
            `[rows, width] float32` each, 0 in padding; no entropies if the head computes none. None if the batch
            cannot be laid out.

        Raises:
            NotImplementedError: The model's attention takes no layouts.
        """
        padded = padded or read_padded(input_ids, attention_mask)
        layout = lay_out(padded, width, input_ids.device)
        if layout is None:
            return None
        # Each time, as `grouped_heads` and others replace attention functions too.
        accept_layouts(self._model)
        log_probs, entropy = self._score(wrapped, layout)

        def put_back(values: torch.Tensor) -> torch.Tensor:
            flat = values.new_zeros(len(input_ids) * width)
            return flat.index_put((layout.origins,), values).view(len(input_ids), width)

        return put_back(log_probs), None if entropy is None else put_back(entropy)

    def _score(self, wrapped: Any, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and entropies `[N] float32` of the predicted tokens."""
        inputs = {
            "input_ids": layout.tokens,
            "attention_mask": layout.tokens.new_ones(NO_MASK, dtype=torch.bool),
            "position_ids": layout.positions,
            "layout": layout,
            "use_cache": False,
        }
        temperature = self._plain_temperature
        if temperature is None or not holds_logits(layout.targets.numel(), self._vocabulary):
            scored = wrapped(**inputs, shift_labels=layout.targets, fused_lm_head=True)
            return scored.log_probs[0], None if scored.entropy is None else scored.entropy[0]
        logits = wrapped(**inputs).logits[0].float() / temperature
        log_probs = torch.log_softmax(logits, -1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, layout.targets[0, :, None])[:, 0], entropy


def _select(module: Any, args: Any, named: dict[str, Any], output: Any) -> Any:
    """Keep, of the output of the model's body, the places that predict a completion's token."""
    layout = named.get("layout")
    if layout is not None:
        output.last_hidden_state = output.last_hidden_state.index_select(1, layout.scored)
    return output


def chunk_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int, size: int | None
) -> list[torch.Tensor]:
    """Return row numbers in chunks of a size, rows of equal prompts adjacent.

    The number of chunks depends on the number of rows alone, since processes that share a model read together.
    """
    if size is None or size >= len(input_ids):
        return [torch.arange(len(input_ids), device=input_ids.device)]
    edge = input_ids.shape[1] - width
    prompts = torch.stack([each[:, :edge].long() for each in (input_ids, attention_mask)]).cpu()
    groups = group_rows(prompts[0].numpy(), prompts[1].sum(1).tolist())
    (order,) = upload([[row for rows in groups for row in rows]], input_ids.device)
    return list(order.split(size))


def read_plainly(
    compute: Callable[..., Any],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    width: int,
    padded: Padded | None = None,
    *,
    trim: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies `[rows, width]` by TRL's own pass, `compute`.

    It reads rows with a completion and, to `trim`, columns with a token of one of them. `padded` is as for
    `PackedModel.read`.
    """
    edge, shape = input_ids.shape[1] - width, (len(input_ids), width)
    tokens = torch.from_numpy(padded[1]).bool() if padded else attention_mask.cpu().bool()
    # Processes that share the model read together, so none reads nothing.
    rows = tokens[:, edge:].any(1).nonzero().flatten().tolist() or [0]
    (answered,) = upload([rows], input_ids.device)
    ids, mask = input_ids[answered], attention_mask[answered]
    present = tokens[rows].any(0).nonzero().flatten()
    first = min(int(present[0]), edge - 1) if trim else 0
    end = max(int(present[-1]) + 1, edge + 1) if trim else edge + width
    log_probs, entropies, _ = compute(ids[:, first:end], mask[:, first:end], end - edge)

    def put_back(values: torch.Tensor) -> torch.Tensor:
        wide = pad(values, (0, edge + width - end))
        return wide.new_zeros(shape).index_copy(0, answered, wide)

    return put_back(log_probs), None if entropies is None else put_back(entropies)


def mean_log_probabilities(
    model: Any,
    sequences: Sequences,
    *,
    pad_token_id: int,
    batch_size: int,
    on_progress: Callable[[int, int], None],
) -> list[float]:
    """Return the mean log-probability of each answer's tokens at temperature 1, in nats a token."""
    order = sorted(range(len(sequences)), key=lambda at: -sum(map(len, sequences[at])))
    means = [0.0] * len(sequences)
    with sampling_state(model, None, None):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            values = _score_answers(model, [sequences[at] for at in batch], pad_token_id)
            for at, value in zip(batch, values, strict=True):
                means[at] = value
            on_progress(start + len(batch), len(order))
    return means


@torch.no_grad()
def _score_answers(model: Any, sequences: Sequences, pad_token_id: int) -> list[float]:
    longest = max(len(prompt) + len(answer) for prompt, answer in sequences)
    ids = torch.full((len(sequences), longest), pad_token_id)  # [sequences, tokens] int64
    mask = torch.zeros_like(ids)  # [sequences, tokens] int64, 1 at tokens of prompt and answer
    answers = torch.zeros_like(ids, dtype=torch.bool)  # [sequences, tokens], true at the answer's
    for row, (prompt, answer) in enumerate(sequences):
        start, end = len(prompt), len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        mask[row, :end] = 1
        answers[row, start:end] = True
    ids, mask, answers = (each.to(model.device) for each in (ids, mask, answers))
    # A token is predicted at the place before it.
    kept = longest - min(len(prompt) for prompt, _ in sequences) + 1
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=kept).logits[:, :-1]
    targets, counted = ids[:, 1 - kept :], answers[:, 1 - kept :]
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return ((chosen * counted).sum(-1) / counted.sum(-1)).tolist()
