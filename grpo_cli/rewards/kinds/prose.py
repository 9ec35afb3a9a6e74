"""Rewards for how a completion is written: `reasoning_steps` and `language`.

Owns counting steps and letters. Whether the steps are right, or the language good, it cannot say.
"""

import re
import unicodedata
from functools import lru_cache
from typing import ClassVar, Literal, get_args

from pydantic import Field

from grpo_cli.recipe.base import Integer, OneOrMany
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.reading.extraction import after_thinking
from grpo_cli.rewards.rows import score_rows

Script = Literal[
    "latin",
    "cyrillic",
    "greek",
    "han",
    "hiragana",
    "katakana",
    "hangul",
    "arabic",
    "hebrew",
    "devanagari",
    "bengali",
    "tamil",
    "telugu",
    "thai",
    "georgian",
    "armenian",
    "ethiopic",
]

_MARKED = re.compile(
    r"(?:[\s>#*_]{0,8}(?:step\s{0,3}[0-9]{1,3}\b|[0-9]{1,3}[.)](?![0-9]))[\s.:)*_-]{0,8}"
    r"|\s{0,12}[-*•+]\s)(?P<content>.*)",
    re.IGNORECASE,
)
_ORDINAL = re.compile(
    r"\b(?:first|second|third|fourth|fifth|next|then|after that|finally|lastly)(?:ly)?,",
    re.IGNORECASE,
)
_NO_LANGUAGE = re.compile(r"```.*?```|</?[A-Za-z_]{1,20}>|\\[A-Za-z]{1,30}", re.DOTALL)
_WIDTHS = ("FULLWIDTH ", "HALFWIDTH ", "MODIFIER LETTER ")
_NAMES = {"han": ("CJK UNIFIED", "CJK COMPATIBILITY")}


class ReasoningStepsParams(RewardParams):
    """Rewards completions that show their steps.

    Formula: `min(1, steps / target)`. Steps are the different lines that start with a number
    (`1.`, `2)`), `Step 3` or a bullet and go on with words or numbers, and in other lines the
    different words of `First,` … `Next,` `Then,` `Finally,`.
    Range: [0, 1].

    Source: the idea of open-r1's `reasoning_steps_reward`; that repeated and empty steps do not
    count is ours.
    """

    kind: ClassVar[str] = "reasoning_steps"
    highest: ClassVar[float | None] = 1.0

    target: Integer = Field(default=3, ge=1)
    """How many steps get the full score."""

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        steps = count_steps(batch.texts[row])
        return Score(min(1.0, steps / self.target), f"{steps} steps")


class LanguageParams(RewardParams):
    """Rewards completions written in the wanted script.

    Formula: (letters of the script) / (letters of any script); 0 where there are no letters. Code
    blocks, tags and LaTeX commands are passed over, and so are mathematical letters such as 𝑥.
    Range: [0, 1].
    A script is not a language: `latin` cannot tell English from French.

    Source: the language consistency reward of DeepSeek-R1 (arXiv:2501.12948, section 2.3.2), with
    letters for words; scripts by the names of the Unicode Character Database.
    """

    kind: ClassVar[str] = "language"
    highest: ClassVar[float | None] = 1.0

    script: OneOrMany[Script] = Field(min_length=1)
    """The script, or a list: `[han, hiragana, katakana]` is Japanese."""
    target: Literal["completion", "after_thinking"] = "completion"
    """What to look at: the completion, or what follows its last `</think>`."""

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        text = batch.texts[row]
        text = after_thinking(text) if self.target == "after_thinking" else text
        wanted = frozenset(self.script)
        scripts = [scripts_of(sign) for sign in _NO_LANGUAGE.sub(" ", text) if sign.isalpha()]
        known = [each for each in scripts if each is not None]
        if not known:
            return Score(0.0, "no letters")
        count = sum(bool(wanted & each) for each in known)
        return Score(count / len(known), f"{count} of {len(known)} letters")


def count_steps(text: str) -> int:
    """The different steps that a text shows."""
    steps: set[str] = set()
    words: set[str] = set()
    for line in text.splitlines():
        marked = _MARKED.match(line)
        if marked is None:
            words.update(found.lower() for found in _ORDINAL.findall(line))
        elif any(sign.isalnum() for sign in marked["content"]):
            steps.add(" ".join(marked["content"].casefold().split()))
    return len(steps) + len(words)


@lru_cache(maxsize=65536)
def scripts_of(letter: str) -> frozenset[str] | None:
    """The scripts a letter belongs to (ー to two); None where it is a mathematical sign."""
    name = unicodedata.name(letter, "")
    if name.startswith("MATHEMATICAL "):
        return None
    for width in _WIDTHS:
        name = name.removeprefix(width)
    if name.startswith("KATAKANA-HIRAGANA"):
        return frozenset(("katakana", "hiragana"))
    starts = {script: _NAMES.get(script, (f"{script.upper()} ",)) for script in get_args(Script)}
    return frozenset(script for script, start in starts.items() if name.startswith(start))
