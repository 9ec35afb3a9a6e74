"""How the output head is computed: tokens against the whole vocabulary, in one piece or in tiles.

Owns the choice, from sizes alone, so that what foretells memory and what trains agree. Heavy libraries are not
imported here.
"""

TILE_TOKENS, TILE_WORDS = 4096, 32768
"""Rows and columns of the tiles of TRL's head (trl 1.16, `TOKEN_CHUNK_SIZE`, `_CHUNKED_LOGPROB_CHUNK_SIZE`)."""
TILE_BYTES = 52
"""Bytes for each value of a tile where there is no Triton. Seven float32 tensors and a mask live at
once (trl 1.16, `_backward_tile`); measured are 13 float32 tensors, since blocks of other sizes leave
holes in the heap that glibc cannot give back."""
LOGIT_BYTES = 20
"""Bytes for each logit where all are held: float32 logits, their softmax, its gradient and that of the logits,
and one more while the entropy is summed."""
_SMALL = 2**28
"""Bytes that whole logits may always take."""


def holds_logits(tokens: int, vocabulary: int) -> bool:
    """Whether a CPU computes the logits of that many tokens at once.

    Twice as fast there as tiles, which compute each product a second time for the backward pass; but only where
    it takes no more memory than they do, or little.
    """
    whole = tokens * vocabulary * LOGIT_BYTES
    return whole <= max(tile_bytes(tokens, vocabulary), _SMALL)


def tile_bytes(tokens: int, vocabulary: int) -> int:
    """What the largest tile takes on a CPU."""
    return min(tokens, TILE_TOKENS) * min(vocabulary, TILE_WORDS) * TILE_BYTES
