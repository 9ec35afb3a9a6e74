"""Prompts shared out in chunks that come out the same on one process and on many, now or after a break.

Owns the order and the seeds. A chunk is the unit of work: what it samples depends on its own prompts
and its own seed alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Prompts sampled in one batch."""

    number: int
    places: tuple[int, ...]
    """Where they stand among all prompts, from 0."""
    seed: int


def make_chunks(lengths: Sequence[int], size: int, seed: int) -> list[Chunk]:
    """Chunks of prompts of like length, the longest first, so that memory runs out at once or never.

    Args:
        lengths: Tokens of each prompt.
        size: Prompts in a chunk.
        seed: Of the whole evaluation; each chunk gets one of its own.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    starts = range(0, len(order), max(size, 1))
    return [
        Chunk(number, tuple(order[start : start + size]), _mix(seed, number))
        for number, start in enumerate(starts)
    ]


def share(chunks: Sequence[Chunk], rank: int, world: int) -> list[Chunk]:
    """The chunks of one process: every `world`-th, so that long prompts are spread over all."""
    return [chunk for chunk in chunks if chunk.number % world == rank]


def _mix(seed: int, number: int) -> int:
    """Seeds that do not overlap between evaluations whose seeds are neighbours.

    Source: the increment of SplitMix64 (Steele, Lea and Flood 2014).
    """
    return (seed * 0x9E3779B97F4A7C15 + number) % 2**32
