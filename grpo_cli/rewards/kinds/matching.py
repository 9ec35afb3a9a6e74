"""Rewards for an answer that is a text: `exact` compares it, `contains` looks for it.

Owns what counts as the same text. Mathematical equality is for `math.py`.
"""

import re
import unicodedata
from typing import ClassVar, Literal

from pydantic import Field

from grpo_cli.recipe.base import OneOrMany
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.reading.extraction import (
    TextOrPlace,
    after_thinking,
    canonical_answer,
    find_answer,
)
from grpo_cli.rewards.reading.golds import own_text, read_golds
from grpo_cli.rewards.reading.quantities import parse_number, same_quantity, unwrap
from grpo_cli.rewards.rows import score_rows

_PUNCTUATION = re.compile(r"[;!?\"()\[\]{}…«»“”‘’¿¡。、，！？；：「」*_`]|[.,:'](?![0-9])")
"""Signs passed over; not `-` and `#` (-5, C#), nor those that may stand inside a number."""
_MARKUP = re.compile(r"</?(?:think|answer)>|\\(?:boxed|fbox)\b", re.IGNORECASE)
"""What frames an answer; a gold such as `answer` does not occur in it."""
_WORD = re.compile(r"[^\W\d_]{2,}")


class ExactParams(RewardParams):
    """Rewards the very answer that the gold names.

    Formula: 1 where the answer found in the completion is the gold's text, else 0. White space
    and ways to encode a character (NFKC) never count; case, punctuation and how a number is
    written (1,000 = 1000, 0.5 = 1/2) count only where asked for below. The gold may be a list of
    accepted answers. A gold that is missing or empty does not apply; copies of the prompt are no
    answer.
    Range: {0, 1}.

    Source: the exact match of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), which also drops
    articles; this does not.
    """

    kind: ClassVar[str] = "exact"
    right_answer: ClassVar[float | None] = 1.0

    answer: str = "answer"
    """The column with the gold answer, or a list of accepted ones."""
    extract: OneOrMany[TextOrPlace] = Field(
        default=("boxed", "hashes", "answer_tag", "text"), min_length=1
    )
    """Where to look for the answer, in this order; `text` is the whole completion (what follows
    `</think>`)."""
    case_sensitive: bool = False
    """Whether `paris` differs from `Paris`."""
    ignore_punctuation: bool = True
    """Pass over `. , : ; ! ? ' " ( ) [ ] { } * _` and their kin, except inside numbers."""
    numbers: bool = True
    """Compare two plain numbers by value. Units count only where both name one."""

    def required_columns(self) -> tuple[str, ...]:
        """The gold's column."""
        return (self.answer,)

    def gold(self, batch: Batch, row: int) -> str | None:
        """The first accepted text."""
        return next(iter(read_golds(batch, self.answer, row)), None)

    def repeats_gold(self) -> bool:
        """The answer is the gold."""
        return True

    def vote(self, text: str) -> str | None:
        """The answer found, numbers in one spelling."""
        return canonical_answer(text, self.extract)

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        golds = read_golds(batch, self.answer, row)
        if not golds:
            return Score(None, "there is no gold")
        found = find_answer(own_text(batch, row), self.extract)
        if found is None:
            return Score(0.0, "no answer found")
        shown = f"{found.text[:60]!r} from {found.place}"
        if any(self._is_same(gold, found.text) for gold in golds):
            return Score(1.0, shown)
        return Score(0.0, f"{shown}, not {' or '.join(golds)[:60]!r}")

    def _is_same(self, gold: str, answer: str) -> bool:
        if self.numbers:
            same = _same_number(gold, answer)
            if same is not None:
                return same
        return self._normalize(gold) == self._normalize(answer)

    def _normalize(self, text: str) -> str:
        text = fold(unwrap(text), self.case_sensitive)
        bare = " ".join(_PUNCTUATION.sub("", text).split()) if self.ignore_punctuation else ""
        return bare or text


class ContainsParams(RewardParams):
    """Rewards completions that say the gold somewhere.

    Formula: 1 where the gold's text occurs in what follows `</think>`, else 0; where the gold is a
    list, where any (or all) of its texts do. White space, encoding (NFKC) and, unless asked for,
    case do not count. `5` does not occur in `15`, `5.2` or `-5`. A gold that is missing or empty
    does not apply; copies of the prompt are no answer. A completion that lists every possible
    answer scores 1 too: prefer `exact` or `choice` where the answer has a place.
    Range: {0, 1}.

    Source: the accuracy of open-domain question answering by containment (Mallen et al. 2023,
    arXiv:2212.10511).
    """

    kind: ClassVar[str] = "contains"
    right_answer: ClassVar[float | None] = 1.0

    answer: str = "answer"
    """The column with the text to find, or a list of texts."""
    match: Literal["any", "all"] = "any"
    """How many texts of a list must occur."""
    whole_words: bool = True
    """Whether `art` must not be found in `party`; set it to false for languages written without
    spaces."""
    case_sensitive: bool = False
    """Whether `paris` differs from `Paris`."""

    def required_columns(self) -> tuple[str, ...]:
        """The gold's column."""
        return (self.answer,)

    def gold(self, batch: Batch, row: int) -> str | None:
        """The texts to find."""
        golds = read_golds(batch, self.answer, row)
        return ", ".join(golds if self.match == "all" else golds[:1]) or None

    def repeats_gold(self) -> bool:
        """The gold must occur."""
        return True

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        golds = [fold(gold, self.case_sensitive) for gold in read_golds(batch, self.answer, row)]
        if not golds:
            return Score(None, "there is no gold")
        visible = _MARKUP.sub(" ", after_thinking(own_text(batch, row)))
        text = fold(visible, self.case_sensitive)
        missing = [gold for gold in golds if not self._occurs(gold, text)]
        passed = not missing if self.match == "all" else len(missing) < len(golds)
        return Score(1.0, "found") if passed else Score(0.0, f"lacks {missing[0][:60]!r}")

    def _occurs(self, gold: str, text: str) -> bool:
        if not self.whole_words:
            return gold in text
        return re.search(_whole(gold), text) is not None


def fold(text: str, case_sensitive: bool) -> str:
    """The text with one encoding a character, single spaces and, unless it counts, no case."""
    plain = " ".join(unicodedata.normalize("NFKC", text).split())
    return plain if case_sensitive else plain.casefold()


def _whole(gold: str) -> str:
    """The pattern of a text that no word or number goes on around."""
    before = r"(?<![0-9][.,])(?<!\s[-−])(?<!\A[-−])" if gold[0].isdigit() else ""
    after = r"(?![.,][0-9])" if gold[-1].isdigit() else ""
    return rf"(?<!\w){before}{re.escape(gold)}(?!\w){after}"


def _same_number(gold: str, answer: str) -> bool | None:
    """Whether two plain numbers are the same; None where one of the texts is no number."""
    first, second = parse_number(gold), parse_number(answer)
    if first is None or second is None:
        return None
    units, words = set(_WORD.findall(gold.lower())), set(_WORD.findall(answer.lower()))
    conflict = bool(units and words) and not units <= words
    return same_quantity(first, second) and not conflict
