"""From a batch to the judge's scores: what is shown together, what is known already, what is asked.

Owns grouping, the order of answers, and the way from the judge's scale to [0, 1].
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.rewards.judging.background import BackgroundLoop
from grpo_cli.rewards.judging.cache import VerdictCache, hash_content
from grpo_cli.rewards.judging.endpoint import Endpoint, Question, Verdicts
from grpo_cli.rewards.judging.prompts import (
    Case,
    Terms,
    read_answer,
    read_prompt,
    write_messages,
)
from grpo_cli.rewards.reading.golds import read_golds


@dataclass(frozen=True)
class Showing:
    """What of a batch the judge is shown, and what together."""

    reference: str | None
    """Column with reference answers."""
    show_thinking: bool
    relative: bool
    """Whether the answers to one prompt go into one request."""


class JudgeScorer:
    """Scores batches with a judge; identical answers to one prompt are judged once."""

    def __init__(
        self,
        terms: Terms,
        showing: Showing,
        endpoint: Endpoint,
        identity: Any,
        cache: VerdictCache | None,
    ) -> None:
        """Sends nothing yet.

        Args:
            terms: What holds for every case.
            showing: What the judge is shown.
            endpoint: The judge.
            identity: Plain values that tell this judge, and the way it is sampled, from others.
            cache: Verdicts of earlier runs; None to ask always.
        """
        self._terms = terms
        self._showing = showing
        self._endpoint = endpoint
        self._identity = identity
        self._cache = cache
        self._loop = BackgroundLoop(endpoint.connect)

    def __call__(self, batch: Batch) -> Sequence[Score | Exception]:
        """The scores, or the failures in their places; a row's failure harms no other request."""
        cases = _gather_cases(batch, self._showing)
        questions = [self._question(case) for case, _ in cases]
        results: list[Score | Exception | None] = [None] * len(batch.completions)
        for (_, rows), outcome in zip(cases, self._answer(questions), strict=True):
            for place, same in enumerate(rows):
                for row in same:
                    results[row] = self._result(outcome, place)
        return [result for result in results if result is not None]

    def _question(self, case: Case) -> Question:
        messages = tuple(write_messages(self._terms, case))
        return Question(messages, len(case.answers), (self._terms.low, self._terms.high))

    def _answer(self, questions: Sequence[Question]) -> list[Verdicts | RewardError]:
        """The outcome of every question: from the cache, else from the judge."""
        keys = [hash_content([self._identity, list(each.messages)]) for each in questions]
        known = [self._recall(*each) for each in zip(keys, questions, strict=True)]
        missing = [place for place, verdicts in enumerate(known) if verdicts is None]
        outcomes: dict[int, Verdicts | RewardError] = {
            place: verdicts for place, verdicts in enumerate(known) if verdicts is not None
        }
        if missing:
            asked = [questions[place] for place in missing]
            answers = self._loop.run(lambda client: self._endpoint.ask_all(client, asked))
            outcomes.update(zip(missing, answers, strict=True))
            self._keep((keys[place], outcomes[place]) for place in missing)
        return [outcomes[place] for place in range(len(questions))]

    def _recall(self, key: str, question: Question) -> Verdicts | None:
        if self._cache is None:
            return None
        return self._cache.read(key, question.answers, question.scale)

    def _keep(self, answered: Iterable[tuple[str, Verdicts | RewardError]]) -> None:
        for key, outcome in answered:
            if self._cache is not None and not isinstance(outcome, RewardError):
                self._cache.write(key, outcome)

    def _result(self, outcome: Verdicts | RewardError, place: int) -> Score | RewardError:
        if isinstance(outcome, RewardError):
            return outcome
        verdict = outcome[place]
        low, high = self._terms.low, self._terms.high
        reason = verdict.reason or f"the judge gave {verdict.score:g}"
        return Score((verdict.score - low) / (high - low), reason)


Rows = tuple[tuple[int, ...], ...]
"""For each answer of a case, the rows that gave it."""


def _gather_cases(batch: Batch, showing: Showing) -> list[tuple[Case, Rows]]:
    """What is shown together, in the order of the batch's first rows."""
    groups: dict[tuple[str, str, Hashable], dict[str, list[int]]] = {}
    ids = batch.columns.get("row_id") if showing.relative else None
    for row, completion in enumerate(batch.texts):
        answer = _mend(read_answer(completion, show_thinking=showing.show_thinking))
        prompt = _mend(read_prompt(batch.prompts[row]))
        together = (None if ids is None else ids[row]) if showing.relative else answer
        key = (prompt, _reference(batch, row, showing.reference), together)
        groups.setdefault(key, {}).setdefault(answer, []).append(row)
    return [_case(*key[:2], group) for key, group in groups.items()]


def _case(prompt: str, reference: str, group: dict[str, list[int]]) -> tuple[Case, Rows]:
    # By a hash of all that is shown: a shuffle that is the same for the same group, whatever the
    # order of its rows, and another for every other group.
    everything = [prompt, reference, sorted(group)]
    answers = sorted(group, key=lambda answer: hash_content([everything, answer]))
    rows = tuple(tuple(group[answer]) for answer in answers)
    return Case(prompt, tuple(answers), reference), rows


def _reference(batch: Batch, row: int, column: str | None) -> str:
    return _mend("\n".join(read_golds(batch, column, row))) if column else ""


def _mend(text: str) -> str:
    """The text without lone surrogates, which no request can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
