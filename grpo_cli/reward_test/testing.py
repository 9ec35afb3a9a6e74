"""Rewards tried on made-up answers to rows of the data: does the gold win, and does anything else?"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from grpo_cli.errors import UsageError
from grpo_cli.issues import Issue, Level
from grpo_cli.reward_test import findings
from grpo_cli.reward_test.table import Answers, Encode, Progress, Scores, Table, TooSlowError
from grpo_cli.rewards.contract import text_of
from grpo_cli.rewards.scoring import Reward, reward_columns
from grpo_cli.templating import environment
from grpo_cli.units import spread

ROWS = 200
"""Rows tried, spread evenly over the data."""
COSTLY_ROWS = 8
"""The same if a reward takes seconds or money for each score."""
QUICK_ROWS = 16
"""The same if time is limited."""
MOST_ROWS = 50_000
"""Rows, evenly spread, whose golds and prompts are looked at."""
FORM_ROWS = 4
"""Rows on which a form is chosen."""
_LEVELS = ("error", "warning", "note")

_REASONING = (
    "First, I read the question and note what is given and what is asked.\n"
    "Next, I work through it step by step, and write down each result.\n"
    "Finally, I check the result against the question once more."
)
"""Stands for a chain of thought; long and stepwise enough for rewards that ask for one."""
_BODIES = {
    "GOLD": "GOLD",
    "#### GOLD": "#### GOLD",
    r"\boxed{GOLD}": r"\boxed{GOLD}",
    "The answer is GOLD.": "The answer is GOLD.",
    "```json GOLD```": "```json\nGOLD\n```",
}
_FRAMES = {
    "{}": "{}",
    "… {}": f"{_REASONING}\n{{}}",
    "<answer>{}</answer>": "<answer>{}</answer>",
    "<think>…</think> {}": f"<think>\n{_REASONING}\n</think>\n{{}}",
    "<think>…</think> <answer>{}</answer>": f"<think>\n{_REASONING}\n</think>\n<answer>\n{{}}\n</answer>",
    "…</think> {}": f"{_REASONING}\n</think>\n{{}}",
    "…</think> <answer>{}</answer>": f"{_REASONING}\n</think>\n<answer>\n{{}}\n</answer>",
}
"""What may stand around an answer, by its short name."""
FORMS = {
    frame.replace("{}", body): framed.replace("{}", text)
    for frame, framed in _FRAMES.items()
    for body, text in _BODIES.items()
}
"""The ways to write an answer down, the simplest first: a name, and a text with `GOLD` for the answer."""
PLAUSIBLE = {
    name: FORMS[form].replace("GOLD", "42")
    for name, form in (
        ("a number", "GOLD"),
        ("a sentence", "The answer is GOLD."),
        ("reasoning", "… The answer is GOLD."),
        ("reasoning in tags", "<think>…</think> <answer>GOLD</answer>"),
    )
}
"""Answers that say something, by name; tried if no gold is known."""
_FRAMED = {frame.replace("{}", "GOLD") for frame in _FRAMES}


@dataclass(frozen=True)
class CandidateResult:
    """What one kind of answer scored."""

    name: str
    rows: int
    """Rows for which there is such an answer."""
    example: str
    """The answer to the first of them."""
    rewards: dict[str, float | None]
    """Mean of each reward over the rows it applies to; None if it applies to none."""
    total: float | None
    """Mean weighted sum over the rows that a reward applies to; None if there are none."""


@dataclass(frozen=True)
class RewardTestResult:
    """What the rewards gave, and what is wrong with it."""

    rows: int
    forms: dict[str, str]
    """The form in which the gold scores best, by the reward it is the gold of."""
    results: tuple[CandidateResult, ...]
    unreadable: dict[str, float]
    """Share of all rows whose gold cannot be read, by reward that judges answers."""
    seconds: dict[str, float]
    """Seconds per completion, by reward."""
    problems: tuple[Issue, ...]
    """The worst first; their paths are in the recipe."""

    @property
    def failed(self) -> bool:
        """True if anything is wrong enough not to train with it."""
        return any(problem.level == "error" for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**asdict(self), "problems": [problem.as_json() for problem in self.problems]}


def _usual_rows(rewards: Sequence[Reward], budget_s: float | None) -> int:
    if any(reward.meta.costly for reward in rewards):
        return COSTLY_ROWS
    return ROWS if budget_s is None else QUICK_ROWS


def try_rewards(
    rewards: Sequence[Reward],
    data: Any,
    *,
    longest: int,
    encode: Encode | None = None,
    rows: int | None = None,
    answers: Sequence[str] = (),
    budget_s: float | None = None,
    recipe: str = "RECIPE",
    degenerate: Level = "error",
    on_progress: Progress = lambda what: None,
) -> RewardTestResult:
    """Try rewards on answers to rows of a dataset.

    Args:
        rewards: The recipe's, built.
        data: Its training split. Rewards that need an episode are left out.
        longest: `max_completion_length`.
        encode: Gives completions token ids, for rewards that read them.
        rows: How many rows; None for `ROWS`, `QUICK_ROWS` or `COSTLY_ROWS`.
        answers: More answers to try: templates over the row's columns.
        budget_s: Seconds that all rewards together may take; a note says if answers are left.
        recipe: The recipe's path, for that note.
        degenerate: Level of a degenerate answer that beats all others while no gold is known.
        on_progress: Called with a description of each part before it begins.

    Raises:
        RewardError: A reward fails.
    """
    count = min(rows or _usual_rows(rewards, budget_s), len(data))
    chosen, many = (data.select(spread(len(data), most)) for most in (count, MOST_ROWS))
    table = Table(rewards, reward_columns(chosen, rewards), encode, on_progress, budget_s)
    everything = Table(rewards, reward_columns(many, ()), None, on_progress)
    problems = [*findings.check_rows(everything)]
    forms: dict[int, str] = {}
    candidates: dict[str, Answers] = {}
    scored: dict[str, Scores] = {}
    try:
        forms.update(_choose_forms(table))
        candidates = _make_candidates(table, forms, answers, longest)
        for name, texts in candidates.items():
            scored[name] = table.score(texts, name)
        for name, texts in _column_answers(table, scored):
            candidates[name] = texts
            scored[name] = table.score(texts, name)
        problems += findings.check_scores(table, scored, degenerate)
    except TooSlowError as error:
        problems += _report_unfinished(table, scored.get("gold", {}), error, recipe)
    return RewardTestResult(
        rows=count,
        forms={rewards[index].name: form for index, form in forms.items()},
        results=tuple(_summarize(table, name, candidates[name], scored[name]) for name in scored),
        unreadable={
            rewards[index].name: findings.unreadable_share(everything, index)
            for index in everything.judges
        },
        seconds={reward.name: table.seconds_each(index) for index, reward in enumerate(rewards)},
        problems=tuple(sorted(problems, key=lambda problem: _LEVELS.index(problem.level))),
    )


def _report_unfinished(
    table: Table, gold: Scores, error: TooSlowError, recipe: str
) -> Iterable[Issue]:
    yield from findings.check_gold(table, gold)
    for index, scores in enumerate(table.scores):
        yield from findings.check_failures(table, index, scores)
    yield Issue(
        f"not all answers were scored: {error}",
        f"try the rewards by themselves: grpo rewards test {recipe}",
        "rewards",
        level="note",
        why="a training should not wait for it",
    )


def _choose_forms(table: Table) -> dict[int, str]:
    """Return for each reward whose gold answers some row the form in which it scores best."""
    golds: dict[int, dict[int, str]] = {}
    for row, owner in table.owners.items():
        golds.setdefault(owner, {})[row] = table.golds(owner)[row]
    return {index: _best_form(table, index, each) for index, each in golds.items()}


def _best_form(table: Table, index: int, golds: Answers, skip: Collection[int] = ()) -> str:
    best, best_value = "", (float("-inf"), 0.0)
    few = dict(list(golds.items())[:FORM_ROWS])
    # A program already stands in a block of its own.
    fenced = "```" in next(iter(few.values()))
    costly = {at for at, reward in enumerate(table.rewards) if reward.meta.costly}
    for name, template in FORMS.items():
        if fenced and name not in _FRAMED:
            continue
        written = _write(template, few)
        scored = table.score(written, "forms of the gold", skip={*skip, *costly}).values()
        # The reward's own scores first: a negative weight must not choose a form it cannot read.
        own = sum(scores[index].value or 0.0 for scores in scored)
        value = own, sum(table.total(scores) for scores in scored)
        if value > best_value:
            best, best_value = name, value
        if all(table.is_best(scores) for scores in scored):
            break
    return best


def _write(template: str, golds: Answers) -> dict[int, str]:
    return {row: template.replace("GOLD", gold) for row, gold in golds.items()}


def _make_candidates(
    table: Table, forms: Mapping[int, str], answers: Sequence[str], longest: int
) -> dict[str, Answers]:
    """Return every kind of answer that is tried, by name."""
    candidates: dict[str, Answers] = {}
    if forms:
        golds = {row: table.golds(owner)[row] for row, owner in table.owners.items()}
        for name, texts in (("gold", golds), ("wrong", wrong_answers(golds))):
            candidates[name] = {
                row: FORMS[forms[table.owners[row]]].replace("GOLD", text)
                for row, text in texts.items()
            }
    loop = "let me think again "
    constant = {
        "empty": "",
        "tags alone": "<think>\n\n</think>\n<answer>\n\n</answer>",
        # About as many words as there are tokens in a completion.
        "repetition": (loop * (longest // len(loop.split()) + 1)).strip(),
    }
    rows = range(len(table.prompts))
    if not forms:
        # Without a gold, what says something is compared with what does not; a completion has room for both.
        candidates |= {
            name: dict.fromkeys(rows, text)
            for name, text in PLAUSIBLE.items()
            if 2 * len(text.split()) <= longest
        }
    candidates["the prompt"] = dict(enumerate(map(text_of, table.prompts)))
    candidates |= {name: dict.fromkeys(rows, text) for name, text in constant.items()}
    for number, template in enumerate(answers, 1):
        name = f"--answer {number}" if len(answers) > 1 else "--answer"
        candidates[name] = {row: _render_answer(template, table.row(row)) for row in rows}
    return candidates


def wrong_answers(golds: Answers) -> dict[int, str]:
    """Return for each gold another row's, or else the next number; nothing if there is neither."""
    distinct = list(dict.fromkeys(golds.values()))
    after = dict(zip(distinct, [*distinct[1:], *distinct[:1]], strict=True))
    wrong = {
        row: after[gold] if after[gold] != gold else _next_number(gold)
        for row, gold in golds.items()
    }
    return {row: text for row, text in wrong.items() if text is not None}


def _next_number(text: str) -> str | None:
    try:
        return str(Decimal(text.replace(",", "")) + 1)
    except InvalidOperation:
        return None


def _render_answer(template: str, row: Mapping[str, Any]) -> str:
    try:
        return environment().from_string(template).render(row)
    except Exception as error:  # a user's own template raises anything
        raise UsageError(
            f"--answer {template!r} fails: {error} (columns: {', '.join(row)})",
            "write a text, in which {{ name }} stands for a column",
        ) from error


def _column_answers(table: Table, scored: Mapping[str, Scores]) -> Iterable[tuple[str, Answers]]:
    """Yield answers from the columns that a reward's function names, if it scored all others the same.

    Columns that hold the right answer by their names are tried if no reward declares a gold.
    """
    for index, reward in enumerate(table.rewards):
        values = {scores[index].value for each in scored.values() for scores in each.values()}
        columns = [each for each in reward.params.columns().named if each in table.columns]
        if len(values) > 1:
            columns = (
                []
                if "gold" in scored
                else [each for each in columns if each in findings.GOLD_COLUMNS]
            )
        for column in columns:
            cells = {row: table.columns[column][row] for row in table.applying(index)}
            golds = {
                row: str(cell) for row, cell in cells.items() if isinstance(cell, str | int | float)
            }
            if golds:
                others = set(range(len(table.rewards))) - {index}
                form = _best_form(table, index, golds, skip=others)
                yield f"column {column}", _write(FORMS[form], golds)


def _summarize(table: Table, name: str, texts: Answers, scored: Scores) -> CandidateResult:
    return CandidateResult(
        name=name,
        rows=len(scored),
        example=next((texts[row] for row in scored), ""),
        rewards={
            reward.name: _mean(scores[index].value for scores in scored.values())
            for index, reward in enumerate(table.rewards)
        },
        total=_mean(
            table.total(scores)
            for scores in scored.values()
            if any(score.value is not None for score in scores)
        ),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
