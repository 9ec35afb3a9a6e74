"""Rewards for the form of a completion: a pattern, or a thinking block. Not for what it answers."""

import re
from typing import ClassVar, Literal

from pydantic import ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.reading.extraction import after_thinking
from grpo_cli.rewards.rows import score_rows

Flag = Literal["ignorecase", "multiline", "dotall", "verbose", "ascii"]


class RegexParams(RewardParams):
    """Rewards completions that match a regular expression (Python's `re`).

    Formula: 1 where the pattern is found, else 0.
    Range: {0, 1}.

    Source: https://docs.python.org/3/library/re.html
    """

    kind: ClassVar[str] = "regex"
    highest: ClassVar[float | None] = 1.0

    pattern: str
    """The regular expression; quote it with '…' in YAML so that backslashes stay."""
    flags: tuple[Flag, ...] = ()
    """Flags by their names in `re`, in lower case; `dotall` lets `.` match line ends."""
    full_match: bool = False
    """The whole target must match, not some part of it."""
    target: Literal["completion", "after_thinking"] = "completion"
    """What to match: the completion, or what follows its last `</think>`."""

    @model_validator(mode="after")
    def _check_pattern(self) -> "RegexParams":
        try:
            self.compiled()
        except (re.error, OverflowError, RecursionError) as error:
            place = getattr(error, "pos", None)
            where = "" if place is None else f" at position {place}"
            fault = PydanticCustomError(
                "grpo_pattern",
                "is not a regular expression: {why}",
                {"why": f"{getattr(error, 'msg', error)}{where}"},
            )
            # So that the error stands at the key: whether a pattern is right depends on `flags` too.
            details = InitErrorDetails(type=fault, loc=("pattern",), input=self.pattern)
            raise ValidationError.from_exception_data("regex", [details]) from error
        return self

    def compiled(self) -> re.Pattern[str]:
        """The pattern with its flags.

        Raises:
            re.error: The pattern is malformed.
        """
        flags = re.NOFLAG
        for name in self.flags:
            flags |= re.RegexFlag[name.upper()]
        return re.compile(self.pattern, flags)

    def default_timeout_s(self) -> float:
        """Nested repetitions can keep a pattern busy for ever on a text that nearly matches."""
        return 2.0

    def late_score(self) -> float:
        """A match that was not found in time is none."""
        return 0.0

    def build(self, context: RewardContext) -> Scorer:
        """Compiles the pattern."""
        pattern = self.compiled()
        match = pattern.fullmatch if self.full_match else pattern.search

        def score(batch: Batch, row: int) -> Score:
            text = batch.texts[row]
            target = after_thinking(text) if self.target == "after_thinking" else text
            return Score(1.0, "matches") if match(target) else Score(0.0, "no match")

        return score_rows(score)


class ThinkFormatParams(RewardParams):
    """Rewards completions that think between `<think>` and `</think>` before they answer.

    Formula: 1 where the completion starts with `<think>`, does not open it again, and closes it;
    else 0. As in TRL, what follows `</think>` is not looked at.
    Range: {0, 1}.

    Source: `trl.rewards.think_format_reward` (TRL 1.16); `prefilled` is ours.
    """

    kind: ClassVar[str] = "think_format"
    highest: ClassVar[float | None] = 1.0

    prefilled: bool = False
    """The chat template already ends the prompt with `<think>`, so completions start inside it.
    Without this such completions all score 0."""

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        text = batch.texts[row]
        fault = _thinking_fault(f"<think>{text}" if self.prefilled else text)
        return Score(0.0, fault) if fault else Score(1.0, "well formed")


def _thinking_fault(text: str) -> str:
    """What keeps `text` from being one closed thinking block and an answer; empty where nothing."""
    if not text.startswith("<think>"):
        return "does not start with <think>"
    if text.count("<think>") > 1:
        return "opens <think> more than once"
    return "" if "</think>" in text else "never closes <think>"
