"""The environment `reasoning_gym`: several tries at a question, with the scorer's word after each."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.environments.contract import (
    Environment,
    EnvironmentParams,
    EnvironmentSource,
    EpisodeError,
    Reward,
)
from grpo_cli.errors import RewardError
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Integer, Number, OneOrMany
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.answers import TextOrPlace
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, RewardContext
from grpo_cli.rewards.kinds.reasoning_gym import ReasoningGymParams
from grpo_cli.rewards.scoring import Reward as Scorer

_RIGHT = 1.0
_TOLD_FROM = 0.1
"""Lower scores are what most tasks give any wrong answer (0.01, 0.05): they tell nothing."""
_FORMS: Mapping[TextOrPlace, str] = {
    "text": "{}",
    "boxed": r"\boxed{{{}}}",
    "hashes": "#### {}",
    "answer_tag": "<answer>{}</answer>",
    "last_number": "{}",
}
"""How an answer is written in each place where one is looked for."""


class ReasoningGymEnvironmentParams(EnvironmentParams):
    """Gives the model several tries at a question of reasoning-gym, and tells it whether each was right.

    The question is the row's prompt: use it with `dataset: {kind: reasoning_gym}`. After a wrong answer the model
    reads `wrong, try again`, with the score if the task gives partial credit; a right answer (a score of 1) or the
    last try ends the episode. The environment's score is that of the last try, times `discount` for each
    earlier one. Answers are scored as by the reward `reasoning_gym`, guarded in the same way.

    Source: `reasoning_gym.dataset.ProceduralDataset.score_answer` (reasoning-gym 0.1.25).
    """

    kind: ClassVar[str] = "reasoning_gym"

    tries: Integer = Field(default=3, ge=1)
    """Answers that the model may give; `episode.max_turns` should allow as many."""
    discount: Number = Field(default=1.0, gt=0, le=1)
    """Factor of the score for each earlier try: with 0.5, a right answer at the second try scores 0.5."""
    task: str | None = None
    """The task; leave out to read it from each row's metadata (`source_dataset`)."""
    extract: OneOrMany[TextOrPlace] = Field(default=("text",), min_length=1)
    """Where to look for the answer: one place, or a list in order; `text` is the whole completion
    (after `</think>`), stripped of white space."""

    def problems(self) -> list[Issue]:
        """Report that reasoning-gym is not installed."""
        return self._scorer.problems()

    def required_columns(self) -> tuple[str, ...]:
        """Return the columns of rows that `dataset: {kind: reasoning_gym}` makes."""
        return self._scorer.columns().required

    @property
    def _scorer(self) -> ReasoningGymParams:
        return ReasoningGymParams(task=self.task, extract=self.extract)

    def open(self) -> EnvironmentSource:
        """Import reasoning-gym (about a second)."""
        params = {"task": self.task, "extract": self.extract}
        config = RewardConfig(kind=self.kind, **params)
        [scorer] = build_rewards([config], RewardContext(max_completion_length=1))
        return EnvironmentSource(lambda: ReasoningGymEnvironment(self, scorer))


class ReasoningGymEnvironment(Environment):
    """The tries at one question."""

    takes_text = True

    def __init__(self, params: ReasoningGymEnvironmentParams, scorer: Scorer) -> None:
        self._params, self._scorer = params, scorer
        self._row: Mapping[str, Any] = {}
        self._tries, self._score = 0, 0.0

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Check that the row can be scored; the prompt asks its question."""
        missing = [name for name in self._params.required_columns() if name not in row]
        if missing:
            raise EpisodeError(
                f"the row has no column `{missing[0]}`; use `dataset: {{kind: reasoning_gym}}`"
            )
        self._row = row
        # Processes that score under a time limit start now, not within the time limit of a step.
        self._judge("")

    def _judge(self, text: str) -> float:
        columns = {name: [value] for name, value in self._row.items()}
        try:
            [score] = self._scorer.score(Batch([""], [text], columns=columns))
        except RewardError as error:
            raise EpisodeError(error.seen, error.fix) from error
        return score.value or 0.0

    def step(self, text: str) -> tuple[str, bool]:
        """Score a try; return what the model reads next, and whether it was the last."""
        self._tries += 1
        self._score = self._judge(text)
        if self._score >= _RIGHT:
            return "right", True
        partial = f" (score {self._score:.2f} of 1)" if self._score >= _TOLD_FROM else ""
        is_last = self._tries >= self._params.tries
        return ("wrong" if is_last else "wrong, try again") + partial, is_last

    def reward(self) -> Reward:
        """Return the score of the last try, discounted."""
        return float(self._score * self._params.discount ** max(self._tries - 1, 0))

    def gold(self) -> Sequence[str] | None:
        """Return the task's own answer; some tasks have none."""
        answer = self._row["answer"]
        form = _FORMS[self._params.extract[0]]
        return [form.format(answer)] if answer else None
