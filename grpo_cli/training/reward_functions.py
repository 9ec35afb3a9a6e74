"""Rewards as functions that TRL calls, on completions that may have been scored while sampling went on.

Source: `GRPOTrainer._calculate_rewards`, which passes the columns of the dataset as keyword arguments.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from grpo_cli.data.images import without_images
from grpo_cli.environments.episode import is_clipped
from grpo_cli.fast.completion_reader import CompletionReader
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import EPISODE, Batch, Score
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.thumbnails import Thumbnails

_LOGGERS = ("log_extra", "log_metric")
"""Functions that TRL passes to rewards."""
_TEXTS = frozenset({"prompt", "completion", "completion_ids"})
_NOT_COLUMNS = frozenset({"trainer_state", "environments", *_LOGGERS})
NO_REWARD = "none"
"""What TRL calls the reward of a training without any."""

Ids = Sequence[Sequence[int]]
"""One sequence for each row."""
Rows = Sequence[Mapping[str, Any]]
"""What TRL samples from: one row for each completion."""
Sampled = tuple[list[list[int]], list[list[float]] | None]
"""Token ids of completions, and their log-probabilities if the sampler returns them."""


class CompletionLog:
    """`completions/rank_N.jsonl`, one record for each group: the prompt once, its completions side by side.

    A group that TRL spreads over several processes has a part in each one's file, under the same step and row.
    `learned: false` marks a group that was sampled but replaced by another, or not needed.
    """

    def __init__(
        self,
        path: Path | None,
        reward_names: Sequence[str],
        is_complete: Callable[[Sequence[int]], bool],
        is_training: Callable[[], bool],
        thumbnails: Thumbnails | None = None,
    ) -> None:
        """Make a log.

        Args:
            path: What it appends to; None writes nothing.
            reward_names: Of the recipe's rewards, in their order.
            is_complete: Tells whether a completion, of these tokens, was not cut off.
            is_training: Tells training from evaluation.
            thumbnails: Keeps copies of the prompts' images, if they may have some.
        """
        self.path = path
        self.is_training = is_training
        self._thumbnails = thumbnails
        self._names = tuple(reward_names)
        self._is_complete = is_complete
        self._scores: dict[str, Sequence[Score]] = {}
        self._pending: list[list[tuple[list[int], dict[str, Any]]]] | None = None
        """Of each batch its records, with their rows, until it is known which are learned from."""

    @contextmanager
    def marking(self) -> Iterator[list[set[int]]]:
        """Delay records; yield a list to be filled with the rows of each batch that are learned from."""
        self._pending, marks = [], list[set[int]]()
        try:
            yield marks
        finally:
            pending, self._pending = self._pending, None
            for number, batch in enumerate(pending):
                for members, record in batch:
                    unused = number < len(marks) and not marks[number].intersection(members)
                    self._write([(members, {**record, "learned": False} if unused else record)])

    def add(self, name: str, batch: Batch, scores: Sequence[Score], *, step: int) -> None:
        """Take one reward's scores of a batch, after `step` optimizer steps; the last reward's write it."""
        if self.path is None:
            return
        if self._names:
            self._scores[name] = scores
            if name != self._names[-1]:
                return
        groups: dict[Any, list[int]] = {}
        for index, row in enumerate(_row_ids(batch)):
            groups.setdefault(row, []).append(index)
        records = [
            (members, self._describe(batch, row, members, step)) for row, members in groups.items()
        ]
        self._scores = {}
        if self._pending is None:
            self._write(records)
        else:
            self._pending.append(records)

    def _write(self, records: Sequence[tuple[list[int], dict[str, Any]]]) -> None:
        for _, record in records:
            if self.path is not None:
                append_record(self.path, record)

    def _describe(self, batch: Batch, row: Any, members: list[int], step: int) -> dict[str, Any]:
        ids = batch.completion_ids or [[] for _ in batch.completions]
        training = self.is_training()
        scores = {
            name: [scores[index] for index in members] for name, scores in self._scores.items()
        }
        reasons = {name: [score.reason for score in own] for name, own in scores.items()}
        return {
            # The step that learns from these completions, as metrics.jsonl counts.
            "step": step + 1 if training else step,
            "split": "train" if training else "eval",
            "row": row,
            "prompt": self._show_prompt(batch, members[0], (training, row)),
            "completions": [batch.texts[index] for index in members],
            "tokens": [len(ids[index]) for index in members],
            "clipped": [not self._is_complete(ids[index]) for index in members],
            "rewards": {name: [score.value for score in own] for name, own in scores.items()},
            "reasons": {name: own for name, own in reasons.items() if any(own)},
            **_describe_episodes(batch, members),
        }

    def _show_prompt(self, batch: Batch, index: int, key: Hashable) -> Any:
        prompt, images = batch.prompts[index], batch.columns.get(IMAGES)
        if self._thumbnails is None or images is None:
            return prompt
        return self._thumbnails.name_images(prompt, key, lambda: images[index])


def _describe_episodes(batch: Batch, members: Sequence[int]) -> dict[str, Any]:
    """Return the messages and records of episodes; nothing if a completion is one answer."""
    records = batch.columns.get(EPISODE)
    if records is None:
        return {}
    return {
        "messages": [batch.completions[index] for index in members],
        "clipped": [is_clipped(records[index]["end"]) for index in members],
        "episodes": [records[index] for index in members],
    }


class EarlyScores(NamedTuple):
    """A reward's scores of some rows, in their order."""

    scores: list[Score]
    seconds: float
    logged: Sequence[tuple[str, tuple[Any, ...]]] = ()
    """Calls of `_LOGGERS`, to be made when the scores are taken."""


class _Part(NamedTuple):
    batch: Batch
    scores: dict[str, "Future[EarlyScores]"]
    """By reward."""


class EarlyScoring:
    """Samples a batch in parts of whole groups; rewards that wait score each part in a thread meanwhile.

    The whole batch is sampled from the same weights; only the time of scoring changes. If TRL passes on other
    completions than were scored here, these scores are discarded and the rewards are called again.
    """

    def __init__(self, rewards: Sequence[Reward], parts: int = 1) -> None:
        self._rewards = [reward for reward in rewards if reward.waits]
        self._count = parts
        self._work: SimpleQueue[tuple[Reward, _Part]] | None = None
        self._rows: Rows | None = None
        self._state: Any = None
        self._parts: list[_Part] = []

    @contextmanager
    def expecting(self, rows: Rows | None, state: Any) -> Iterator[None]:
        """Score early what is sampled inside from `rows`, groups side by side; None scores nothing."""
        self._rows, self._state = (rows if self._rewards else None), state
        try:
            yield
        finally:
            for future in chain.from_iterable(part.scores.values() for part in self._parts):
                future.cancel()
            self._rows, self._parts = None, []

    def sample(
        self,
        draw: Callable[[slice], Sampled],
        reader: CompletionReader,
        prompt_ids: Ids,
        group: int,
    ) -> Sampled:
        """Sample a batch by `draw`, and start scoring each part when it is complete."""
        size = len(prompt_ids)
        if self._rows is None or len(self._rows) != size:
            return draw(slice(0, size))
        ids: list[list[int]] = []
        logprobs: list[list[float]] | None = []
        for part in cut(size, group, self._count):
            sampled, part_logprobs = draw(part)
            ids += sampled
            logprobs = None if part_logprobs is None else [*(logprobs or []), *part_logprobs]
            prompts = [row["prompt"] for row in self._rows[part]]
            completions = read_completions(reader, prompts, prompt_ids[part], sampled)
            self._start(self._rows[part], prompts, completions, sampled)
        return ids, logprobs

    def take(self, reward: Reward, batch: Batch) -> EarlyScores | None:
        """Wait for a reward's scores of a batch, or its error; None if it was not scored early."""
        parts = [part for part in self._parts if reward.name in part.scores]
        scored = [each for part in parts for each in part.batch.completions]
        if not parts or scored != list(batch.completions):
            return None
        results = [part.scores[reward.name].result() for part in parts]
        for name, arguments in chain.from_iterable(result.logged for result in results):
            batch.extra[name](*arguments)
        scores = [score for result in results for score in result.scores]
        return EarlyScores(scores, sum(result.seconds for result in results))

    def _start(self, rows: Rows, prompts: list[Any], completions: list[Any], ids: Ids) -> None:
        batch = make_batch(rows, prompts, completions, ids)
        part = _Part(batch, {reward.name: Future() for reward in self._rewards})
        self._parts.append(part)
        if self._work is None:
            self._work = SimpleQueue()
            # Not a pool of concurrent.futures: a process does not end before its threads do.
            thread = threading.Thread(target=self._serve, name="grpo-scoring", daemon=True)
            thread.start()
        for reward in self._rewards:
            self._work.put((reward, part))

    def _serve(self) -> None:
        while self._work is not None:
            reward, part = self._work.get()
            future = part.scores[reward.name]
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._score(reward, part.batch))
            except BaseException as error:  # for the thread that waits
                future.set_exception(error)

    def _score(self, reward: Reward, batch: Batch) -> EarlyScores:
        logged: list[tuple[str, tuple[Any, ...]]] = []

        def record(name: str) -> Callable[..., None]:
            return lambda *arguments: logged.append((name, arguments))

        extra = {"trainer_state": self._state, **{name: record(name) for name in _LOGGERS}}
        return _timed_scores(reward, replace(batch, extra=extra))._replace(logged=logged)


def _timed_scores(reward: Reward, batch: Batch) -> EarlyScores:
    started = time.perf_counter()
    scores = reward.score(batch)
    return EarlyScores(scores, time.perf_counter() - started)


def cut(size: int, group: int, parts: int) -> list[slice]:
    """Cut a batch into at most `parts` even parts of whole groups; one that splits a group stays whole."""
    if size % group:
        return [slice(0, size)]
    groups = size // group
    parts = min(parts, groups)
    edges = [groups * edge // parts * group for edge in range(parts + 1)]
    return [slice(*each) for each in pairwise(edges)]


def read_completions(
    reader: CompletionReader, prompts: Sequence[Any], prompt_ids: Ids, completion_ids: Ids
) -> list[Any]:
    """Return completions as `GRPOTrainer` passes them to rewards: texts, or lists of one message.

    Source: `GRPOTrainer._generate`.
    """
    conversational = is_conversational({"prompt": prompts[0]})
    tokenizer, templates = reader.tokenizer, ("response_template", "response_schema")
    parses = any(getattr(tokenizer, name, None) is not None for name in templates)
    if conversational and parses and reader.skip_special_tokens:
        return [
            [parse_response(tokenizer, ids, prefix=prefix)]
            for ids, prefix in zip(completion_ids, prompt_ids, strict=True)
        ]
    texts = [reader.decode(ids) for ids in completion_ids]
    return [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts


class RewardFunction:
    """One reward as TRL calls it; `__name__` is what TRL logs it under."""

    def __init__(
        self, reward: Reward, log: CompletionLog, early: EarlyScoring, seed: str, *, first: bool
    ) -> None:
        self.reward = reward
        self.log = log
        self._early = early
        self._seed = f"{seed}:{reward.name}"
        self._calls: dict[bool, tuple[int, int]] = {}
        """In training and in evaluation: the step of the last call, and its number in that step."""
        # The first reward measures the batch as well.
        self._first = first
        self.logs_in_evaluation = False
        """Whether it logs metrics in evaluations, which are of all their batches."""
        self.__name__ = reward.name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **more: Any,
    ) -> list[float | None]:
        """Score a batch; see `Reward.score` for what it raises."""
        step = more["trainer_state"].global_step
        batch = _as_batch(prompts, completions, completion_ids, more)
        extra = dict(batch.extra)
        if not self.log.is_training():
            extra["log_metric"] = self._note_log
        batch = replace(batch, seed=self._next_seed(step), extra=extra)
        scored = self._early.take(self.reward, batch) or _timed_scores(self.reward, batch)
        self.log.add(self.reward.name, batch, scored.scores, step=step)
        if "log_metric" in more:
            for name, value in self._metrics(batch, scored):
                more["log_metric"](name, value)
        return [score.value for score in scored.scores]

    def _note_log(self, name: str, value: Any) -> None:
        self.logs_in_evaluation = True

    def _metrics(self, batch: Batch, scored: EarlyScores) -> Iterator[tuple[str, float]]:
        """Yield what TRL averages over the processes and puts beside its own reward metrics."""
        prefix = f"rewards/{self.reward.name}"
        yield f"{prefix}/seconds", scored.seconds
        if self._first and (repeated := _repeated_share(batch)) is not None:
            yield "completions/repeated_share", repeated
        if self.reward.on_error != "raise":
            failed = sum(score.failed for score in scored.scores)
            yield f"{prefix}/error_share", failed / max(len(scored.scores), 1)

    def _next_seed(self, step: int) -> str:
        training = self.log.is_training()
        last, number = self._calls.get(training, (-1, 0))
        number = number + 1 if last == step else 0
        self._calls[training] = step, number
        return f"{self._seed}:{'train' if training else 'eval'}:{step}:{number}"


class NoReward:
    """What TRL calls if only a teacher teaches: it logs completions, and scores all the same."""

    def __init__(self, log: CompletionLog) -> None:
        self.log = log
        self.__name__ = NO_REWARD

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **more: Any,
    ) -> list[float | None]:
        """Return 0 for each completion."""
        batch = _as_batch(prompts, completions, completion_ids, more)
        self.log.add(NO_REWARD, batch, (), step=more["trainer_state"].global_step)
        if (repeated := _repeated_share(batch)) is not None:
            more["log_metric"]("completions/repeated_share", repeated)
        return [0.0] * len(completions)


def _as_batch(
    prompts: Any, completions: Any, completion_ids: Any, more: Mapping[str, Any]
) -> Batch:
    return Batch(
        prompts=[without_images(prompt) for prompt in prompts],
        completions=completions,
        completion_ids=completion_ids,
        columns={key: value for key, value in more.items() if key not in _NOT_COLUMNS},
        extra={key: value for key, value in more.items() if key in _NOT_COLUMNS},
    )


def make_batch(rows: Rows, prompts: Any, completions: Any, completion_ids: Any) -> Batch:
    """Return completions with the rows that they answer."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _TEXTS}
    return _as_batch(prompts, completions, completion_ids, columns)


def _row_ids(batch: Batch) -> Sequence[Any]:
    return batch.columns.get("row_id", range(len(batch.completions)))


def _repeated_share(batch: Batch) -> float | None:
    """Share of this process's completions that equal another of their group; None without groups."""
    rows = _row_ids(batch)
    if len(set(rows)) == len(batch.completions):
        return None
    # All messages of an episode: many end with the same answer.
    counts = Counter(zip(rows, map(str, batch.completions), strict=True))
    return sum(count for count in counts.values() if count > 1) / len(batch.completions)


def build_reward_functions(
    rewards: Sequence[Reward], log: CompletionLog, early: EarlyScoring, seed: str
) -> list[Callable[..., list[float | None]]]:
    """Return the list that `GRPOTrainer` takes as `reward_funcs`."""
    return [
        RewardFunction(reward, log, early, seed, first=index == 0)
        for index, reward in enumerate(rewards)
    ] or [NoReward(log)]
