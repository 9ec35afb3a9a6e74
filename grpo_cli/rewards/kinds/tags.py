"""Rewards for tags: `answer_format` wants one exact layout, `tag_count` each tag once.

Owns reading the layout. What the sections say is not looked at.
"""

from typing import ClassVar

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import Integer
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.rows import score_rows

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class AnswerFormatParams(RewardParams):
    """Rewards `<think>…</think><answer>…</answer>`, with only white space around the sections.

    Formula: 0 where the layout is another or a tag repeats. Else each section is filled to
    `min(1, characters / least)`; the score is the mean of the two, or with `strict` 1 where both
    are full and 0 where not. White space at a section's ends is not counted.
    Range: {0, 1}; [0, 1] with `strict: false`.

    Source: the format of DeepSeek-R1 (arXiv:2501.12948, table 1); the partial credit is ours.
    """

    kind: ClassVar[str] = "answer_format"
    highest: ClassVar[float | None] = 1.0

    strict: bool = True
    """Give nothing where a section is too short; false gives its share."""
    min_think_characters: Integer = Field(default=1, ge=0)
    """Characters from which the thinking counts in full."""
    min_answer_characters: Integer = Field(default=1, ge=0)
    """Characters from which the answer counts in full."""
    prefilled: bool = False
    """The chat template already ends the prompt with `<think>`, so completions start inside it."""

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        text = batch.texts[row]
        sections = _read_sections(f"<think>{text}" if self.prefilled else text)
        if sections is None:
            return Score(0.0, "not <think>…</think><answer>…</answer>")
        wanted = (self.min_think_characters, self.min_answer_characters)
        filled = [_fill(len(part), least) for part, least in zip(sections, wanted, strict=True)]
        shown = " and ".join(f"{len(part)} characters" for part in sections)
        if self.strict:
            return Score(float(min(filled) == 1), shown)
        return Score(sum(filled) / 2, shown)


class TagCountParams(RewardParams):
    """Rewards each tag that occurs exactly once, wherever it stands.

    Formula: (tags that occur exactly once) / (tags).
    Range: [0, 1], in steps of 1 / tags.
    A completion of nothing but the tags scores 1: use it beside a reward for the answer.

    Source: the idea of open-r1's `tag_count_reward`, which wants line ends beside the tags too.
    """

    kind: ClassVar[str] = "tag_count"
    highest: ClassVar[float | None] = 1.0

    tags: tuple[str, ...] = Field(default=_TAGS, min_length=1)
    """The tags, as they are written in completions."""

    @field_validator("tags")
    @classmethod
    def _check_tags(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(tags)) < len(tags) or not all(tag.strip() for tag in tags):
            raise PydanticCustomError("grpo_tags", "holds a tag twice, or an empty one")
        return tags

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        wrong = [tag for tag in self.tags if batch.texts[row].count(tag) != 1]
        share = (len(self.tags) - len(wrong)) / len(self.tags)
        return Score(share, f"not once: {' '.join(wrong)}" if wrong else "each tag once")


def _read_sections(text: str) -> tuple[str, str] | None:
    """The thinking and the answer, stripped; None where the layout is another."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in _TAGS):
        return None
    if not text.startswith("<think>") or not text.endswith("</answer>"):
        return None
    thinking, _, rest = text.removeprefix("<think>").partition("</think>")
    rest = rest.strip()
    if not rest.startswith("<answer>"):
        return None
    return thinking.strip(), rest.removeprefix("<answer>").removesuffix("</answer>").strip()


def _fill(characters: int, least: int) -> float:
    return min(1.0, characters / least) if least else 1.0
