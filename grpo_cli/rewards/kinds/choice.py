"""The reward `choice`: the right letter of a multiple-choice question."""

import re
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_uppercase
from typing import Any

from pydantic import Field

from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Integer
from grpo_cli.rewards.answers import after_thinking, find_answer, own_text, tidy
from grpo_cli.rewards.contract import Batch, Gold, Meta, RewardParams, Score
from grpo_cli.rewards.gold import make_gold


class ChoiceParams(RewardParams):
    r"""Rewards the correct letter of a multiple-choice question.

    Formula: 1 if the completion chooses the gold letter, else 0. The letter is read from
    `<answer>B</answer>` or `\boxed{B}`, otherwise from the last phrase such as `The answer is (B)`,
    `I choose B` or `B is correct`, otherwise from a line such as `B`, `(B)` or `B. Paris`, if no
    other line starts with an option letter. Several letters in that place, or a copy of the prompt, are
    not a choice. If the gold cannot be read, the reward does not apply to the row.
    Range: {0, 1}.

    Source: the accuracy of MMLU (Hendrycks et al. 2021, arXiv:2009.03300); the phrasings are ours.
    """

    kind = "choice"
    meta = Meta((0.0, 1.0), right_answer=1.0)

    answer: str = "answer"
    """The column with the gold: a letter (`B`, `(B)`, `B. Paris`) or an index."""
    choices: str = Field(default="ABCD", pattern=r"^[A-Z]{2,26}$")
    """The valid letters, in the order of the options."""
    first_index: Integer = Field(default=0, ge=0, le=1)
    """The index of the first letter, if the gold is an index."""

    def gold(self, batch: Batch, row: int) -> Gold | Issue:
        """Return the letter, or why there is none: an index just outside the letters is counted from elsewhere."""
        cell = batch.cell(self.answer, row)
        place = self._read_index(cell)
        other = {len(self.choices): 1, -1: 0}.get(-2 if place is None else place)
        letter = compile_phrasings(ascii_uppercase).lone(str(cell).strip())
        if letter and letter not in self.choices:
            seen = (
                f"the gold {letter} is not a choice of {self.choices}, so the reward gives no score"
            )
            fix = f"name all letters: `choices: {''.join(sorted({*self.choices, letter}))}`"
            return Issue(seen, fix, "choices", level="warning")
        if other is None or other == self.first_index:
            vote = compile_phrasings(self.choices).find
            return make_gold(self._read_gold(cell), cell, self.answer, vote)
        return Issue(
            f"the gold {cell} is not a choice of {self.choices} counted from "
            f"{self.first_index}, so golds that are in range probably name the wrong letters",
            f"if the golds count from {other}, set `first_index: {other}`; if there are more "
            "choices, name them all in `choices`",
            "first_index",
        )

    def score(self, batch: Batch, row: int) -> Score:
        cell = batch.cell(self.answer, row)
        gold = self._read_gold(cell)
        if gold is None:
            return Score(None, f"gold cannot be read: {str(cell)[:60]!r}")
        chosen = compile_phrasings(self.choices).find(own_text(batch, row))
        if chosen is None:
            return Score(0.0, "no single choice found")
        return Score(float(chosen == gold), f"{chosen}, gold {gold}")

    def _read_gold(self, cell: Any) -> str | None:
        place = self._read_index(cell)
        if place is None:
            return compile_phrasings(self.choices).lone(str(cell).strip())
        return self.choices[place] if 0 <= place < len(self.choices) else None

    def _read_index(self, cell: Any) -> int | None:
        number = str(cell).strip().removesuffix(".0")
        is_index = number.isascii() and number.isdigit() and not isinstance(cell, bool)
        return int(number[:3]) - self.first_index if is_index else None


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
        """Return the letter that a completion chooses; None if it chooses none or several."""
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
        """Return the letter a line is or starts with."""
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
    return next(group for group in match.groups() if group).upper()


@lru_cache(maxsize=32)
def compile_phrasings(choices: str) -> Phrasings:
    """Return the phrasings for a set of letters, such as `ABCD`."""
    upper, lower = f"[{choices}]", f"[{choices.lower()}]"
    either = f"[{choices}{choices.lower()}]"
    # Lower-case letters count before a bracket or last: `the answer is a cat` chooses nothing.
    named = (
        rf"(?:[(\[]({either})[)\]]|({upper})(?![\w'’+-])"
        rf"|({lower})(?=\)|[.*_\"']{{0,3}}\s{{0,3}}$))"
    )
    wrapping = r"[\s\"'“*_$:={]{0,8}"
    subject = r"\b(?:answer|(?:correct|right|best)\s(?:option|choice|letter))"
    about = r"(?:\s(?:to|for)\s[^.\n]{1,80}?(?=\sis\b))?"
    adverb = r"(?:(?:\smost)?\s(?!unlike|hard)[a-z]{2,12}ly)?"
    verb = rf"(?:\s(?:is|was|would\sbe|should\sbe|must\sbe){adverb})?"
    option = r"(?:\s?(?:option|choice|letter)\b)?"
    picked = r"\b(?:choose|chose|pick|picked|select|selected|go\swith|going\swith)"
    right = r"\sis\s(?:the\s)?(?:correct|right|best|answer)\b"
    closing = r"[\s)\].*_\"'}$]"
    several = (
        r"(?:[,/&]|(?i:or|and)\b)[\s(\[*\"']{0,4}(?:(?i:option)\s)?"
        rf"(?:({upper})(?![\w'’])|({lower})(?=\)))"
    )
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
