"""From a recipe's list to rewards that score: names, parameters, time limits, and what they know of the recipe."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from grpo_cli.batch.plan import BatchPlan, batch_inputs, plan_batch
from grpo_cli.errors import GrpoError, RewardError, SetupError
from grpo_cli.machine import read_hardware, resolve_num_processes
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.contract import (
    Batch,
    DescribedError,
    Meta,
    RewardContext,
    RewardParams,
    Score,
    TimeLimit,
)
from grpo_cli.rewards.registry import find_kind, kind_names
from grpo_cli.rewards.scoring import Condition, Reward, clip_score, explain_build, has_state

if TYPE_CHECKING:
    from grpo_cli.rewards.pool import WorkerPool


def build_rewards(configs: Sequence[RewardConfig], context: RewardContext) -> list[Reward]:
    """Build a recipe's rewards, in order; imports what they need.

    Args:
        configs: The recipe's `rewards`.
        context: What rewards may know about the recipe.

    Raises:
        RewardError: A kind or its parameters are wrong (`checks` reports these with their
            lines), or a user's module cannot be imported.
        SetupError: A kind's library is not installed.
    """
    from grpo_cli.rewards.pool import WorkerPool

    pool = WorkerPool()
    rewards = []
    for index, (config, name) in enumerate(zip(configs, name_rewards(configs), strict=True)):
        # Of plain values, so that another process can build the same reward.
        build = partial(_build_reward, config, name, context, f"rewards.{index}", is_checked=True)
        try:
            reward = build(is_checked=False)
            limit = _time_limit(config, reward)
            if limit is not None:
                reward = replace(reward, scorer=_LimitedScorer(reward, build, limit, pool))
            rewards.append(reward)
        except GrpoError as error:
            error.path = f"rewards.{index}.{error.path}".rstrip(".")
            raise
    return rewards


def right_scores(configs: Sequence[RewardConfig]) -> dict[str, float]:
    """Return the score of a right answer by name, for each reward that is declared to judge answers."""
    scores = {
        name: _right_score(config, _best_answer(config))
        for name, config in zip(name_rewards(configs), configs, strict=True)
    }
    return {name: score for name, score in scores.items() if score is not None}


def right_answers(configs: Sequence[RewardConfig], named: str | None) -> dict[str, float]:
    """Return the same of the reward that is named, whose best score is 1 if it does not judge answers; of all
    that do if none is named."""
    right = right_scores(configs)
    return {named: right.get(named, 1.0)} if named else right


def _best_answer(config: RewardConfig) -> float | None:
    params = find_kind(config.kind)
    meta = params.meta if params else Meta()
    if config.accuracy:
        highest = meta.range[1]
        return meta.right_answer or (highest if math.isfinite(highest) else 0) or 1.0
    return meta.right_answer if config.accuracy is None else None


def _right_score(config: RewardConfig, best: float | None) -> float | None:
    """Return the clipped score of a right answer; None if there is none, or wrong answers get the same."""
    if best is None or clip_score(best, config.clip) == clip_score(0.0, config.clip):
        return None
    return clip_score(best, config.clip)


def name_rewards(configs: Sequence[RewardConfig]) -> list[str]:
    """Return the rewards' names: their own, or their kind's default, with `_2`, `_3`, … if it is taken."""
    taken = {config.name for config in configs if config.name is not None}
    names = []
    for config in configs:
        params = find_kind(config.kind)
        written = config.params.get(params.meta.named_by, "") if params else ""
        function = str(written).rpartition(":")[2]
        default = function if function.isidentifier() else config.kind
        default = f"{default}_{config.source}" if config.source else default
        name, number = config.name or default, 2
        while config.name is None and name in taken:
            name, number = f"{default}_{number}", number + 1
        taken.add(name)
        names.append(name)
    return names


def _build_reward(
    config: RewardConfig, name: str, context: RewardContext, path: str, *, is_checked: bool
) -> Reward:
    params, subject = _read_params(config, name), f"reward {name!r} ({config.kind})"
    try:
        if not is_checked:
            refuse(params, context)
        scorer = params.build(context)
    except (RewardError, SetupError) as error:
        raise error.about(subject) from error
    except (Exception, SystemExit) as error:
        key = "path" if config.kind == "python" else ""
        raise explain_build(RewardError, subject, error, key) from error
    return Reward(
        name,
        config.weight,
        config.kind,
        params,
        scorer,
        on_error=config.on_error,
        clip=config.clip,
        condition=Condition(config.condition) if config.condition else None,
        waits=waits(params, config.timeout_s),
        right_answer=_right_score(config, _best_answer(config)),
        reads=config.reads,
        path=path,
        trainer_state=context.trainer_state(),
    )


def waits(params: RewardParams, timeout_s: float | None) -> bool:
    """Return whether a reward mostly waits for something outside, or for processes that `timeout_s` starts."""
    return params.details().waits or (timeout_s is not None and params.time_limit() is None)


def refuse(params: RewardParams, context: RewardContext) -> None:
    """Raise the first error of `problems`: a `SetupError` for a missing package, else a `RewardError`."""
    for issue in params.problems(context):
        if issue.level == "error":
            error = SetupError if issue.package else RewardError
            raise error(str(issue), issue.path)


def _read_params(config: RewardConfig, name: str) -> RewardParams:
    params = find_kind(config.kind)
    if params is None:
        fix = f"use one of {', '.join(kind_names())}"
        raise RewardError(f"reward {name!r}: there is no kind {config.kind!r}", fix)
    try:
        return params.model_validate(config.params)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, each['loc'])) or 'parameters'}: {each['msg']}"
            for each in error.errors()
        ]
        raise RewardError(f"reward {name!r} ({config.kind}): {'; '.join(faults)}") from error


def _time_limit(config: RewardConfig, reward: Reward) -> TimeLimit | None:
    limit = reward.params.time_limit()
    if config.timeout_s is not None:
        limit = (limit or TimeLimit(0))._replace(seconds=config.timeout_s)
    if limit is not None and has_state(reward):
        raise RewardError(
            f"reward {reward.name!r} has a state, and `timeout_s` scores in several processes that would have one "
            "each",
            "remove `timeout_s`, or state_dict() and load_state_dict()",
            path="timeout_s",
        )
    return limit


@dataclass(frozen=True)
class _LimitedScorer:
    """Scores easy rows here, and the others in the pool under a time limit."""

    reward: Reward
    build: Callable[[], Reward]
    limit: TimeLimit
    pool: "WorkerPool"

    def __call__(self, batch: Batch) -> list[Score | Exception]:
        easy = self.limit.score_easily
        results: list[Any] = [easy(batch, row) for row in range(len(batch.completions))]
        hard = [row for row, score in enumerate(results) if score is None]
        name = self.reward.name
        calls = [(name, self.build, _portable(batch.take([row]))) for row in hard]
        outcomes = self.pool.run(
            _score_in_worker, calls, self.limit.seconds, name, prepare=_score_empty
        )
        for row, outcome in zip(hard, outcomes, strict=True):
            results[row] = self._read(outcome, batch, row)
        return results

    def _read(self, outcome: Score | Exception, batch: Batch, row: int) -> Score | Exception:
        if isinstance(outcome, Score | DescribedError):
            return outcome
        late = isinstance(outcome, TimeoutError)
        reason = f"took longer than {self.limit.seconds:g} s"
        if not late:
            reason = f"ended the process that scored it ({outcome})"
        if self.limit.late_score is not None:
            return Score(self.limit.late_score, reason, late=True)
        error = RewardError(reason)
        if late:
            error = RewardError(reason, "raise `timeout_s`, or let it return sooner", "timeout_s")
        failure = self.reward.failure(batch, [row], error)
        failure.late = late
        return failure


def _portable(batch: Batch) -> Batch:
    """Return the batch as another process can read it without transformers."""
    state = batch.extra.get("trainer_state")
    plain = int | float | str | None
    known = {
        name: value for name, value in vars(state or object).items() if isinstance(value, plain)
    }
    return replace(batch, extra={"trainer_state": SimpleNamespace(**known) if state else None})


_worker_rewards: dict[str, Reward] = {}
"""A worker's own rewards, by name; a pool belongs to one recipe."""


def _worker_reward(name: str, build: Callable[[], Reward]) -> Reward:
    if name not in _worker_rewards:
        _worker_rewards[name] = build()
    return _worker_rewards[name]


def _score_empty(name: str, build: Callable[[], Reward], batch: Batch) -> None:
    """Have a reward load what it loads once, by scoring an empty completion."""
    reward = _worker_reward(name, build)
    if reward.meta.waits:
        # One that asks a server has nothing to load, and a request may cost money.
        return
    is_text = isinstance(batch.completions[0], str)
    empty = "" if is_text else [{"role": "assistant", "content": ""}]
    reward.try_score(replace(batch, completions=[empty]))


def _score_in_worker(name: str, build: Callable[[], Reward], batch: Batch) -> Score | RewardError:
    """Return the score of a batch of one row, or its failure."""
    try:
        return _worker_reward(name, build).try_score(batch)[0]
    except (GrpoError, KeyboardInterrupt) as error:
        own = error if isinstance(error, GrpoError) else RewardError(repr(error))
        return DescribedError(own.seen, own.fix, own.path, own.details)


def reward_context(
    recipe: Recipe,
    device: str = "cpu",
    train_rows: int | None = None,
    plan: BatchPlan | None = None,
) -> RewardContext:
    """Return what rewards may know about a recipe.

    Args:
        device: Of rewards that are models.
        train_rows: Prompts of an epoch, which say how many steps are planned if `max_steps` does not; None if they
            are not known.
        plan: Of the training, if that has begun; `train_rows` is not needed then.
    """
    training = recipe.training
    if plan is None:
        processes = resolve_num_processes(recipe, read_hardware())
        plan = plan_batch(batch_inputs(recipe, processes, train_rows))
    steps = training.max_steps if training.max_steps > 0 else plan.total_optimizer_steps or 1
    epochs = training.num_train_epochs
    if training.max_steps > 0 and plan.optimizer_steps_per_epoch:
        epochs = steps / plan.optimizer_steps_per_epoch
    length = recipe.generation.max_completion_length
    return RewardContext(length, device, steps, math.ceil(epochs))
