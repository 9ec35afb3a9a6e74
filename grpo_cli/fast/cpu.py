"""What a CPU computes differently: its output head, and one random number for each sampled token.

Importable without torch, since the sizes also estimate memory.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TILE_TOKENS, TILE_WORDS = 4096, 32768
"""Rows and columns of the tiles of TRL's head (trl 1.16, `TOKEN_CHUNK_SIZE`, `_CHUNKED_LOGPROB_CHUNK_SIZE`)."""
TILE_BYTES = 52
"""Bytes for each value of a tile without Triton. Seven float32 tensors and a mask live at once (trl 1.16,
`_backward_tile`); measured are 13 float32 tensors, since blocks of other sizes leave holes in the heap that glibc
cannot give back."""
LOGIT_BYTES = 20
"""Bytes for each logit if all are kept: float32 logits, their softmax, its gradient and that of the logits, and
one more while the entropy is summed."""
NO_NUMBERS = "probability tensor contains either `inf`, `nan` or element < 0"
"""What `torch.multinomial` says (torch 2.13)."""
_SMALL = 2**28
"""Bytes that whole logits may always take."""


def holds_logits(tokens: int, vocabulary: int) -> bool:
    """Return whether a CPU computes the logits of that many tokens at once.

    That is twice as fast as in tiles, which compute each product again for the backward pass; but it is done only
    if it takes no more memory than they do, or little.
    """
    tile = min(tokens, TILE_TOKENS) * min(vocabulary, TILE_WORDS) * TILE_BYTES
    return tokens * vocabulary * LOGIT_BYTES <= max(tile, _SMALL)


def draw_tokens(probabilities: "torch.Tensor") -> "torch.Tensor":
    """Draw one token of each row by its probabilities.

    `torch.multinomial` takes a random number for every word of the vocabulary; this takes one for every row,
    looked up in the running sum. In float64, so that the smallest probability keeps its share.

    Args:
        probabilities: `[sequences, vocabulary] float32`, each row adding up to 1.

    Returns:
        `[sequences, 1] int64`.

    Raises:
        RuntimeError: The probabilities are not numbers.
    """
    import torch

    reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:]
    if not torch.isfinite(total).all():
        raise RuntimeError(NO_NUMBERS)
    return torch.searchsorted(reached, torch.rand_like(total) * total, right=True)
