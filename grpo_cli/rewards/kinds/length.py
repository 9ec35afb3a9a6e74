"""Rewards for length and repetition: `length`, `cosine_length`, `soft_overlong`, `repetition`."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from grpo_cli.errors import RewardError
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Integer, Number
from grpo_cli.rewards.contract import (
    Batch,
    Columns,
    Gold,
    Meta,
    RewardContext,
    RewardParams,
    Score,
    Scorer,
    TimeLimit,
    score_rows,
)
from grpo_cli.rewards.kinds.choice import ChoiceParams
from grpo_cli.rewards.kinds.exact import ContainsParams, ExactParams
from grpo_cli.rewards.kinds.math import MathParams
from grpo_cli.rewards.kinds.reasoning_gym import ReasoningGymParams
from grpo_cli.units import count_noun

Unit = Literal["characters", "words", "tokens"]


class _Nested:
    """Makes `{kind: math, …}` valid as math's parameters, and adds `kind` to the JSON Schema."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def without_kind(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return {key: each for key, each in value.items() if key != "kind"}

        return core_schema.no_info_before_validator_function(without_kind, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        own = handler.resolve_ref_schema(handler(schema))
        properties = {"kind": {"const": self.kind}, **own.get("properties", {})}
        return {**own, "properties": properties, "required": ["kind", *own.get("required", [])]}


def _kind_of(value: Any) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if isinstance(kind, str) else None


ANSWER_KINDS = (MathParams, ExactParams, ChoiceParams, ContainsParams, ReasoningGymParams)
"""Kinds with a right answer that score one completion at a time."""
_NAMES = ", ".join(each.kind for each in ANSWER_KINDS)
_MESSAGE = f"should be an answer reward with a `kind` of {_NAMES}"
if TYPE_CHECKING:
    AnswerKind = RewardParams
else:
    _TAGGED = (Annotated[each, _Nested(each.kind), Tag(each.kind)] for each in ANSWER_KINDS)
    _BY_KIND = Discriminator(_kind_of, "grpo_answer_kind", _MESSAGE)
    AnswerKind = Annotated[reduce(or_, _TAGGED), _BY_KIND]
"""A nested reward that knows right answers: `{kind: math, answer: answer}`."""


class LengthParams(RewardParams):
    """Rewards completions whose length is near `target`.

    Formula: `-scale * |length - target|`, but not below `-max_penalty` if it is set.
    Range: `[-max_penalty, 0]`, or `(-inf, 0]` without it; 0 at exactly the target.
    With `scale: 1.0`, a completion that is 300 characters off scores -300, which dominates rewards
    of 0 to 1: set `scale: 0.01`, a `max_penalty` or a small `weight`.

    Source: the example `-abs(20 - len(completion))` of TRL's quickstart, which is `target: 20`.
    """

    kind = "length"

    target: Integer = Field(ge=0)
    """The best length, in `unit`."""
    unit: Unit = "characters"
    """What to count; words are separated by white space."""
    scale: Number = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Penalty per unit of distance."""
    max_penalty: Number | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest penalty; leave out for none."""

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        tokens = context.max_completion_length if context else self.target
        # Nearly every word is a token or more, and few tokens are longer than 8 characters.
        longest = tokens * 8 if self.unit == "characters" else tokens
        if self.target > longest:
            limit = f"`generation.max_completion_length` is {tokens} tokens"
            seen = f"{self.target} {self.unit} are more than a completion can have: {limit}"
            fix = f"write at most {longest}, or raise generation.max_completion_length"
            return [Issue(seen, fix, "target")]
        if self.max_penalty is not None and self.max_penalty <= self.scale < self.target:
            message = f"every length but {self.target} scores {-self.max_penalty:g} (`scale: {self.scale:g}`)"
            fix = f"write `scale: {self.max_penalty / self.target:.2g}`"
            return [Issue(message, fix, "max_penalty", level="warning")]
        return []

    def details(self) -> Meta:
        lowest = -math.inf if self.max_penalty is None else -self.max_penalty
        return Meta((lowest, 0.0), reads_tokens=self.unit == "tokens")

    def score(self, batch: Batch, row: int) -> Score:
        length = len(_read_units(batch, row, self.unit))
        penalty = self.scale * abs(length - self.target)
        if self.max_penalty is not None:
            penalty = min(penalty, self.max_penalty)
        return Score(-penalty if penalty else 0.0, count_noun(length, self.unit.removesuffix("s")))


class CosineLengthParams(RewardParams):
    r"""Rewards a correct answer, scaled by the completion's length.

    Formula: with length L and maximum T, `b + (a - b) * (1 + cos(pi * L / T)) / 2`, which falls
    (or rises) smoothly from a at L = 0 to b at L = T; a and b are `correct_shortest` and
    `correct_longest` for correct answers, `wrong_shortest` and `wrong_longest` for others. L is
    at most T. It replaces the nested reward: listing both counts correctness twice.
    Range: from the lowest to the highest of these values; [-1, 1] with the defaults.
    The defaults favor short correct answers and long wrong ones (more reasoning may help).

    Source: the cosine reward of Demystifying Long Chain-of-Thought (Yeo et al. 2025,
    arXiv:2502.03373), whose r_e is `exceeded`; the default values are smaller than the paper's.
    """

    kind = "cosine_length"
    meta = Meta(has_gold=True, reads_tokens=True)

    of: AnswerKind
    """The reward that judges correctness, such as `{kind: math, answer: answer}`; one of math,
    exact, choice, contains, reasoning_gym, with its own parameters."""
    correct_shortest: Number = 1.0
    """Score of a correct answer of length 0."""
    correct_longest: Number = 0.5
    """Score of a correct answer of the maximum length."""
    wrong_shortest: Number = -1.0
    """Score of a wrong answer of length 0."""
    wrong_longest: Number = -0.5
    """Score of a wrong answer of the maximum length."""
    exceeded: Number | None = None
    """Score at or above the maximum length, correct or wrong; leave out to use the formula."""
    max_length: Integer | None = Field(default=None, ge=1)
    """The maximum length, in tokens (characters if completions have no token ids); by default
    `generation.max_completion_length`."""

    @model_validator(mode="after")
    def _check_order(self) -> "CosineLengthParams":
        right = min(self.correct_shortest, self.correct_longest)
        wrong = max(self.wrong_shortest, self.wrong_longest)
        if right <= wrong:
            raise PydanticCustomError(
                "grpo_cosine",
                "a wrong answer could score {wrong}, as much as a right one with {right}; "
                "keep both values for right answers above both for wrong ones",
                {"wrong": wrong, "right": right},
            )
        return self

    def details(self) -> Meta:
        values = [self.correct_shortest, self.correct_longest, self.wrong_shortest]
        values += [
            self.wrong_longest,
            self.wrong_shortest if self.exceeded is None else self.exceeded,
        ]
        return replace(self.meta, range=(min(values), max(values)))

    def columns(self) -> Columns:
        return self.of.columns()

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        return [replace(each, path=f"of.{each.path}") for each in self.of.problems(context)]

    def time_limit(self) -> TimeLimit | None:
        """Return the nested reward's, with the score of a wrong answer of the greatest length."""
        limit = self.of.time_limit()
        return limit and TimeLimit(limit.seconds, self.wrong_longest)

    def gold(self, batch: Batch, row: int) -> Gold | Issue | None:
        """Return the nested reward's."""
        gold = self.of.gold(batch, row)
        issue = gold.issue if isinstance(gold, Gold) else gold
        placed = issue and replace(issue, path=f"of.{issue.path}")
        return replace(gold, issue=placed) if isinstance(gold, Gold) else placed

    def build(self, context: RewardContext) -> Scorer:
        self.of.build(context)
        longest = self.max_length or context.max_completion_length

        def score(batch: Batch, row: int) -> Score:
            judged = self.of.score(batch, row)
            unit: Unit = "characters" if batch.completion_ids is None else "tokens"
            length = len(_read_units(batch, row, unit))
            return judged if judged.value is None else self._shape(judged, length, longest)

        return score_rows(score)

    def _shape(self, judged: Score, length: int, longest: int) -> Score:
        right = judged.value == self.of.meta.right_answer
        reason = f"{'right' if right else 'wrong'} at {length} of {longest}: {judged.reason}"
        if self.exceeded is not None and length >= longest:
            return Score(self.exceeded, reason)
        ends = (self.wrong_shortest, self.wrong_longest)
        if right:
            ends = (self.correct_shortest, self.correct_longest)
        return Score(cosine(length, longest, *ends), reason)


class SoftOverlongParams(RewardParams):
    """Penalizes completions close to the maximum length, proportionally.

    Formula: 0 up to `max_length - cache` tokens, then falling linearly to -1 at `max_length`
    tokens, and -1 beyond.
    Range: [-1, 0].

    Source: DAPO (Yu et al. 2025, arXiv:2503.14476), equation 13.
    """

    kind = "soft_overlong"
    meta = Meta((-1.0, 0.0), reads_tokens=True)

    cache: Integer = Field(ge=1)
    """Number of tokens before the maximum length over which the penalty grows; less than that length."""
    max_length: Integer | None = Field(default=None, ge=1)
    """The maximum length, in tokens; by default `generation.max_completion_length`."""

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        if context is None:
            return []
        longest, key = context.max_completion_length, "`generation.max_completion_length`"
        limit, name = (self.max_length, "`max_length`") if self.max_length else (longest, key)
        if self.cache >= limit:
            message = f"should be less than {name} ({limit}), not {self.cache}"
            return [Issue(message, f"write `cache: {max(1, limit // 4)}`", "cache")]
        if limit - self.cache >= longest:
            message = f"completions end at {key} ({longest}), before the punishment begins ({limit - self.cache})"
            return [Issue(message, "remove `max_length`", "max_length")]
        return []

    def build(self, context: RewardContext) -> Scorer:
        longest = self.max_length or context.max_completion_length

        def score(batch: Batch, row: int) -> Score:
            length = len(_read_units(batch, row, "tokens"))
            over = min(max(0, length - (longest - self.cache)), self.cache)
            return Score(-over / self.cache if over else 0.0, f"{length} of {longest} tokens")

        return score_rows(score)


class RepetitionParams(RewardParams):
    """Penalizes repetition.

    Formula: `max_penalty * (1 - distinct n-grams / n-grams)`; 0 if the completion is shorter
    than one n-gram.
    Range: [max_penalty, 0].
    Some repetition is natural: an ordinary text of 300 words repeats few three-word sequences.

    Source: the idea of the repetition penalty of Demystifying Long Chain-of-Thought (Yeo et al.
    2025, arXiv:2502.03373) and of open-r1's `get_repetition_penalty_reward`.
    """

    kind = "repetition"

    ngram_size: Integer = Field(default=3, ge=1)
    """Number of units in an n-gram."""
    max_penalty: Number = Field(default=-1.0, le=0)
    """The limit of the score for a completion that only repeats itself."""
    unit: Literal["words", "tokens", "characters"] = "words"
    """What to count; words are separated by white space and compared case-insensitively. Use
    `tokens` for languages written without spaces."""

    def details(self) -> Meta:
        return Meta((self.max_penalty, 0.0), reads_tokens=self.unit == "tokens")

    def score(self, batch: Batch, row: int) -> Score:
        share = repeated_share(_read_units(batch, row, self.unit), self.ngram_size)
        penalty = self.max_penalty * share
        return Score(penalty if penalty else 0.0, f"{share:.0%} repeated")


def _read_units(batch: Batch, row: int, unit: Unit) -> Sequence[Hashable]:
    if unit == "characters":
        return batch.texts[row]
    if unit == "words":
        return batch.texts[row].casefold().split()
    if batch.completion_ids is None:
        raise RewardError("needs token ids, and these completions have none")
    return batch.completion_ids[row]


def repeated_share(units: Sequence[Hashable], size: int) -> float:
    """Return the share of n-grams that occurred before, in [0, 1); 0 if there is none."""
    total = len(units) - size + 1
    if total < 1:
        return 0.0
    different = {tuple(units[start : start + size]) for start in range(total)}
    return 1 - len(different) / total


def cosine(length: int, longest: int, shortest_value: float, longest_value: float) -> float:
    """Return half a cosine wave from one value at length 0 to another at `longest`, flat beyond it."""
    share = min(length, longest) / longest
    return longest_value + (shortest_value - longest_value) * (1 + math.cos(math.pi * share)) / 2
