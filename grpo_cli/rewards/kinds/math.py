"""Rewards for a right answer: `math`. Finding it is for `extraction.py`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from pydantic import Field

from grpo_cli.recipe.base import OneOrMany
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.reading.expressions import is_explosive, parse_expression, same_expression
from grpo_cli.rewards.reading.extraction import Found, Place, canonical_answer, find_answer
from grpo_cli.rewards.reading.golds import read_cell
from grpo_cli.rewards.reading.quantities import Quantity, parse_number, same_quantity, tidy, unwrap
from grpo_cli.rewards.rows import score_rows

TIMEOUT_S = 5.0
"""Seconds for one answer where the recipe gives no `timeout_s`."""
_WORDS = re.compile(r"[A-Za-z][A-Za-z' ,.-]*")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_FUNCTIONS = frozenset("sin cos tan cot sec csc sqrt log exp arcsin arccos arctan det".split())
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
"""White space that says nothing; between two digits it does: `2 3` is not `23`."""
_LETTERED = re.compile(r"\(([A-Za-z])\)\.?")


class MathParams(RewardParams):
    r"""Rewards a mathematically right answer.

    Formula: 1 where the answer found in the completion equals the gold, else 0. Plain numbers are
    compared exactly (1,000 = 1000, 3/4 = 0.75, 50% = 50 = 0.5; units are passed over), words
    without regard to case, anything else by math-verify. The gold may be `72`, `#### 72`,
    `\boxed{72}` or a solution that ends in one of these. No answer found, or one too long or too
    explosive to evaluate (`9**9**9**9`), scores 0. Where the gold cannot be read, or is missing,
    the reward does not apply to the row.
    Range: {0, 1}.

    Source: `math_verify.verify` (math-verify 0.9); GSM8K's `####` (Cobbe et al. 2021,
    arXiv:2110.14168).
    """

    kind: ClassVar[str] = "math"
    right_answer: ClassVar[float | None] = 1.0

    answer: str = "answer"
    """The column with the gold answer."""
    extract: OneOrMany[Place] = Field(
        default=("boxed", "hashes", "answer_tag", "last_number"), min_length=1
    )
    """Where to look for the answer, in this order; the first place that holds one counts."""

    def required_columns(self) -> tuple[str, ...]:
        """The gold's column."""
        return (self.answer,)

    def default_timeout_s(self) -> float:
        """Some expressions of a few characters keep sympy busy for ever."""
        return TIMEOUT_S

    def late_score(self) -> float:
        """What cannot be evaluated is not right."""
        return 0.0

    def warm_up(self) -> None:
        """Builds math-verify's parser."""
        same_expression("x + 1", "1 + x")

    def gold(self, batch: Batch, row: int) -> str | None:
        """The gold, without the solution around it."""
        gold = self._gold(batch, row)
        return None if gold is None else gold.text

    def has_gold(self, batch: Batch, row: int) -> bool:
        """By the text alone: whether math-verify reads an expression is not asked."""
        written = read_cell(batch, self.answer, row)
        return not isinstance(written, list | dict | None) and _glance(str(written)) is not None

    def score_easily(self, batch: Batch, row: int) -> Score | None:
        """The score where no expression has to be evaluated."""
        if self.answer not in batch.columns:
            return None
        gold = self._gold(batch, row)
        if gold is None:
            return Score(None, f"gold cannot be read: {read_cell(batch, self.answer, row)!r:.60}")
        found = find_answer(batch.texts[row], self.extract)
        if found is None:
            return Score(0.0, "no answer found")
        same = _is_plainly_same(gold, found.text)
        return None if same is None else _verdict(gold, found, same)

    def vote(self, text: str) -> str | None:
        """The answer found, numbers in one spelling."""
        return canonical_answer(text, self.extract)

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; math-verify is loaded by the first answer that needs it."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        easily = self.score_easily(batch, row)
        if easily is not None:
            return easily
        gold = self._gold(batch, row)
        return compare(gold, batch.texts[row], self.extract) if gold else Score(None)

    def _gold(self, batch: Batch, row: int) -> "Gold | None":
        written = read_cell(batch, self.answer, row)
        return None if isinstance(written, list | dict | None) else read_gold(str(written))


@dataclass(frozen=True)
class Gold:
    """A reference answer, read once for all completions of its prompt."""

    text: str
    quantity: Quantity | None
    """The plain number it is, if it is one."""


@lru_cache(maxsize=8192)
def read_gold(written: str) -> Gold | None:
    r"""Reads a gold answer: a number, an expression, words, or a solution with `####` or `\boxed`.

    Returns:
        The gold, or None where it is empty, a sentence around a number, or nothing readable.
    """
    gold = _glance(written)
    if gold is None or gold.quantity is not None or is_words(gold.text):
        return gold
    return gold if parse_expression(gold.text) else None


def _glance(written: str) -> Gold | None:
    """The gold, where its text alone does not rule it out."""
    found = find_answer(written, ("boxed", "hashes", "answer_tag", "text"))
    if found is None:
        return None
    text = unwrap(found.text)
    quantity = parse_number(text)
    plain = quantity is not None or is_words(text)
    return None if not plain and (_is_prose(text) or is_explosive(text)) else Gold(text, quantity)


def compare(gold: Gold, completion: str, places: Sequence[Place]) -> Score:
    """Scores a completion against a gold: 1 for the right answer, else 0."""
    found = find_answer(completion, places)
    if found is None:
        return Score(0.0, "no answer found")
    same = _is_plainly_same(gold, found.text)
    if same is None:
        same = same_expression(gold.text, unwrap(found.text))
    return _verdict(gold, found, same)


def _verdict(gold: Gold, found: Found, same: bool) -> Score:
    shown = f"{found.text[:60]!r} from {found.place}"
    return Score(1.0, shown) if same else Score(0.0, f"{shown}, not {gold.text[:60]!r}")


def is_words(text: str) -> bool:
    """Whether a text is language (`Monday`, `yes`) and not a product of variables (`xy`)."""
    plain = tidy(text)
    return bool(_WORDS.fullmatch(plain)) and re.search(r"[A-Za-z]{3}", plain) is not None


def _is_prose(text: str) -> bool:
    """Whether a text is a sentence, which math-verify would read as a product of its letters."""
    words = _WORD.findall(text)
    return len([word for word in words if word.lower() not in _FUNCTIONS]) > 1


def _is_plainly_same(gold: Gold, text: str) -> bool | None:
    """Whether two answers are equal; None where only evaluating them can tell."""
    text = unwrap(text)
    quantity = parse_number(text)
    if gold.quantity is not None and quantity is not None:
        return same_quantity(gold.quantity, quantity)
    if _folded(gold.text) == _folded(text):
        return True
    if is_words(gold.text) or is_words(text) or is_explosive(text):
        return False
    return None


def _folded(text: str) -> str:
    """The text as compared literally: no white space, no case, `B` for `(B)`."""
    plain = tidy(text).rstrip(".")
    lettered = _LETTERED.fullmatch(plain)
    return _SPACE.sub("", lettered[1] if lettered else plain).casefold()
