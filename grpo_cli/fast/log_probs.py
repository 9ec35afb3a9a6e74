"""Log-probabilities and entropies of completions, from rows without padding.

Owns one pass of the model over a layout. It goes through the trained model's own forward, so that whatever
wraps it (DDP, FSDP, ZeRO, PEFT) takes part, and through TRL's fused head, which never holds the logits of
more than a tile of tokens; on a CPU through the model's own head where all logits fit.

Source: `add_fused_lm_head` of trl 1.16.0, whose forward takes `fused_lm_head` and `shift_labels`.
"""

from typing import Any

import torch

from grpo_cli.fast import attention
from grpo_cli.fast.layout import Layout, group_rows, lay_out
from grpo_cli.fast.output_head import holds_logits
from grpo_cli.recipe.fast import ATTENTION


class PackedModel:
    """A causal language model that reads layouts."""

    def __init__(self, model: Any, plain_temperature: float | None = None) -> None:
        """Makes a model ready; it works as before for all other inputs.

        Args:
            model: A `PreTrainedModel` with TRL's fused head.
            plain_temperature: What logits are divided by where the model's own head gives them; None where
                only TRL's may be used.

        Raises:
            NotImplementedError: Its attention cannot be replaced.
        """
        self._model, self._plain_temperature = model, plain_temperature
        self._vocabulary = model.config.get_text_config().vocab_size
        self._usual = model.config._attn_implementation
        if self._usual not in ATTENTION:
            raise NotImplementedError(f"its attention is {self._usual}")
        self._switch(attention.NAME)
        taken = model.config._attn_implementation == attention.NAME
        self.rest()
        if not taken:
            raise NotImplementedError("its attention cannot be replaced")
        model.base_model.register_forward_hook(_select, with_kwargs=True)

    def read(
        self, wrapped: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Log-probabilities and entropies of completions.

        Attention within the layout stays on where gradients are computed: until `rest` is called, since the
        backward pass may compute layers again.

        Args:
            wrapped: The model as it is trained: with adapters, shared among processes.
            input_ids: `[rows, width of prompts and completions] int64`, padded on both sides.
            attention_mask: As wide; 1 where there is a token.
            width: Columns of completions.

        Returns:
            `[rows, width] float32` each, 0 in padding; no entropies where the head computes none. None where
            there is nothing to lay out.
        """
        layout = lay_out(input_ids, attention_mask, width)
        if layout is None:
            self.rest()
            return None
        self._switch(attention.NAME)
        done = False
        try:
            log_probs, entropy = self._score(wrapped, layout)
            done = True
        finally:
            if not (done and torch.is_grad_enabled()):
                self.rest()
        shape = (len(input_ids), width)
        spread = None if entropy is None else _put_back(entropy, layout, shape)
        return _put_back(log_probs, layout, shape), spread

    def _score(self, wrapped: Any, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and entropies `[N] float32` of the predicted tokens."""
        given = {
            "input_ids": layout.tokens,
            "position_ids": layout.positions,
            "layout": layout,
            "use_cache": False,
        }
        temperature = self._plain_temperature
        if temperature is None or not holds_logits(layout.targets.numel(), self._vocabulary):
            found = wrapped(**given, shift_labels=layout.targets, fused_lm_head=True)
            return found.log_probs[0], None if found.entropy is None else found.entropy[0]
        logits = wrapped(**given).logits[0].float() / temperature
        chances = torch.log_softmax(logits, -1)
        with torch.no_grad():
            entropy = -(chances.exp() * chances).sum(-1)
        return chances.gather(-1, layout.targets[0, :, None])[:, 0], entropy

    def rest(self) -> None:
        """Gives the model its usual attention back."""
        self._switch(self._usual)

    def _switch(self, wanted: str) -> None:
        if self._model.config._attn_implementation != wanted:
            self._model.set_attn_implementation(wanted)


def chunk_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int, size: int | None
) -> list[torch.Tensor]:
    """Numbers of rows in chunks of a size, rows of equal prompts beside each other.

    As many chunks whatever the rows hold, since the processes that share a model read together.
    """
    if size is None or size >= len(input_ids):
        return [torch.arange(len(input_ids), device=input_ids.device)]
    edge = input_ids.shape[1] - width
    ids = input_ids[:, :edge].cpu().numpy()
    groups = group_rows(ids, attention_mask[:, :edge].sum(1).cpu().numpy())
    order = torch.tensor([row for rows in groups for row in rows], device=input_ids.device)
    return list(order.split(size))


def _put_back(values: torch.Tensor, layout: Layout, shape: tuple[int, int]) -> torch.Tensor:
    flat = values.new_zeros(shape[0] * shape[1]).index_put((layout.origins,), values)
    return flat.view(shape)


def _select(module: Any, given: Any, named: dict[str, Any], found: Any) -> Any:
    """Keeps, of what the model's body returns, the places that predict a completion's token."""
    layout = named.get("layout")
    if layout is not None:
        found.last_hidden_state = found.last_hidden_state.index_select(1, layout.scored)
    return found
