"""The rewards `exact` and `contains`: a right answer that is a text."""

import re
import unicodedata
from functools import partial
from typing import Literal

from pydantic import Field

from grpo_cli.issues import Issue
from grpo_cli.recipe.base import OneOrMany
from grpo_cli.rewards.answers import (
    TextOrPlace,
    after_thinking,
    canonical_answer,
    find_answer,
    own_text,
    parse_number,
    read_golds,
    same_quantity,
    unwrap,
)
from grpo_cli.rewards.contract import Batch, Gold, Meta, RewardParams, Score
from grpo_cli.rewards.gold import make_gold

_PUNCTUATION = re.compile(
    r"[;!?\"()\[\]{}…«»“”‘’¿¡。、，！？；：「」`]|[.,:'_*](?![0-9])|(?<![0-9])[_*]"
)
"""Signs that are ignored; not `-` and `#` (-5, C#), nor those that may stand inside a number."""
_MARKUP = re.compile(r"</?(?:think|answer)>|\\(?:boxed|fbox)\b", re.IGNORECASE)
"""What frames an answer; a gold such as `answer` does not occur in it."""
_WORD = re.compile(r"(?<![0-9])[^\W\d_]+")


class ExactParams(RewardParams):
    """Rewards an answer that exactly matches the gold text.

    Formula: 1 if the answer found in the completion equals the gold text, else 0. White space
    and character encoding (NFKC) are ignored; the parameters below control case, punctuation and
    number formats (1,000 = 1000, 0.5 = 1/2). The gold may be a list of accepted answers. If the
    gold is missing or empty, the reward does not apply to the row; copies of the prompt are not
    answers.
    Range: {0, 1}.

    Source: the exact match of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), which also drops
    articles; this does not.
    """

    kind = "exact"
    meta = Meta((0.0, 1.0), right_answer=1.0, repeats_gold=True)

    answer: str = "answer"
    """The column with the gold answer, or a list of accepted ones."""
    extract: OneOrMany[TextOrPlace] = Field(
        default=("boxed", "hashes", "answer_tag", "text"), min_length=1
    )
    """Where to look for the answer, in this order; `text` is the whole completion (after
    `</think>`)."""
    case_sensitive: bool = False
    """Whether `paris` differs from `Paris`."""
    ignore_punctuation: bool = True
    """Ignore `. , : ; ! ? ' " ( ) [ ] { } * _` and the like, except inside numbers."""
    numbers: bool = True
    """Compare two plain numbers by value. Units are compared only if both have one."""

    def gold(self, batch: Batch, row: int) -> Gold | Issue:
        text = next(iter(read_golds(batch, self.answer, row)), None)
        vote = partial(canonical_answer, places=self.extract)
        return make_gold(text, batch.cell(self.answer, row), self.answer, vote)

    def score(self, batch: Batch, row: int) -> Score:
        golds = read_golds(batch, self.answer, row)
        if not golds:
            return Score(None, "there is no gold")
        answer = find_answer(own_text(batch, row), self.extract)
        if answer is None:
            return Score(0.0, "no answer found")
        shown = f"{answer.text[:60]!r} from {answer.place}"
        if any(self._is_same(gold, answer.text) for gold in golds):
            return Score(1.0, shown)
        return Score(0.0, f"{shown}, not {' or '.join(golds)[:60]!r}")

    def _is_same(self, gold: str, answer: str) -> bool:
        if self.numbers:
            same = _same_number(gold, answer)
            if same is not None:
                return same
        return self._normalize(gold) == self._normalize(answer)

    def _normalize(self, text: str) -> str:
        text = _fold(unwrap(text), self.case_sensitive)
        bare = " ".join(_PUNCTUATION.sub("", text).split()) if self.ignore_punctuation else ""
        return bare or text


class ContainsParams(RewardParams):
    """Rewards completions that contain the gold text.

    Formula: 1 if the gold text occurs after `</think>`, else 0; if the gold is a list, 1 if any
    (or all) of its texts occur. White space, encoding (NFKC) and, by default, case are ignored.
    `5` does not occur in `15`, `5.2` or `-5`. If the gold is missing or empty, the reward does not
    apply to the row; copies of the prompt are not answers. A completion that lists every possible
    answer also scores 1: prefer `exact` or `choice` if the answer has a fixed place.
    Range: {0, 1}.

    Source: the accuracy of open-domain question answering by containment (Mallen et al. 2023,
    arXiv:2212.10511).
    """

    kind = "contains"
    meta = Meta((0.0, 1.0), right_answer=1.0, repeats_gold=True)

    answer: str = "answer"
    """The column with the text to find, or a list of texts."""
    match: Literal["any", "all"] = "any"
    """How many texts of a list must occur."""
    whole_words: bool = True
    """If true, `art` does not match in `party`; set it to false for languages written without
    spaces."""
    case_sensitive: bool = False
    """Whether `paris` differs from `Paris`."""

    def gold(self, batch: Batch, row: int) -> Gold | Issue:
        golds = read_golds(batch, self.answer, row)
        text = ", ".join(golds if self.match == "all" else golds[:1])
        return make_gold(text, batch.cell(self.answer, row), self.answer)

    def score(self, batch: Batch, row: int) -> Score:
        golds = [_fold(gold, self.case_sensitive) for gold in read_golds(batch, self.answer, row)]
        if not golds:
            return Score(None, "there is no gold")
        visible = _MARKUP.sub(" ", after_thinking(own_text(batch, row)))
        text = _fold(visible, self.case_sensitive)
        missing = [gold for gold in golds if not self._occurs(gold, text)]
        passed = not missing if self.match == "all" else len(missing) < len(golds)
        return Score(1.0, "found") if passed else Score(0.0, f"lacks {missing[0][:60]!r}")

    def _occurs(self, gold: str, text: str) -> bool:
        if not self.whole_words:
            return gold in text
        return re.search(_whole_word(gold), text) is not None


def _fold(text: str, case_sensitive: bool) -> str:
    """Return the text with one encoding per character, single spaces and, unless it counts, no case."""
    plain = " ".join(unicodedata.normalize("NFKC", text).split())
    return plain if case_sensitive else plain.casefold()


def _whole_word(gold: str) -> str:
    """Return the pattern of a text that is no part of a longer word or number."""
    before = r"(?<![0-9][.,])(?<!\s[-−])(?<!\A[-−])" if gold[0].isdigit() else ""
    after = r"(?![.,][0-9])" if gold[-1].isdigit() else ""
    return rf"(?<!\w){before}{re.escape(gold)}(?!\w){after}"


def _same_number(gold: str, answer: str) -> bool | None:
    first, second = parse_number(gold), parse_number(answer)
    if first is None or second is None:
        return None
    units, words = set(_WORD.findall(gold.lower())), set(_WORD.findall(answer.lower()))
    conflict = bool(units and words) and not units <= words
    return same_quantity(first, second) and not conflict
