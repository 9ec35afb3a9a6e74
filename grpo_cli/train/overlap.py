"""Scoring beside sampling: rewards that wait are asked in a thread, as soon as there is something to score.

Owns the parts that a batch is sampled in, the thread, and its scores until the trainer asks for them. All of
a batch is sampled from the same weights and scored as always; only the moment is another. Rewards that
compute, or need the main thread for signals, stay with the trainer: `RewardParams.waits` tells which.

How `GRPOTrainer` makes completions of token ids is repeated in `read_completions` (trl 1.16.0, `_generate`).
Where TRL hands over others than were scored here, these scores are thrown away and the rewards are asked
again: slower, and right. `tests/integration/test_overlap.py` fails then.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.rewards.scoring import Reward

_NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""What TRL hands to rewards in another way than as a column."""
_LOGGERS = ("log_extra", "log_metric")
"""What TRL hands to rewards to log with."""
_RESPONSE_FORMS = ("response_template", "response_schema")
"""Where a tokenizer says how an answer is taken apart."""

Ids = Sequence[Sequence[int]]
"""One sequence a row."""
Rows = Sequence[Mapping[str, Any]]
"""What TRL samples from: a row for each completion."""
Sampled = tuple[list[list[int]], list[list[float]] | None]
"""Token ids of completions, and their log-probabilities where the sampler tells them."""


class EarlyScores(NamedTuple):
    """A reward's scores of some rows, in their order."""

    scores: list[Score]
    seconds: float
    """What the reward took, whoever waited for it."""
    logged: list[tuple[str, tuple[Any, ...]]]
    """What it asked TRL to log: that is done where the scores are taken."""


class _Part(NamedTuple):
    """Rows of a batch that are being scored."""

    batch: Batch
    found: dict[str, "Future[EarlyScores]"]


class EarlyScoring:
    """Samples a batch in parts of whole groups, and scores each while the trainer goes on."""

    def __init__(self, rewards: Sequence[Reward], parts: int = 1) -> None:
        """Starts nothing yet.

        Args:
            rewards: Of the recipe; those that wait are scored early.
            parts: How many parts a batch is sampled in.
        """
        self._rewards = [reward for reward in rewards if reward.waits]
        self._wanted = parts
        self._work: SimpleQueue[tuple[Reward, _Part]] | None = None
        self._rows: Rows | None = None
        self._state: Any = None
        self._parts: list[_Part] = []

    @contextmanager
    def expecting(self, rows: Rows | None, state: Any) -> Iterator[None]:
        """Scores early what is sampled inside.

        Args:
            rows: What TRL samples from: one row a completion, the groups side by side; None scores nothing.
            state: The trainer's.
        """
        self._rows, self._state = (rows if self._rewards else None), state
        try:
            yield
        finally:
            for future in chain.from_iterable(part.found.values() for part in self._parts):
                future.cancel()
            self._rows, self._parts = None, []

    def sample(
        self, draw: Callable[[slice], Sampled], tokenizer: Any, prompt_ids: Ids, group: int
    ) -> Sampled:
        """Samples a batch; what is finished is scored from then on.

        Args:
            draw: Samples some rows of the batch.
            tokenizer: Reads completions.
            prompt_ids: One prompt a row.
            group: Rows of a group.
        """
        size = len(prompt_ids)
        if self._rows is None or len(self._rows) != size:
            return draw(slice(0, size))
        ids: list[list[int]] = []
        logprobs: list[list[float]] = []
        told = True
        for part in cut(size, group, self._wanted):
            sampled, chances = draw(part)
            ids += sampled
            told = told and chances is not None
            logprobs += chances or []
            prompts = [row["prompt"] for row in self._rows[part]]
            completions = read_completions(tokenizer, prompts, prompt_ids[part], sampled)
            self._begin(self._rows[part], completions, sampled)
        return ids, logprobs if told else None

    def take(self, reward: Reward, batch: Batch) -> EarlyScores | None:
        """A reward's scores of a batch, waited for; None where it was not scored early.

        Raises:
            RewardError: What `Reward.score` raised.
        """
        parts = [part for part in self._parts if reward.name in part.found]
        early = [each for part in parts for each in part.batch.completions]
        if not parts or early != list(batch.completions):
            return None
        found = [part.found[reward.name].result() for part in parts]
        logged = [each for scores in found for each in scores.logged]
        for name, arguments in logged:
            batch.extra[name](*arguments)
        scores = [score for each in found for score in each.scores]
        return EarlyScores(scores, sum(each.seconds for each in found), logged)

    def _begin(self, rows: Rows, completions: Sequence[Any], ids: Ids) -> None:
        """Has the thread score some rows, reward by reward."""
        names = [name for name in rows[0] if name not in _NOT_COLUMNS]
        part = _Part(
            Batch(
                prompts=[row["prompt"] for row in rows],
                completions=completions,
                completion_ids=ids,
                columns={name: [row[name] for row in rows] for name in names},
            ),
            found={},
        )
        self._parts.append(part)
        for reward in self._rewards:
            part.found[reward.name] = Future()
            self._queue().put((reward, part))

    def _queue(self) -> "SimpleQueue[tuple[Reward, _Part]]":
        if self._work is None:
            self._work = SimpleQueue()
            # No pool of concurrent.futures: a process would not end before its threads have.
            threading.Thread(target=self._serve, name="grpo-scoring", daemon=True).start()
        return self._work

    def _serve(self) -> None:
        work = self._queue()
        while True:
            reward, part = work.get()
            future = part.found[reward.name]
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._score(reward, part.batch))
            except BaseException as error:  # for the thread that waits
                future.set_exception(error)

    def _score(self, reward: Reward, batch: Batch) -> EarlyScores:
        logged: list[tuple[str, tuple[Any, ...]]] = []

        def note(name: str) -> Callable[..., None]:
            return lambda *given: logged.append((name, given))

        extra = {"trainer_state": self._state, **{name: note(name) for name in _LOGGERS}}
        started = time.perf_counter()
        scores = reward.score(replace(batch, extra=extra))
        return EarlyScores(scores, time.perf_counter() - started, logged)


def cut(size: int, group: int, parts: int) -> list[slice]:
    """The parts of a batch: of whole groups, and as even as that allows.

    Args:
        size: Rows of the batch in this process.
        group: Rows of a group.
        parts: How many are wanted; a batch that ends or begins within a group stays whole.
    """
    if size % group:
        return [slice(0, size)]
    groups = size // group
    parts = min(parts, groups)
    edges = [groups * edge // parts * group for edge in range(parts + 1)]
    return [slice(*each) for each in pairwise(edges)]


def read_completions(
    tokenizer: Any, prompts: Sequence[Any], prompt_ids: Ids, completion_ids: Ids
) -> list[Any]:
    """Completions as `GRPOTrainer` hands them to rewards: texts, or lists of one message.

    Source: `GRPOTrainer._generate` (trl 1.16.0).
    """
    if not is_conversational({"prompt": prompts[0]}):
        return list(tokenizer.batch_decode(completion_ids, skip_special_tokens=True))
    if any(getattr(tokenizer, name, None) is not None for name in _RESPONSE_FORMS):
        return [
            [parse_response(tokenizer, ids, prefix=prefix)]
            for ids, prefix in zip(completion_ids, prompt_ids, strict=True)
        ]
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]
