"""Rewards in the cheap part of a probe: loaded, called as training calls them, and tried on made-up answers."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from grpo_cli.analysis.samples import score_samples
from grpo_cli.data.rows import suggest
from grpo_cli.environments.episode import add_empty_records
from grpo_cli.errors import RewardError
from grpo_cli.issues import Issue
from grpo_cli.machine import pick_device
from grpo_cli.probing import prompts
from grpo_cli.probing.session import HangError, Session
from grpo_cli.reward_test.findings import LONGEST_GOLD
from grpo_cli.reward_test.testing import try_rewards
from grpo_cli.rewards.building import build_rewards, reward_context
from grpo_cli.rewards.contract import Batch, DescribedError, Score
from grpo_cli.rewards.scoring import Reward, has_state, read_state, reward_columns
from grpo_cli.units import count_noun
from grpo_cli.user_code import time_limit

_QUICK_S = 10.0
"""Seconds that rewards may take in the quick probe, which every training waits for."""
_BATCH_S = 60.0
"""Seconds after which a function of the user's hangs that has no `timeout_s`."""
_COMPLETION_S = 5.0
"""The same for each completion, if there are many."""
_GROUP_S = 1.0
"""Seconds of scoring a group, beyond which it is not scored again beside another."""
_ENDPOINT_S = 5.0
"""Seconds that a judge's endpoint gets to answer."""


def check_rewards(session: Session, *, costly: bool) -> None:
    """Try the rewards on answers nobody sampled; a reward that fails is a finding, not the end."""
    session.tell("loading the rewards")
    recipe, failure = session.recipe, "rewards: failure"
    rows = session.data.report.train_rows
    context = reward_context(recipe, pick_device(recipe.launch), rows)
    built = build_rewards(recipe.rewards, context)
    rewards = session.rewards = tuple(
        _limit_time(reward) if reward.kind == "python" and config.timeout_s is None else reward
        for reward, config in zip(built, recipe.rewards, strict=True)
    )
    for index, reward in enumerate(rewards):
        path, why = f"rewards.{index}", "the first checkpoint would end the training"
        with session.failing("rewards: state", path, why=why):
            if has_state(reward):
                read_state(reward)
        session.add(_check_endpoint(reward, path))
    why = "it met answers that nobody sampled, one for each row; in training it would end the run"
    # A function of the user's may want whole groups, which the trial does not give it.
    own = [reward for reward in rewards if reward.kind == "python"]
    with session.failing(failure, "rewards"):
        places = (0, len(session.data.train) - 1)
        session.add(_score_group(session, own, places))
        try:
            session.add(_check_opening(session))
            if costly or not any(reward.meta.costly for reward in rewards):
                _try_rewards(session, None if costly else _QUICK_S)
        except (RewardError, HangError) as error:
            if isinstance(error, DescribedError) and error.row_id is not None:
                # Whether the row fails with a group of plain answers too.
                failed = [reward for reward in rewards if error.path.startswith(reward.path)]
                place = session.data.train["row_id"][:].index(error.row_id)
                _score_group(session, failed, (place, place))
            with session.failing(failure, "rewards", "warning" if own else "error", why):
                raise


def _limit_time(reward: Reward) -> Reward:
    """Return the reward; a call of it that does not end in time raises `HangError`."""

    @wraps(reward.scorer)
    def score(batch: Batch) -> Sequence[Score | Exception]:
        count = len(batch.completions)
        seconds = max(_BATCH_S, _COMPLETION_S * count)

        def describe(frame: FrameType | None) -> HangError:
            at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
            scored = f"{count_noun(count, 'completion')} in {seconds:g} s"
            seen = f"`{reward.name}` has not scored {scored}; it was at {at}"
            fix = "end its loops and waiting, or set `timeout_s`: what takes longer is then ended"
            return HangError(Issue(seen, fix, reward.path))

        with time_limit(describe) as start:
            start(seconds)
            return reward.scorer(batch)

    return replace(reward, scorer=score)


def _check_endpoint(reward: Reward, path: str) -> Iterator[Issue]:
    """Find a judge whose `base_url` does not answer; any answer of a server will do."""
    import httpx

    from grpo_cli.endpoints import request

    url = getattr(reward.params, "base_url", None)
    if not url:
        return
    address = f"{url.rstrip('/')}/models"
    try:
        response = request("GET", address, limit_s=_ENDPOINT_S)
        status = response.status_code
        yield from _check_judge_model(reward, response, path)
        failure = f"{address} answers 404" if status == httpx.codes.NOT_FOUND else ""
        fix = "correct `base_url` (it usually ends in /v1)"
    except httpx.HTTPError as error:
        failure = f"{url} does not answer ({error or type(error).__name__})"
        fix = "start the server, or correct `base_url`"
    if failure:
        silent = "404" not in failure and reward.on_error == "raise"
        yield Issue(
            f"`{reward.name}`: {failure}",
            fix,
            f"{path}.base_url",
            level="error" if silent else "warning",
            subject="rewards: endpoint",
            why="the judge would fail on the first completions",
        )


def _check_judge_model(reward: Reward, response: Any, path: str) -> Iterator[Issue]:
    """Find a model that an endpoint does not list, if it lists any."""
    try:
        names = [str(each["id"]) for each in response.json()["data"]]
    except (ValueError, TypeError, KeyError):
        return
    model = getattr(reward.params, "model", None)
    # Tags (Ollama's `:latest`) and folders (`models/`) may be left out.
    known = {short for name in names for short in (name, name.split(":")[0], name.split("/")[-1])}
    if response.is_success and names and model not in known:
        seen = f"`{reward.name}`: the endpoint does not list {model}; it has {', '.join(names[:5])}"
        fix, why = suggest(str(model), names, "name one of these"), "the first request would fail"
        subject, at = "rewards: endpoint", f"{path}.model"
        yield Issue(seen, fix, at, level="warning", subject=subject, why=why)


def _score_group(session: Session, rewards: Sequence[Reward], places: Sequence[int]) -> list[Issue]:
    """Score a group of plain answers as training will; find rewards that score it otherwise beside another.

    Raises:
        RewardError: A reward fails.
    """
    from grpo_cli.fast.completions import Completion

    size = session.recipe.generation.num_generations
    groups = [
        [
            Completion(text, tuple(session.encode(text)), clipped=False)
            for text in _write_answers(session, rewards, place, size, more)
        ]
        for place, more in zip(places, ("", " So it is."), strict=True)
    ]

    def score(
        rewards: Sequence[Reward], *chosen: int, backwards: bool = False
    ) -> list[dict[str, float | None]]:
        answers = [groups[n][::-1] if backwards else groups[n] for n in chosen]
        rows = _trial_rows(session, [places[n] for n in chosen])
        scored = score_samples(rewards, reward_columns(rows, rewards), answers)
        return [
            {name: value and round(value, 6) for name, value in each.rewards.items()}
            for each in scored
        ]

    started = time.monotonic()
    alone = score(rewards, 0)
    quick = [reward for reward in rewards if not reward.waits]
    if time.monotonic() - started > _GROUP_S or not quick:
        return []
    tries = {
        "again": score(quick, 0),
        "backwards": score(quick, 0, backwards=True),
        "other": score(quick, 1),
        "twice": score(quick, 1, 1),
        "beside": score(quick, 0, 1),
    }
    found = []
    for reward in quick:
        first = [row[reward.name] for row in alone]
        scores = {key: [row[reward.name] for row in each] for key, each in tries.items()}
        if first == scores["again"] and (fault := _find_batch_fault(reward, first, scores)):
            why = "scores then depend on what else is in the batch"
            found.append(replace(fault, subject="rewards: batch", why=why))
    return found


def _write_answers(
    session: Session, rewards: Sequence[Reward], place: int, count: int, more: str
) -> list[str]:
    """Return plain answers to a row; the first has what the row's columns tell the rewards."""
    row = session.data.train[place]
    names = [name for reward in rewards for name in reward.params.columns().named]
    cells = [str(row[name]) for name in names if isinstance(row.get(name), str | int | float)]
    short = [cell for cell in cells if 0 < len(cell) <= LONGEST_GOLD]
    # No other answer holds what the first one does.
    numbers = (n for n in range(10 * count) if not short or short[0] not in str(n))
    texts = [f"The answer is {n}." + more for n in islice(numbers, count)]
    if short:
        forms = f"<answer>{short[0]}</answer>\n\\boxed{{{short[0]}}}\n#### {short[0]}"
        texts[0] = f"The answer is {short[0]}.{more}\n{forms}"
    return texts


def _find_batch_fault(
    reward: Reward, first: Sequence[float | None], scores: Mapping[str, Sequence[float | None]]
) -> Issue | None:
    """Return what a reward's scores of one group, and of two, show; `first` are those of the group alone."""
    size, other, beside = len(first), scores["other"], scores["beside"]
    if len({*first}) == len({*scores["backwards"]}) == 1 and first != scores["backwards"]:
        seen = f"`{reward.name}` gives all answers to a prompt the score of the first one"
        fix = "score each completion by its own text, not by `completions[0]`"
        return Issue(seen, fix, reward.path, level="warning")
    if beside[:size] == first and beside[size:] != other and scores["twice"] == [*other, *other]:
        seen = f"`{reward.name}` scores the answers to a second prompt by another row's columns"
        fix = "take the columns at the completion's own place, such as `answer[i]`: each has a value a completion"
        return Issue(seen, fix, reward.path, level="warning")
    if beside[:size] != first:
        seen = f"`{reward.name}` scores the answers to a prompt otherwise beside those to another prompt"
        fix = "score each completion by itself, or compare it with those of its prompt only"
        return Issue(seen, fix, reward.path, level="note")
    return None


def _trial_rows(session: Session, places: Sequence[int] | None = None) -> Any:
    """Return rows for answers that nobody sampled; all by default."""
    train = session.data.train if places is None else session.data.train.select(places)
    if not session.recipe.has_episodes:
        return train
    return add_empty_records(train, has_images=session.recipe.has_images)


def _check_opening(session: Session) -> Iterable[Issue]:
    if session.probe.prompts is None:
        return []
    first = reward_columns(_trial_rows(session, [0]), session.rewards)
    row = Batch([first.pop("prompt")[0]], [""], columns=first)
    rendered = session.probe.prompts.rendered
    return prompts.check_opening(rendered, session.rewards, row, session.encode)


def _try_rewards(session: Session, budget_s: float | None) -> None:
    if all(reward.meta.needs_episode for reward in session.rewards):
        return
    trial = try_rewards(
        session.rewards,
        _trial_rows(session),
        longest=session.recipe.generation.max_completion_length,
        encode=session.encode,
        budget_s=budget_s,
        recipe=session.probe.recipe,
        # What the model samples tells more of such rewards.
        degenerate="warning",
        on_progress=session.tell,
    )
    session.probe.trial = trial
    session.add(replace(problem, subject="rewards") for problem in trial.problems)
