"""Rewards for the format of a completion: a pattern, tags, thinking, visible steps, a script."""

import re
from functools import cached_property
from typing import Literal

from pydantic import Field

from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Integer, OneOrMany
from grpo_cli.rewards.answers import after_thinking
from grpo_cli.rewards.contract import Batch, Meta, RewardContext, RewardParams, Score, TimeLimit
from grpo_cli.units import count_noun

Target = Literal["completion", "after_thinking"]
Flag = Literal["ignorecase", "multiline", "dotall", "verbose", "ascii"]
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

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_LINES = [
    f"{first}<{tag}>{line}First.\nSecond.{line}</{tag}>{between}<answer>{line}4{line}</answer>{first}"
    for tag in ("think", "thinking", "reasoning")
    for line in ("", "\n")
    for between in ("", "\n")
    for first in ("", "\n")
]
"""Completions whose thinking has several lines, with line breaks in the usual places."""
_SECTIONS = re.compile(r"<think>(.*)</think>\s*<answer>(.*)</answer>", re.DOTALL)
_STEP = re.compile(
    r"(?:[\s>#*_]{0,8}(?:step\s{0,3}[0-9]{1,3}\b|[0-9]{1,3}[.)](?![0-9]))[\s.:)*_-]{0,8}"
    r"|\s{0,12}[-*•+]\s)(?P<content>.*)",
    re.IGNORECASE,
)
_ORDINAL = re.compile(
    r"\b(?:first|second|third|fourth|fifth|next|then|after that|finally|lastly)(?:ly)?,",
    re.IGNORECASE,
)
_NO_LANGUAGE = re.compile(r"```.*?```|</?[A-Za-z_]{1,20}>|\\[A-Za-z]{1,30}", re.DOTALL)


class RegexParams(RewardParams):
    """Rewards completions that match a regular expression (Python's `re`).

    Formula: 1 if the pattern is found, else 0.
    Range: {0, 1}.

    Source: https://docs.python.org/3/library/re.html
    """

    kind = "regex"
    meta = Meta((0.0, 1.0))

    pattern: str
    """The regular expression; quote it with '…' in YAML to keep backslashes."""
    flags: tuple[Flag, ...] = ()
    """Lower-case names of `re` flags; `dotall` lets `.` match line breaks."""
    full_match: bool = False
    """The whole target must match, not only a part of it."""
    target: Target = "completion"
    """What to match: the completion, or the text after its last `</think>`."""

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        flags = re.NOFLAG
        for name in self.flags:
            flags |= re.RegexFlag[name.upper()]
        return re.compile(self.pattern, flags)

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        try:
            matches = [self._match(text) for text in ("", "a b\n\n1. é")]
        except (re.error, OverflowError, RecursionError) as error:
            message = f"is not a regular expression: {error} (got {self.pattern!r:.60})"
            return [Issue(message, "correct it", "pattern")]
        if all(matches):
            message = f"{self.pattern!r:.60} matches every text, so every completion scores 1"
            fix = "require at least one character (`+` for `*`), or set `full_match: true`"
            return [Issue(message, fix, "pattern", level="warning")]
        across = re.compile(self.pattern, self._compiled.flags | re.DOTALL)
        if any(across.search(text) for text in _LINES) and not any(map(self._match, _LINES)):
            message = f"`.` of {self.pattern!r:.60} does not match line breaks, so no section may have some"
            return [Issue(message, "set `flags: [dotall]`", "pattern", level="warning")]
        return []

    def _match(self, text: str) -> bool:
        find = self._compiled.fullmatch if self.full_match else self._compiled.search
        return find(text) is not None

    def time_limit(self) -> TimeLimit:
        """Return one, as nested repetitions can keep a pattern busy forever; no match in time is none."""
        return TimeLimit(2.0, late_score=0.0)

    def score(self, batch: Batch, row: int) -> Score:
        text = _read_target(batch.texts[row], self.target)
        return Score(1.0, "matches") if self._match(text) else Score(0.0, "no match")


class ThinkFormatParams(RewardParams):
    """Rewards completions that think between `<think>` and `</think>` before they answer.

    Formula: 1 if the completion starts with `<think>`, does not open it again, and closes it;
    else 0. As in TRL, text after `</think>` is ignored.
    Range: {0, 1}.

    Source: `trl.rewards.think_format_reward` (TRL 1.16); `prefilled` is ours.
    """

    kind = "think_format"
    meta = Meta((0.0, 1.0))

    prefilled: bool = False
    """The chat template already ends the prompt with `<think>`, so completions start inside it.
    Without it, all such completions score 0."""

    def score(self, batch: Batch, row: int) -> Score:
        text = f"<think>{batch.texts[row]}" if self.prefilled else batch.texts[row]
        if not text.startswith("<think>"):
            return Score(0.0, "does not start with <think>")
        if text.count("<think>") > 1:
            return Score(0.0, "opens <think> more than once")
        if "</think>" not in text:
            return Score(0.0, "never closes <think>")
        return Score(1.0, "well formed")


class AnswerFormatParams(RewardParams):
    """Rewards `<think>…</think><answer>…</answer>`, with only white space around the sections.

    Formula: 0 if the layout differs or a tag repeats. Otherwise each section counts as
    `min(1, characters / minimum)`; the score is their mean, or with `strict` 1 if both sections
    count in full and 0 if not. Leading and trailing white space is not counted.
    Range: {0, 1}; [0, 1] with `strict: false`.

    Source: the format of DeepSeek-R1 (arXiv:2501.12948, table 1); the partial credit is ours.
    """

    kind = "answer_format"
    meta = Meta((0.0, 1.0))

    strict: bool = True
    """Score 0 if a section is too short; false gives partial credit."""
    min_think_characters: Integer = Field(default=1, ge=0)
    """Number of characters from which the thinking counts in full."""
    min_answer_characters: Integer = Field(default=1, ge=0)
    """Number of characters from which the answer counts in full."""
    prefilled: bool = False
    """The chat template already ends the prompt with `<think>`, so completions start inside it."""

    def score(self, batch: Batch, row: int) -> Score:
        text = batch.texts[row]
        sections = _read_sections(f"<think>{text}" if self.prefilled else text)
        if sections is None:
            return Score(0.0, "not <think>…</think><answer>…</answer>")
        least = (self.min_think_characters, self.min_answer_characters)
        filled = [
            min(1.0, len(part) / n) if n else 1.0 for part, n in zip(sections, least, strict=True)
        ]
        shown = " and ".join(f"{len(part)} characters" for part in sections)
        if self.strict:
            return Score(float(min(filled) == 1), shown)
        return Score(sum(filled) / 2, shown)


class TagCountParams(RewardParams):
    """Rewards each tag that occurs exactly once, at any position.

    Formula: (tags that occur exactly once) / (tags).
    Range: [0, 1], in steps of 1 / tags.
    A completion of only the tags scores 1: combine it with a reward for the answer.

    Source: the idea of open-r1's `tag_count_reward`, which also requires line breaks around the tags.
    """

    kind = "tag_count"
    meta = Meta((0.0, 1.0))

    tags: tuple[str, ...] = Field(default=_TAGS, min_length=1)
    """The tags, as they are written in completions."""

    def score(self, batch: Batch, row: int) -> Score:
        wrong = [tag for tag in self.tags if batch.texts[row].count(tag) != 1]
        share = (len(self.tags) - len(wrong)) / len(self.tags)
        return Score(share, f"not once: {' '.join(wrong)}" if wrong else "each tag once")


class ReasoningStepsParams(RewardParams):
    """Rewards completions that list their reasoning steps.

    Formula: `min(1, steps / target)`. Steps are distinct lines that start with a number
    (`1.`, `2)`), `Step 3` or a bullet, followed by words or numbers; in other lines, distinct
    words of `First,` … `Next,` `Then,` `Finally,` count.
    Range: [0, 1].

    Source: the idea of open-r1's `reasoning_steps_reward`; ignoring repeated and empty steps is
    ours.
    """

    kind = "reasoning_steps"
    meta = Meta((0.0, 1.0))

    target: Integer = Field(default=3, ge=1)
    """Number of steps for the full score."""

    def score(self, batch: Batch, row: int) -> Score:
        steps = _count_steps(batch.texts[row])
        return Score(min(1.0, steps / self.target), count_noun(steps, "step"))


class LanguageParams(RewardParams):
    """Rewards completions written in a given script.

    Formula: (letters of the script) / (letters of any script); 0 if there are no letters. Code
    blocks, tags, LaTeX commands and mathematical letters such as 𝑥 are ignored.
    Range: [0, 1].
    A script is not a language: `latin` cannot tell English from French.

    Source: the language consistency reward of DeepSeek-R1 (arXiv:2501.12948, section 2.3.2), with
    letters instead of words; script names are those of the Unicode Character Database.
    """

    kind = "language"
    meta = Meta((0.0, 1.0))

    script: OneOrMany[Script] = Field(min_length=1)
    """The script, or a list: `[han, hiragana, katakana]` is Japanese."""
    target: Target = "completion"
    """What to check: the completion, or the text after its last `</think>`."""

    def score(self, batch: Batch, row: int) -> Score:
        import regex

        text = _NO_LANGUAGE.sub(" ", _read_target(batch.texts[row], self.target))
        # Letters that belong to no script are mathematical signs such as 𝑥, or marks such as ー.
        letters = regex.findall(r"[\p{L}--\p{Script=Common}]", text, regex.V1)
        if not letters:
            return Score(0.0, "no letters")
        pattern = "|".join(rf"\p{{Script={each}}}" for each in self.script)
        count = len(regex.findall(pattern, "".join(letters)))
        return Score(count / len(letters), f"{count} of {len(letters)} letters")


def _read_target(text: str, target: Target) -> str:
    return after_thinking(text) if target == "after_thinking" else text


def _read_sections(text: str) -> tuple[str, str] | None:
    match = _SECTIONS.fullmatch(text.strip())
    if match is None or any(text.count(tag) != 1 for tag in _TAGS):
        return None
    return match[1].strip(), match[2].strip()


def _count_steps(text: str) -> int:
    steps: set[str] = set()
    words: set[str] = set()
    for line in text.splitlines():
        step = _STEP.match(line)
        if step is None:
            words.update(word.lower() for word in _ORDINAL.findall(line))
        elif any(sign.isalnum() for sign in step["content"]):
            steps.add(" ".join(step["content"].casefold().split()))
    return len(steps) + len(words)
