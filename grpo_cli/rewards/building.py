"""From a recipe's list to rewards that score: parameters read, names given, time limits put on.

Owns building, and the way of a row into another process and back. How scores are checked is
`scoring.py`'s, how processes live and die is `pool.py`'s.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

from pydantic import ValidationError

from grpo_cli.errors import GrpoError, RewardError, SetupError, nearest
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards import failures
from grpo_cli.rewards.conditions import Condition
from grpo_cli.rewards.contract import (
    Batch,
    DescribedError,
    RewardContext,
    RewardParams,
    Score,
)
from grpo_cli.rewards.pool import Died, Late, WorkerPool
from grpo_cli.rewards.registry import KINDS
from grpo_cli.rewards.scoring import Reward, has_state, right_score


def build_rewards(configs: Sequence[RewardConfig], context: RewardContext) -> list[Reward]:
    """Builds a recipe's rewards, in order; imports what they need.

    Args:
        configs: The recipe's `rewards`.
        context: What rewards may know about the recipe.

    Raises:
        RewardError: A kind or its parameters are wrong (`checks` reports these with their
            lines), names repeat, or a user's module cannot be imported.
        SetupError: A kind's library is not installed.
    """
    names = name_rewards(configs)
    origins = [Origin(*each, context) for each in zip(configs, names, strict=True)]
    pool = WorkerPool(_prepare, (tuple(origin for origin in origins if _limit_of(origin)),))
    rewards = []
    for index, origin in enumerate(origins):
        try:
            rewards.append(_limited(build_reward(origin), origin, pool))
        except GrpoError as error:
            error.path = f"rewards.{index}.{error.path}".rstrip(".")
            raise
    return rewards


def right_scores(
    configs: Sequence[RewardConfig], scores: Iterable[Mapping[str, float | None]] = ()
) -> dict[str, float]:
    """Return for each reward that judges answers, by name, the score of a right one; build none.

    Args:
        configs: The recipe's `rewards`.
        scores: Of completions, by reward: a `python` function that does not say whether it judges answers does so
            if it gives them 0 and 1 alone.
    """
    undecided = {id(each) for each in configs if each.kind == "python" and each.accuracy is None}
    # They may come from files, which are read only if they decide something.
    seen = list(scores) if undecided else []
    found = {}
    for name, config in zip(name_rewards(configs), configs, strict=True):
        score = _right_score(config)
        if id(config) in undecided:
            judges = all(each.get(name) in (None, 0, 1) for each in seen)
            score = right_score(1.0, config.clip) if judges else None
        if score is not None:
            found[name] = score
    return found


def _right_score(config: RewardConfig) -> float | None:
    """The score of a right answer, as far as the recipe tells."""
    schema = KINDS[config.kind]
    best = schema.right_answer
    if config.accuracy is not None:
        best = (best or schema.highest or 1.0) if config.accuracy else None
    return right_score(best, config.clip)


def name_rewards(configs: Sequence[RewardConfig]) -> list[str]:
    """The rewards' names: their own, else their kind's usual one, with `_2`, `_3`, … where that is taken.

    Raises:
        RewardError: Two rewards were given the same name.
    """
    given = Counter(config.name for config in configs if config.name is not None)
    repeated = [name for name, count in given.items() if count > 1]
    if repeated:
        raise RewardError(f"two rewards have the name {repeated[0]!r}. Fix: rename one of them")
    taken = set(given)
    names = []
    for config in configs:
        schema = KINDS.get(config.kind)
        usual = schema.default_name(config.params) if schema else config.kind
        name = config.name or _free_name(usual, taken)
        taken.add(name)
        names.append(name)
    return names


def _free_name(kind: str, taken: set[str]) -> str:
    if kind not in taken:
        return kind
    number = 2
    while f"{kind}_{number}" in taken:
        number += 1
    return f"{kind}_{number}"


@dataclass(frozen=True)
class Origin:
    """What a reward is made of; plain values, so that another process can make the same one."""

    config: RewardConfig
    name: str
    context: RewardContext


def build_reward(origin: Origin) -> Reward:
    """Makes one reward, without its time limit; raises what `build_rewards` raises."""
    config, name = origin.config, origin.name
    params = _read_params(config, name)
    try:
        scorer = params.build(origin.context)
    except (RewardError, SetupError) as error:
        raise type(error)(f"reward {name!r} ({config.kind}): {error}", error.path) from error
    except (Exception, SystemExit) as error:
        path = "path" if config.kind == "python" else ""
        raise RewardError(failures.of_build(name, config.kind, error), path) from error
    for path, message, fix in params.conflicts(origin.context):
        raise RewardError(f"reward {name!r} ({config.kind}): {path} {message}. Fix: {fix}", path)
    condition = Condition(config.when) if config.when else None
    waits = params.waits(limited=config.timeout_s is not None)
    return Reward(
        name,
        config.weight,
        config.kind,
        params,
        scorer,
        config.on_error,
        config.clip,
        condition,
        waits,
        _right_score(config),
    )


def _limit_of(origin: Origin) -> float | None:
    limit = origin.config.timeout_s
    return limit or _read_params(origin.config, origin.name).default_timeout_s()


def _limited(reward: Reward, origin: Origin, pool: WorkerPool) -> Reward:
    """The reward under its time limit: easy rows are scored here, the others in the pool."""
    limit = _limit_of(origin)
    if limit is None:
        return reward
    if has_state(reward):
        raise RewardError(
            f"reward {reward.name!r} has a state, and `timeout_s` scores in several processes that would have one "
            "each. Fix: remove `timeout_s`, or state_dict() and load_state_dict()",
            "timeout_s",
        )

    def scorer(batch: Batch) -> list[Score | Exception]:
        rows = range(len(batch.completions))
        results: list[Score | Exception | None] = [
            reward.params.score_easily(batch, row) for row in rows
        ]
        hard = [row for row in rows if results[row] is None]
        calls = [(origin, _portable(batch.take([row]))) for row in hard]
        for row, outcome in zip(hard, pool.run(_score_apart, calls, limit), strict=True):
            results[row] = _settle(outcome, reward, batch, row)
        return [result for result in results if result is not None]

    return replace(reward, scorer=scorer)


def _settle(outcome: object, reward: Reward, batch: Batch, row: int) -> Score | Exception:
    """What a row's call in another process comes to."""
    if isinstance(outcome, Score):
        return outcome
    if isinstance(outcome, str):
        return DescribedError(outcome)
    if isinstance(outcome, Late):
        what = f"took longer than {outcome.timeout_s:g} s"
    else:
        code = outcome.exit_code if isinstance(outcome, Died) else None
        what = f"ended the process that scored it (exit code {code})"
    late = reward.params.late_score()
    if late is not None:
        return Score(late, what)
    return DescribedError(failures.of_row(reward, batch, row, RewardError(what)))


def _portable(batch: Batch) -> Batch:
    """The batch as another process can read it without transformers."""
    state = batch.extra.get("trainer_state")
    plain = int | float | str | None
    known = {
        name: value for name, value in vars(state or object).items() if isinstance(value, plain)
    }
    return replace(batch, extra={"trainer_state": SimpleNamespace(**known) if state else None})


_built: dict[str, Reward] = {}
"""A worker's own rewards by name; a pool belongs to one recipe."""


def _prepare(origins: Sequence[Origin]) -> None:
    for origin in origins:
        _built[origin.name] = reward = build_reward(origin)
        reward.params.warm_up()


def _score_apart(origin: Origin, batch: Batch) -> Score | str:
    """In a worker: the score of a batch of one row, or the text of its failure."""
    try:
        if origin.name not in _built:
            _prepare([origin])
        [result] = _built[origin.name].try_score(batch)
    except (GrpoError, KeyboardInterrupt) as error:
        return str(error) or repr(error)
    return result if isinstance(result, Score) else str(result)


def _read_params(config: RewardConfig, name: str) -> RewardParams:
    if config.kind not in KINDS:
        close = nearest(config.kind, KINDS)
        fix = f"kind: {close}" if close else f"use one of {', '.join(KINDS)}"
        raise RewardError(f"reward {name!r}: there is no kind {config.kind!r}. Fix: {fix}")
    try:
        return KINDS[config.kind].model_validate(config.params)
    except ValidationError as error:
        faults = [
            f"{'.'.join(str(part) for part in each['loc']) or 'parameters'}: {each['msg']}"
            for each in error.errors()
        ]
        raise RewardError(f"reward {name!r} ({config.kind}): {'; '.join(faults)}") from error
