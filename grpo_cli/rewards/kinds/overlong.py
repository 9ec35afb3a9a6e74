"""Rewards that shape length against the longest completion: `soft_overlong`, `cosine_length`.

Owns the two formulas. Whether an answer is right is for the answer kind `cosine_length` nests.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

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
from grpo_cli.recipe.base import Integer, Number
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.kinds.choice import ChoiceParams
from grpo_cli.rewards.kinds.gym import ReasoningGymParams
from grpo_cli.rewards.kinds.matching import ContainsParams, ExactParams
from grpo_cli.rewards.kinds.math import MathParams
from grpo_cli.rewards.rows import score_rows


class _Nested:
    """Reads `{kind: math, …}` as math's parameters, and shows `kind` in the JSON Schema."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_without_kind, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        own = handler.resolve_ref_schema(handler(schema))
        properties = {"kind": {"const": self.kind}, **own.get("properties", {})}
        return {**own, "properties": properties, "required": ["kind", *own.get("required", [])]}


def _without_kind(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if key != "kind"}


def _kind_of(value: Any) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if isinstance(kind, str) else None


_KINDS = "math, exact, choice, contains, reasoning_gym"
AnswerKind = Annotated[
    Annotated[MathParams, _Nested("math"), Tag("math")]
    | Annotated[ExactParams, _Nested("exact"), Tag("exact")]
    | Annotated[ChoiceParams, _Nested("choice"), Tag("choice")]
    | Annotated[ContainsParams, _Nested("contains"), Tag("contains")]
    | Annotated[ReasoningGymParams, _Nested("reasoning_gym"), Tag("reasoning_gym")],
    Discriminator(
        _kind_of,
        custom_error_type="grpo_answer_kind",
        custom_error_message=f"should be an answer reward with a `kind` of {_KINDS}",
    ),
]
"""A nested reward that knows right answers: `{kind: math, answer: answer}`."""


class CosineLengthParams(RewardParams):
    r"""Rewards a right answer, more or less of it by the completion's length.

    Formula: with length L and longest T, `b + (a - b) * (1 + cos(pi * L / T)) / 2`, which falls
    (or rises) smoothly from a at L = 0 to b at L = T; a and b are `correct_shortest` and
    `correct_longest` for right answers, `wrong_shortest` and `wrong_longest` for others. L counts
    at most T. It replaces the reward it nests: listing both counts correctness twice.
    Range: from the least to the greatest of the values given; [-1, 1] with the defaults.
    With the defaults right answers should be short, and wrong ones long (more thought may help).

    Source: the cosine reward of Demystifying Long Chain-of-Thought (Yeo et al. 2025,
    arXiv:2502.03373), whose r_e is `exceeded`; the default values are smaller than the paper's.
    """

    kind: ClassVar[str] = "cosine_length"

    of: AnswerKind
    """The reward that says what is right, such as `{kind: math, answer: answer}`; one of math,
    exact, choice, contains, reasoning_gym, with its own parameters."""
    correct_shortest: Number = 1.0
    """Score of a right answer of no length."""
    correct_longest: Number = 0.5
    """Score of a right answer of the greatest length."""
    wrong_shortest: Number = -1.0
    """Score of a wrong answer of no length."""
    wrong_longest: Number = -0.5
    """Score of a wrong answer of the greatest length."""
    exceeded: Number | None = None
    """Score at the greatest length and beyond, right or wrong; leave out for the formula's."""
    max_length: Integer | None = Field(default=None, ge=1)
    """The greatest length, in tokens (characters where completions come without token ids); leave
    out for `generation.max_completion_length`."""

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

    def required_columns(self) -> tuple[str, ...]:
        """What the nested reward requires."""
        return self.of.required_columns()

    def problems(self) -> list[tuple[str, str, str]]:
        """What the nested reward reports."""
        return [(f"of.{path}", message, fix) for path, message, fix in self.of.problems()]

    def default_timeout_s(self) -> float | None:
        """The nested reward's."""
        return self.of.default_timeout_s()

    def late_score(self) -> float | None:
        """That of a wrong answer of the greatest length, where the nested reward has one."""
        return None if self.of.late_score() is None else self.wrong_longest

    def warm_up(self) -> None:
        """What the nested reward loads."""
        self.of.warm_up()

    def gold(self, batch: Batch, row: int) -> str | None:
        """The nested reward's."""
        return self.of.gold(batch, row)

    def gold_source(self) -> tuple[str, str] | None:
        """The nested reward's."""
        source = self.of.gold_source()
        return None if source is None else (f"of.{source[0]}", source[1])

    def gold_fault(self, batch: Batch, row: int) -> tuple[str, str] | None:
        """The nested reward's."""
        return self.of.gold_fault(batch, row)

    def repeats_gold(self) -> bool:
        """Whether the nested reward's right answers do."""
        return self.of.repeats_gold()

    def reads_tokens(self) -> bool:
        """Lengths are counted in tokens."""
        return True

    def build(self, context: RewardContext) -> Scorer:
        """Builds the nested reward."""
        judge = self.of.build(context)
        longest = self.max_length or context.max_completion_length

        def scorer(batch: Batch) -> Sequence[Score | Exception]:
            return [
                judged
                if isinstance(judged, Exception)
                else self._shape(judged, _length(batch, row), longest)
                for row, judged in enumerate(judge(batch))
            ]

        return scorer

    def _shape(self, judged: Score, length: int, longest: int) -> Score:
        if judged.value is None:
            return judged
        right = judged.value == self.of.right_answer
        reason = f"{'right' if right else 'wrong'} at {length} of {longest}: {judged.reason}"
        if self.exceeded is not None and length >= longest:
            return Score(self.exceeded, reason)
        ends = (self.wrong_shortest, self.wrong_longest)
        if right:
            ends = (self.correct_shortest, self.correct_longest)
        return Score(cosine(length, longest, *ends), reason)


class SoftOverlongParams(RewardParams):
    """Punishes completions that come near the longest length, in proportion.

    Formula: 0 up to `max_length - cache` tokens, then falling evenly to -1 at `max_length`
    tokens, and -1 beyond.
    Range: [-1, 0].

    Source: DAPO (Yu et al. 2025, arXiv:2503.14476), equation 13.
    """

    kind: ClassVar[str] = "soft_overlong"

    cache: Integer = Field(ge=1)
    """Tokens before the longest length in which the punishment grows; less than that length."""
    max_length: Integer | None = Field(default=None, ge=1)
    """The longest length, in tokens; leave out for `generation.max_completion_length`."""

    @model_validator(mode="after")
    def _check_cache(self) -> "SoftOverlongParams":
        if self.max_length is not None and self.cache >= self.max_length:
            raise PydanticCustomError(
                "grpo_cache",
                "cache ({cache}) should be less than max_length ({longest})",
                {"cache": self.cache, "longest": self.max_length},
            )
        return self

    def conflicts(self, context: RewardContext) -> list[tuple[str, str, str]]:
        """Compares `cache` with the recipe's longest completion."""
        longest = self.max_length or context.max_completion_length
        if self.cache < longest:
            return []
        message = (
            f"should be less than `generation.max_completion_length` ({longest}), not {self.cache}"
        )
        return [("cache", message, f"write `cache: {max(1, longest // 4)}`")]

    def reads_tokens(self) -> bool:
        """Lengths are counted in tokens."""
        return True

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        longest = self.max_length or context.max_completion_length

        def score(batch: Batch, row: int) -> Score:
            if batch.completion_ids is None:
                raise RewardError("needs token ids, and these completions have none")
            length = len(batch.completion_ids[row])
            over = min(max(0, length - (longest - self.cache)), self.cache)
            return Score(-over / self.cache if over else 0.0, f"{length} of {longest} tokens")

        return score_rows(score)


def cosine(length: int, longest: int, shortest_value: float, longest_value: float) -> float:
    """Half a cosine wave from one value at length 0 to another at `longest`, and flat after it."""
    share = min(length, longest) / longest
    return longest_value + (shortest_value - longest_value) * (1 + math.cos(math.pi * share)) / 2


def _length(batch: Batch, row: int) -> int:
    ids = batch.completion_ids
    return len(batch.texts[row]) if ids is None else len(ids[row])
