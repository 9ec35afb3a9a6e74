"""Groups of completions, sampled from a vLLM server and scored while the trainer learns.

Implements `RolloutWorkerProtocol` of trl 1.16. TRL's own worker scores in another process, to which rewards would
have to be sent. TRL discards samples of weights that are too old.
"""

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy
import requests
from requests.adapters import HTTPAdapter
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from urllib3 import Retry

from grpo_cli.errors import RunError
from grpo_cli.recipe.generation import GenerationConfig, stop_params
from grpo_cli.rewards.contract import Batch
from grpo_cli.rewards.scoring import Reward, are_equal, weighted_sum
from grpo_cli.training.rollout.dynamic_sampling import shuffled_rows
from grpo_cli.training.rollout.step import CompletionLog
from grpo_cli.upstream.trl import (
    CLIPPED_RATIO,
    FRAC_ZERO_STD,
    MEAN_LENGTH,
    REWARD,
    REWARD_STD,
    reward_metric,
)

_POLL_S = 0.05
_EPSILON = 1e-4
"""Added to a group's standard deviation; as `GRPOTrainer` does."""
_RETRIES = 2
MAX_WORKERS = 64
"""Largest number of groups that are sampled at a time."""
SERVER_TIMEOUT_S = 3600.0
"""Longest wait for a response: while weights are sent, requests wait."""


class Sampled(NamedTuple):
    """One completion from a sampler."""

    token_ids: list[int]
    """With the end-of-sequence token, if there is one."""
    logprobs: list[float]
    """Of each token, under the weights that sampled it."""
    clipped: bool


class ServerSampler:
    """Samples from the vLLM server at an address (0.31, `/v1/completions`); thread-safe."""

    def __init__(self, address: str, generation: GenerationConfig, seed: int) -> None:
        self._address = address
        self._seeds = random.Random(seed)
        self._http = requests.Session()
        # A lost connection loses no weights: try again.
        retries = Retry(_RETRIES, allowed_methods=None)
        self._http.mount("http", HTTPAdapter(max_retries=retries, pool_maxsize=MAX_WORKERS))
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        settings = {name: getattr(generation, name) for name in names}
        self._settings = {
            **{name: value for name, value in settings.items() if value is not None},
            **stop_params(generation.reading["stop_strings"]),
            "max_tokens": generation.max_completion_length,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def __call__(self, prompt_ids: Sequence[int], count: int) -> list[Sampled]:
        """Return `count` completions of one prompt.

        Raises:
            RunError: The server has gone, or refuses.
        """
        if "model" not in self._settings:
            self._settings["model"] = self._request("get", "/v1/models")["data"][0]["id"]
        body = {"prompt": list(prompt_ids), "n": count, "seed": self._seeds.randrange(2**63)}
        answer = self._request("post", "/v1/completions", {**self._settings, **body})
        return [
            Sampled(
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                choice["finish_reason"] == "length",
            )
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        url = f"{self._address}{path}"
        try:
            response = self._http.request(method, url, json=body, timeout=SERVER_TIMEOUT_S)
        except requests.ConnectionError as error:
            raise RunError(
                f"the vLLM server at {self._address} has gone ({type(error).__name__}); an asynchronous "
                "training cannot continue without it",
                "see its log in logs/, then use --resume",
            ) from error
        if not response.ok:
            raise RunError(
                f"the vLLM server at {self._address} answered {response.status_code}: {response.text[:300]}",
                "follow its message; see its log in logs/",
            )
        return response.json()


@dataclass
class Rollouts:
    """Threads that sample and score groups, and the queue that TRL empties."""

    rows: Sequence[Mapping[str, Any]]
    group: int
    """Completions of a prompt."""
    ahead: int
    """Completions that may be sampled and not yet learned from."""
    seed: int
    sampler: Callable[[Sequence[int], int], list[Sampled]]
    """Called from several threads at once."""
    rewards: Sequence[Reward]
    encode: Callable[[Any], list[int]]
    read: Callable[[Any, Sequence[int], Sequence[Sequence[int]]], list[Any]]
    """Returns a prompt's completions as rewards take them, from its tokens and theirs."""
    while_waiting: Callable[[], None]
    """Called repeatedly while the trainer waits; ends the training by raising."""
    log: CompletionLog | None = None
    first: int = 0
    """Groups that were learned from before."""
    rollout_buffer: "queue.Queue[RolloutSample]" = field(default_factory=queue.Queue)
    metrics_queue: "queue.Queue[dict[str, float]]" = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._version = 0
        self._failure: BaseException | None = None
        self._progress = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.scoring = threading.Lock()
        """Rewards are called by one thread at a time."""
        self._under_way = 0
        self._read_state: Callable[[], Any] = lambda: None

    def follow(self, read_state: Callable[[], Any]) -> None:
        """Score with the state of a trainer from now on, a `TrainerState`, and log by its steps."""
        self._read_state = read_state

    def order(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the groups' numbers and prompts, epoch after epoch, without end."""
        places = shuffled_rows(len(self.rows), self.seed, self.first)
        return ((number, self.rows[place]) for number, place in enumerate(places, self.first))

    def start(self) -> None:
        """Start the threads; they end with the process."""
        self._order = self.order()
        self._progress = time.monotonic()
        for _ in range(max(1, min(MAX_WORKERS, self.ahead // self.group))):
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Let the threads end after their current group."""
        self._ended.set()

    def update_model_version(self, model_version: int) -> None:
        """Note which weights samples come from, from now on."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no more samples will come; TRL calls it while it waits for some.

        Raises:
            RunError: Nothing was sampled or scored for too long.
        """
        self.while_waiting()
        if self._failure is not None:
            raise self._failure
        still_s = time.monotonic() - self._progress
        if still_s > stale_after_s:
            raise RunError(
                f"no completion was sampled or scored for {still_s:.0f} s",
                "see the server's log in logs/, then use --resume",
            )

    def _run(self) -> None:
        try:
            while (turn := self._take_turn()) is not None:
                version = self._version
                sampled = self.sampler(turn.prompt_ids, self.group)
                self._progress = time.monotonic()
                with self.scoring:
                    if self._ended.is_set():
                        return
                    samples = self._make_samples(turn, sampled, version)
                with self._lock:
                    for sample in samples:
                        self.rollout_buffer.put(sample)
                    self._under_way -= 1
                self._progress = time.monotonic()
        except BaseException as error:  # for the trainer's thread
            self._failure = self._failure or error
            self._ended.set()

    def _take_turn(self) -> "_Turn | None":
        """Return the next group, as soon as there is room for it; None at the end."""
        while not self._ended.is_set():
            with self._lock:
                waiting = self.rollout_buffer.qsize() + self._under_way * self.group
                if waiting + self.group <= self.ahead:
                    self._under_way += 1
                    self._progress = time.monotonic()
                    number, row = next(self._order)
                    return _Turn(number, row, self.encode(row["prompt"]))
            self._ended.wait(_POLL_S)
        return None

    def _make_samples(
        self, turn: "_Turn", sampled: list[Sampled], version: int
    ) -> list[RolloutSample]:
        batch = self._make_batch(turn, [each.token_ids for each in sampled])
        judged = {reward.name: reward.score(batch) for reward in self.rewards}
        if self.log is not None:
            self.log.add(batch, judged, step=self._read_state().global_step)
        columns = [[score.value for score in scores] for scores in judged.values()]
        values = list(zip(*columns, strict=True))
        totals, advantages, spread = group_advantages(
            [each.weight for each in self.rewards], values
        )
        names = [reward_metric(reward.name) for reward in self.rewards]
        return [
            RolloutSample(
                prompt=turn.row["prompt"],
                completion=completion,
                advantage=advantage,
                model_version=version,
                group_id=turn.number,
                metrics={
                    REWARD: total,
                    REWARD_STD: spread,
                    FRAC_ZERO_STD: float(spread == 0),
                    **dict(zip(names, map(_or_nan, scores), strict=True)),
                    MEAN_LENGTH: float(len(each.token_ids)),
                    CLIPPED_RATIO: float(each.clipped),
                },
                enqueued_at=time.time(),
                **_tokens(turn.prompt_ids, each),
            )
            for each, completion, scores, total, advantage in zip(
                sampled, batch.completions, values, totals, advantages, strict=True
            )
        ]

    def _make_batch(self, turn: "_Turn", ids: list[list[int]]) -> Batch:
        prompt, size = turn.row["prompt"], len(ids)
        with self._lock:  # the tokenizer is not thread-safe
            completions = self.read(prompt, turn.prompt_ids, ids)
        return Batch(
            prompts=[prompt] * size,
            completions=completions,
            completion_ids=ids,
            columns={name: [value] * size for name, value in turn.row.items() if name != "prompt"},
            extra={"trainer_state": self._read_state()},
        )


class _Turn(NamedTuple):
    number: int
    row: Mapping[str, Any]
    prompt_ids: list[int]


def group_advantages(
    weights: Sequence[float], scores: Sequence[Sequence[float | None]]
) -> tuple[list[float], list[float], float]:
    """Return totals and advantages of a group, and the standard deviation of its totals.

    A completion that no reward scored has a total of NaN and an advantage of 0.

    Source: `GRPOTrainer` (trl 1.16.0) with `scale_rewards: group`.
    """
    totals = [_or_nan(weighted_sum(weights, values)) for values in scores]
    scale = max(
        sum(abs(weight * (value or 0.0)) for weight, value in zip(weights, values, strict=True))
        for values in scores
    )
    if are_equal(totals, scale):
        return totals, [0.0] * len(totals), 0.0
    known = [total for total in totals if not math.isnan(total)]
    mean, spread = fmean(known), stdev(known)
    advantages = [(total - mean) / (spread + _EPSILON) for total in totals]
    return totals, [0.0 if math.isnan(each) else each for each in advantages], spread


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _tokens(prompt_ids: list[int], sampled: Sampled) -> dict[str, numpy.ndarray]:
    prompt, completion = len(prompt_ids), len(sampled.token_ids)
    logprobs = [0.0] * prompt + sampled.logprobs
    return {
        "input_ids": numpy.array([*prompt_ids, *sampled.token_ids]),
        "completion_mask": numpy.array([0] * prompt + [1] * completion),
        "old_log_probs": numpy.array(logprobs, dtype=numpy.float32),
    }
