"""Which rows travel together: as few micro-batches as a budget of tokens allows.

Owns integers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Pack:
    """Rows of one micro-batch."""

    rows: list[int] = field(default_factory=list)
    tokens: int = 0


def pack_rows(
    groups: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    budget: int,
) -> list[Pack]:
    """Packs rows by length, so that a group stays together and pays for its prompt but once.

    First fit over the pieces of groups in order of their longest completion, the longest first.

    Args:
        groups: Rows of equal prompts.
        prompt_lengths: Tokens of each row's prompt.
        lengths: Tokens of each row's completion.
        budget: Tokens of a micro-batch at most; a row that alone has more gets one of its own.

    Returns:
        Micro-batches; each row is in one.
    """
    packs: list[Pack] = []
    pieces = [piece for rows in groups for piece in _split(rows, prompt_lengths, lengths, budget)]
    for piece in sorted(pieces, key=lambda piece: -max(lengths[row] for row in piece.rows)):
        roomy = (pack for pack in packs if pack.tokens + piece.tokens <= budget)
        pack = next(roomy, None)
        if pack is None:
            packs.append(piece)
        else:
            pack.rows += piece.rows
            pack.tokens += piece.tokens
    return packs


def _split(
    rows: Sequence[int], prompt_lengths: Sequence[int], lengths: Sequence[int], budget: int
) -> list[Pack]:
    """A group in pieces that fit, as evenly long as can be."""
    pieces: list[Pack] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        # The last token of a completion is not computed.
        own = max(lengths[row] - 1, 0)
        if not pieces or pieces[-1].tokens + own > budget:
            pieces.append(Pack(tokens=prompt_lengths[row]))
        pieces[-1].rows.append(row)
        pieces[-1].tokens += own
    return pieces
