"""Trying a recipe's rewards: rows chosen, answers made, scored, and judged.

Owns the order of these, and the result. The answers are `answers.py`'s, scoring them is `table.py`'s,
what is suspicious about the scores is `findings.py`'s.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_cli.checks.contents import reward_context
from grpo_cli.checks.recipe_checks import CheckedRecipe
from grpo_cli.checks.reward_tests.answers import Form, degenerate_answers, render_answer
from grpo_cli.checks.reward_tests.findings import (
    judge_cover,
    judge_golds,
    judge_lengths,
    judge_scores,
    judge_variety_of_golds,
    unreadable_share,
)
from grpo_cli.checks.reward_tests.forms import choose_forms, gold_answers
from grpo_cli.checks.reward_tests.table import Encode, Progress, Scores, Table
from grpo_cli.errors import Problem, UsageError
from grpo_cli.models.source import known_chat_template, resolve_source
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import text_of
from grpo_cli.rewards.scoring import Reward

ROWS = 200
"""Rows tried, spread evenly over the data."""
COSTLY_ROWS = 8
"""The same where a reward takes seconds or money for each score."""


@dataclass(frozen=True)
class CandidateResult:
    """What one kind of answer scored."""

    name: str
    rows: int
    """Rows for which there is such an answer."""
    example: str
    """The answer to the first of them."""
    rewards: dict[str, float | None]
    """Mean of each reward over the rows it applies to; None where it applies to none."""
    total: float | None
    """Mean weighted sum; None where there are no rows."""


@dataclass(frozen=True)
class Trial:
    """What the rewards gave, and what is wrong with it."""

    rows: int
    forms: dict[str, str]
    """How the gold is written where it scores best, by the reward it is the gold of."""
    results: tuple[CandidateResult, ...]
    unreadable: dict[str, float]
    """Share of all rows whose gold cannot be read, by reward that judges answers."""
    seconds: dict[str, float]
    """Seconds a completion, by reward."""
    problems: tuple[Problem, ...]
    """The worst first; their paths are in the recipe."""

    @property
    def failed(self) -> bool:
        """Whether anything is wrong enough not to train with it."""
        return any(problem.level == "error" for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """The trial as plain values."""
        return {**asdict(self), "problems": [problem.as_json() for problem in self.problems]}


def try_recipe(
    checked: CheckedRecipe,
    *,
    rows: int | None = None,
    answers: Sequence[str] = (),
    on_progress: Progress = lambda what: None,
) -> Trial:
    """Tries a recipe's rewards on answers to rows of its training data; loads no model.

    Args:
        checked: A recipe without errors.
        rows: How many rows; None for `ROWS`, or `COSTLY_ROWS` where scores are dear.
        answers: More answers to try: templates over the row's columns.
        on_progress: Told what is being done.

    Raises:
        UsageError: The recipe has no rewards to try: they stand in its data.
        GrpoError: The data or a reward cannot be loaded, or a reward fails.
    """
    recipe = checked.recipe
    if not recipe.is_sampled:
        raise UsageError(
            "there is nothing to try: with `dataset.kind: scored` the rewards stand in the rows. "
            "Fix: `grpo check` reads them"
        )
    on_progress("loading the data")
    data = _read_data(recipe)
    on_progress("loading the rewards")
    with checked.loaded.placing_errors():
        rewards = build_rewards(recipe.rewards, reward_context(recipe))
    encode = _load_encoder(recipe) if any(each.params.reads_tokens() for each in rewards) else None
    trial = try_rewards(
        rewards,
        data,
        longest=recipe.generation.max_completion_length,
        encode=encode,
        rows=rows,
        answers=answers,
        on_progress=on_progress,
    )
    placed = tuple(checked.loaded.place(problem) for problem in trial.problems)
    return replace(trial, problems=placed)


def _read_data(recipe: Recipe) -> Any:
    from grpo_cli.data.build import build_datasets

    has_template = known_chat_template(resolve_source(recipe.model), recipe.model) is not False
    return build_datasets(recipe, has_chat_template=has_template, count_tokens=None).train


def _load_encoder(recipe: Recipe) -> Encode:
    from grpo_cli.models.loading import load_tokenizer

    tokenizer = load_tokenizer(recipe.model)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def try_rewards(
    rewards: Sequence[Reward],
    data: Any,
    *,
    longest: int,
    encode: Encode | None = None,
    rows: int | None = None,
    answers: Sequence[str] = (),
    budget_s: float | None = None,
    on_progress: Progress = lambda what: None,
) -> Trial:
    """Tries rewards on answers to rows of a `datasets.Dataset`; see `try_recipe`.

    Args:
        rewards: The recipe's, built.
        data: Its training split.
        longest: `max_completion_length`.
        encode: Gives completions token ids, where rewards read them.
        rows: How many rows to try.
        answers: Templates of more answers.
        budget_s: Seconds that all rewards together may take.
        on_progress: Told what is being done.

    Raises:
        RewardError: A reward fails.
        TooSlowError: They take longer.
    """
    costly = any(reward.params.costly for reward in rewards)
    wanted = min(rows or (COSTLY_ROWS if costly else ROWS), len(data))
    chosen = data.select([index * len(data) // wanted for index in range(wanted)])
    table = Table(rewards, chosen.to_dict(), encode, on_progress, budget_s)
    forms = choose_forms(table)
    candidates = _candidates(table, forms, answers, longest)
    scored = {name: table.score(texts, name) for name, texts in candidates.items()}
    everything = Table(rewards, data.to_dict(), None, on_progress)
    problems = [*_judge_rows(everything), *judge_scores(table, scored)]
    return Trial(
        rows=wanted,
        forms={rewards[index].name: form.name for index, form in forms.items()},
        results=tuple(
            _summarize(table, name, texts, scored[name]) for name, texts in candidates.items()
        ),
        unreadable={
            rewards[index].name: unreadable_share(everything, index) for index in table.judges
        },
        seconds={
            reward.name: seconds / max(table.completions, 1)
            for reward, seconds in zip(rewards, table.seconds, strict=True)
        },
        problems=tuple(sorted(problems, key=_severity)),
    )


def _candidates(
    table: Table, forms: Mapping[int, Form], answers: Sequence[str], longest: int
) -> dict[str, Sequence[str | None]]:
    """Every kind of answer that is tried, by name: one for each row, or None."""
    found: dict[str, Sequence[str | None]] = {
        **gold_answers(table, forms),
        **degenerate_answers([text_of(prompt) for prompt in table.prompts], longest),
    }
    for number, template in enumerate(answers, 1):
        name = f"--answer {number}" if len(answers) > 1 else "--answer"
        rows = range(len(table.prompts))
        found[name] = [render_answer(template, table.row(row)) for row in rows]
    return found


def _judge_rows(everything: Table) -> Iterator[Problem]:
    """What all rows say, without an answer to any."""
    yield from judge_cover(everything)
    yield from judge_golds(everything)
    yield from judge_variety_of_golds(everything)
    yield from judge_lengths(everything)


def _severity(problem: Problem) -> int:
    return ("error", "warning", "note").index(problem.level)


def _summarize(
    table: Table, name: str, texts: Sequence[str | None], scored: Scores
) -> CandidateResult:
    known = [scores for scores in scored if scores is not None]
    return CandidateResult(
        name=name,
        rows=len(known),
        example=next((text for text in texts if text is not None), ""),
        rewards={
            reward.name: _mean([scores[index].value for scores in known])
            for index, reward in enumerate(table.rewards)
        },
        total=_mean([table.total(scores) for scores in known]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
