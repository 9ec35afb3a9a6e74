"""Which rows travel together: as few micro-batches as a budget of tokens allows.

Owns integers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_COPIED = 8
"""How many tokens of a prompt weigh as much as one that is computed, where a completion has a copy of their keys
and values. In 16 bits a layer keeps 34 bytes × hidden size of a token (Korthikanti et al., 2022, section 4.1), of
which keys and values for all heads are 4."""


@dataclass(frozen=True)
class Cut:
    """Which padding of a batch is not read."""

    front: bool = True
    """That which stands before all prompts."""
    widest: int | None = None
    """Columns of a batch up to which that behind all completions is not read; None where it never is."""

    def behind(self, width: int) -> bool:
        """Whether padding behind all completions is cut from a batch of so many columns."""
        return self.widest is None or width <= self.widest


@dataclass
class Pack:
    """Rows of one micro-batch."""

    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    """What they weigh, in tokens that are computed."""


def pack_groups(
    groups: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    budget: int,
) -> list[Pack]:
    """Packs rows that share prompts by length, so that a group stays together and pays for its prompt but once.

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


def pack_padded(prompt_lengths: Sequence[int], lengths: Sequence[int], budget: int) -> list[Pack]:
    """Packs rows that are padded to the longest prompt and completion of their micro-batch, the longest first.

    Args:
        prompt_lengths: Tokens of each row's prompt.
        lengths: Tokens of each row's completion.
        budget: Tokens of a micro-batch at most, padding too; a row that alone has more gets one of its own.

    Returns:
        Micro-batches; each row is in one.
    """
    packs: list[Pack] = []
    for row in sorted(range(len(lengths)), key=lambda row: -(prompt_lengths[row] + lengths[row])):
        for pack in packs:
            rows = [*pack.rows, row]
            tokens = len(rows) * (_longest(prompt_lengths, rows) + _longest(lengths, rows))
            if tokens <= budget:
                pack.rows, pack.tokens = rows, tokens
                break
        else:
            packs.append(Pack([row], prompt_lengths[row] + lengths[row]))
    return packs


def _longest(lengths: Sequence[int], rows: Sequence[int]) -> int:
    return max(lengths[row] for row in rows)


def _split(
    rows: Sequence[int], prompt_lengths: Sequence[int], lengths: Sequence[int], budget: int
) -> list[Pack]:
    """A group in pieces that fit, as evenly long as can be."""
    pieces: list[Pack] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        # The last token of a completion is not computed.
        own = max(lengths[row] - 1, 0) + prompt_lengths[row] // _COPIED
        if not pieces or pieces[-1].tokens + own > budget:
            pieces.append(Pack(tokens=prompt_lengths[row]))
        pieces[-1].rows.append(row)
        pieces[-1].tokens += own
    return pieces
