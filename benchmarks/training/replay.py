"""Completions of like lengths, or the same completions, in whatever program samples them.

A step's time hangs on how long completions become, and that on the model. So in the benchmarks each token is
followed by an end by chance: drawn from a hash of the row's own tokens, it is the same whatever else is in the
batch, however the batch is padded or split, and wherever sampling goes on from. Everything else of sampling is
the program's own. Reads `GRPO_BENCH_REPLAY`, and adds a processor to each `generate()`.
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VARIABLE = "GRPO_BENCH_REPLAY"
_SPREAD = 1.0
"""Standard deviation of a length's logarithm: one in a hundred is ten times the median."""
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""SplitMix64's, as signed numbers. Source: Steele, Lea and Flood 2014, "Fast splittable PRNGs"."""


@dataclass(frozen=True)
class Settings:
    """How completions end."""

    start_id: int
    """The token that begins a turn; a completion lies behind the last one."""
    header: int
    """Tokens between that and the completion."""
    end_ids: tuple[int, ...]
    """Those that end a completion; the first one is used."""
    mean: float
    longest: int
    same_tokens: bool = False
    """Whether each token is drawn from the hash too, so that programs sample the same."""

    def as_text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))


def make_hazard(mean: float, longest: int) -> list[float]:
    """The chance that a completion which has not ended ends with its 1st, 2nd, … token.

    The lengths are log-normal, cut off at `longest`, with this mean after the cut.
    """
    low, high = 0.0, math.log(longest) + 3.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = _reached(middle, longest)
        low, high = (middle, high) if 1 + sum(reached[1:-1]) < mean else (low, middle)
    reached = _reached(low, longest)
    return [1 - after / before for before, after in itertools.pairwise(reached)]


def _reached(log_median: float, longest: int) -> list[float]:
    """The chances to have more than 0, 1, … `longest` tokens."""
    law = NormalDist(log_median, _SPREAD)
    return [1.0, *(max(1 - law.cdf(math.log(n)), 1e-12) for n in range(1, longest + 1))]


def hash_rows(ids: "torch.Tensor", padding: "torch.Tensor") -> "torch.Tensor":
    """A number for each row that hangs on its tokens alone, and on which of several equal rows it is.

    Args:
        ids: `[sequences, tokens] int64`, padded on the left.
        padding: Tokens of padding, `[sequences] int64`.

    Returns:
        `[sequences] int64`.
    """
    import torch

    places = torch.arange(ids.shape[1], device=ids.device) - padding[:, None]
    mixed = _mix(ids * 1_000_003 + places * 998_244_353)
    found = mixed.masked_fill(places < 0, 0).sum(dim=1)
    earlier = (found[:, None] == found[None, :]).tril(-1).sum(dim=1)
    return _mix(found + earlier * 7_919)


def _mix(values: "torch.Tensor") -> "torch.Tensor":
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> 31)


class Ending:
    """A logits processor: ends rows by the hazard, and keeps them from ending by themselves."""

    def __init__(self, settings: Settings, padding: "torch.Tensor") -> None:
        import torch

        self._settings, self._padding = settings, padding
        hazard = make_hazard(settings.mean, settings.longest)
        self._hazard = torch.tensor([*hazard, 1.0], dtype=torch.float64, device=padding.device)

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        """Changes the scores of a step, `[sequences, vocabulary]`."""
        import torch

        settings = self._settings
        hashes = hash_rows(input_ids, self._padding)
        starts = input_ids == settings.start_id
        behind = starts.flip(1).int().argmax(dim=1) - settings.header
        chance = self._hazard[behind.clamp(0, len(self._hazard) - 1)]
        drawn = (hashes & (2**52 - 1)).double() / 2**52
        scores = scores.clone()
        scores[:, [settings.start_id, *settings.end_ids]] = -torch.inf
        if settings.same_tokens:
            scores = _choose(scores, hashes)
        ended = drawn < chance
        scores[ended] = -torch.inf
        scores[ended, settings.end_ids[0]] = 0.0
        return scores


def _choose(scores: "torch.Tensor", hashes: "torch.Tensor") -> "torch.Tensor":
    """Leaves one token of each row, drawn by the scores with the row's own randomness (Gumbel's trick)."""
    import torch

    chosen = torch.full_like(scores, -torch.inf)
    for row, seed in enumerate(hashes.tolist()):
        source = torch.Generator().manual_seed(seed & (2**63 - 1))
        noise = torch.rand(scores.shape[1], generator=source).log().neg().log().neg()
        chosen[row, (scores[row].float() + noise.to(scores.device)).argmax()] = 0.0
    return chosen


def install(environ: Mapping[str, str]) -> None:
    """Adds the processor to every `generate()` of this process, where the environment asks for it."""
    if VARIABLE not in environ:
        return
    from transformers import GenerationMixin, LogitsProcessorList

    given = json.loads(environ[VARIABLE])
    settings = Settings(**{**given, "end_ids": tuple(given["end_ids"])})
    generate = GenerationMixin.generate
    if getattr(generate, "ends_by_chance", False):
        return

    @functools.wraps(generate)
    def replaying(self: Any, *args: Any, **options: Any) -> Any:
        mask = options["attention_mask"]
        ending = Ending(settings, mask.argmax(dim=1))
        options["logits_processor"] = LogitsProcessorList(
            [ending, *(options.get("logits_processor") or [])]
        )
        return generate(self, *args, **options)

    replaying.ends_by_chance = True  # type: ignore[attr-defined]
    GenerationMixin.generate = replaying
