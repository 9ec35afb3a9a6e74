r"""Reward for a multiple-choice letter: `choice`.

Owns finding the chosen letter in the usual phrasings, and reading a gold letter or index.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.recipe.base import Integer
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.reading.extraction import after_thinking, find_answer
from grpo_cli.rewards.reading.golds import own_text, read_cell
from grpo_cli.rewards.reading.quantities import tidy
from grpo_cli.rewards.rows import score_rows


class ChoiceParams(RewardParams):
    r"""Rewards the right letter of a multiple-choice question.

    Formula: 1 where the letter chosen in the completion is the gold's, else 0. The letter is
    looked for in `<answer>B</answer>` and `\boxed{B}`, then in the last phrase such as `The answer
    is (B)`, `I choose B` or `B is correct`, then in a line such as `B`, `(B)` or `B. Paris`, if no
    other letter heads a line. More than one letter in the place that counts is no choice, nor is
    a copy of the prompt. A gold that cannot be read does not apply.
    Range: {0, 1}.

    Source: the accuracy of MMLU (Hendrycks et al. 2021, arXiv:2009.03300); the phrasings are ours.
    """

    kind: ClassVar[str] = "choice"
    right_answer: ClassVar[float | None] = 1.0

    answer: str = "answer"
    """The column with the gold: a letter (`B`, `(B)`, `B. Paris`) or an index."""
    choices: str = Field(default="ABCD", pattern=r"^[A-Z]{2,26}$")
    """The letters one may choose from, in the order of the options."""
    first_index: Integer = Field(default=0, ge=0, le=1)
    """The index that means the first letter, where the gold is an index."""

    def required_columns(self) -> tuple[str, ...]:
        """The gold's column."""
        return (self.answer,)

    def gold(self, batch: Batch, row: int) -> str | None:
        """The letter."""
        return self._read_gold(read_cell(batch, self.answer, row), read_phrasings(self.choices))

    def vote(self, text: str) -> str | None:
        """The letter chosen."""
        return read_phrasings(self.choices).find(text)

    def build(self, context: RewardContext) -> Scorer:
        """Compiles the phrasings for these letters."""
        phrasings = read_phrasings(self.choices)

        def score(batch: Batch, row: int) -> Score:
            cell = read_cell(batch, self.answer, row)
            gold = self._read_gold(cell, phrasings)
            if gold is None:
                return Score(None, f"gold cannot be read: {str(cell)[:60]!r}")
            chosen = phrasings.find(own_text(batch, row))
            if chosen is None:
                return Score(0.0, "no single choice found")
            return Score(float(chosen == gold), f"{chosen}, gold {gold}")

        return score_rows(score)

    def _read_gold(self, cell: Any, phrasings: "Phrasings") -> str | None:
        text = str(cell).strip()
        number = text.removesuffix(".0")
        if isinstance(cell, bool) or not (number.isascii() and number.isdigit()):
            return phrasings.lone(text)
        place = int(number[:3]) - self.first_index
        return self.choices[place] if 0 <= place < len(self.choices) else None


@dataclass(frozen=True)
class Phrasings:
    """The ways to name one of some letters; each pattern is linear in the text."""

    alone: re.Pattern[str]
    """A line that is or starts with a letter: `B`, `(B)`, `**B.**`, `B) Paris`."""
    phrase: re.Pattern[str]
    """`The answer is B`, `I choose (B)`, `B is correct`."""
    another: re.Pattern[str]
    """A further letter right after one: `or C`, `, C`, `(C)`."""

    def find(self, text: str) -> str | None:
        """The letter that a completion chooses; None where it chooses none or several."""
        visible = after_thinking(text)
        marked = find_answer(visible, ("answer_tag", "boxed"))
        if marked is not None:
            inner = find_answer(marked.text, ("boxed", "text"))
            content = tidy(inner.text if inner else marked.text)
            return self.lone(content) or self._last_phrase(content)
        phrased = list(self.phrase.finditer(visible))
        if phrased:
            return self._unless_several(phrased[-1], visible)
        led = {letter for line in visible.splitlines() if (letter := self.lone(line))}
        return led.pop() if len(led) == 1 else None

    def lone(self, line: str) -> str | None:
        """The letter a line is or starts with."""
        match = self.alone.match(line)
        return self._unless_several(match, line) if match else None

    def _last_phrase(self, text: str) -> str | None:
        found = list(self.phrase.finditer(text))
        return self._unless_several(found[-1], text) if found else None

    def _unless_several(self, match: re.Match[str], text: str) -> str | None:
        further = self.another.match(text, match.end())
        one_only = further is None or _letter_of(further) == _letter_of(match)
        return _letter_of(match) if one_only else None


def _letter_of(match: re.Match[str]) -> str:
    """The letter in whichever of a pattern's groups holds one."""
    return next(group for group in match.groups() if group).upper()


@lru_cache(maxsize=32)
def read_phrasings(choices: str) -> Phrasings:
    """The phrasings for a set of letters, such as `ABCD`."""
    upper, lower = f"[{choices}]", f"[{choices.lower()}]"
    either = f"[{choices}{choices.lower()}]"
    # Lower-case letters count in brackets or last: `the answer is a cat` chooses nothing.
    named = (
        rf"(?:[(\[]({either})[)\]]|({upper})(?![\w'’+-])"
        rf"|({lower})(?=[.*_\"']{{0,3}}\s{{0,3}}$))"
    )
    wrapping = r"[\s\"'“*_$:={]{0,8}"
    subject = r"\b(?:answer|(?:correct|right|best)\s(?:option|choice|letter))"
    about = r"(?:\s(?:to|for)\s[^.\n]{1,80}?(?=\sis\b))?"
    verb = r"(?:\s(?:is|was|would\sbe|should\sbe|must\sbe))?"
    option = r"(?:\s?(?:option|choice|letter)\b)?"
    picked = r"\b(?:choose|chose|pick|picked|select|selected|go\swith|going\swith)"
    right = r"\sis\s(?:the\s)?(?:correct|right|best|answer)\b"
    closing = r"[\s)\].*_\"'}$]"
    several = rf"(?:[,/&]|(?i:or|and)\b)[\s(\[*\"']{{0,4}}(?:(?i:option)\s)?({upper})(?![\w'’])"
    return Phrasings(
        alone=re.compile(
            rf"[\s*_$\"'>#-]{{0,8}}(?:[(\[]({either})[)\]]|({either})(?=[\s*_$\"'.]{{0,8}}$|[.):]))",
            re.MULTILINE,
        ),
        phrase=re.compile(
            rf"(?i:{subject}{about}{verb}{wrapping}(?:the\s)?{option}){wrapping}{named}"
            rf"|(?i:{picked}{option}){wrapping}{named}"
            rf"|(?<![\w'’]){named}(?i:[)\]*_\"']{{0,4}}{right})",
            re.MULTILINE,
        ),
        another=re.compile(
            rf"{closing}{{0,6}}(?:{several}|[(\[]({either})[)\]]|(?<=\s)({upper})(?=[.),]|\s*$))"
            r"(?![)\]*\"']{0,3}\s+(?:is|was|are)\b)",
        ),
    )
