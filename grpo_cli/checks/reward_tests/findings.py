"""What is wrong with rewards, as their scores of made-up answers show."""

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median

from grpo_cli.checks.reward_tests.table import Scores, Table
from grpo_cli.errors import Level, Problem
from grpo_cli.rewards.contract import suggest_extraction

MOST_UNREADABLE = 0.01
"""Share of golds that may be unreadable before it is an error."""
FEW_HACKED, MOST_HACKED = 0.1, 0.2
"""Shares of rows on which an answer that deserves nothing counts as right: beyond the first it is a
warning (sums such as `0 + 5` hold their answers), beyond the second an error."""
LONGEST_GOLD = 60
"""Characters that half of the golds may pass before they look like whole solutions."""
MOST_UNCOVERED = 0.5
"""Share of rows to which no reward may apply before it is an error."""
FEWEST_ROWS = 3
"""Rows on which it must count as right to be an error: one or two may be chance."""
MOST_ALIKE, FEWEST_GOLDS = 0.9, 8
"""Share of rows with one and the same gold from which it is suspicious, and rows it takes to say so."""
_CLOSE = 1e-9
_GIVEN = "--answer"


def unreadable_share(table: Table, index: int) -> float:
    """Share of the rows a reward applies to whose gold it cannot read."""
    return len(table.unreadable(index)) / max(len(table.applying(index)), 1)


def judge_golds(table: Table) -> Iterator[Problem]:
    """Golds that cannot be read; their rows teach nothing of the answer."""
    for index in table.judges:
        rows = table.unreadable(index)
        if not rows or not table.rewards[index].params.gold_needed:
            continue
        share = unreadable_share(table, index)
        level: Level = "error" if share > MOST_UNREADABLE else "warning"
        column = _gold_column(table, index)
        shown = f": {table.row(rows[0]).get(column)!r:.80}" if column else ""
        yield Problem(
            f"the gold cannot be read in {_count(len(rows), len(table.applying(index)))}, the first "
            f"in {table.place(rows[0])}{shown}; there the reward gives no score",
            f"{suggest_extraction(column or 'answer')}; or leave such rows out",
            path=f"rewards.{index}",
            level=level,
        )


def _gold_column(table: Table, index: int) -> str | None:
    source = table.rewards[index].params.gold_source()
    return source[1] if source else None


def judge_lengths(table: Table) -> Iterator[Problem]:
    """Golds that are whole solutions, where an answer must repeat all of them."""
    for index in table.judges:
        params = table.rewards[index].params
        source = params.gold_source()
        if source is None or not params.repeats_gold():
            continue
        rows = [row for row in table.applying(index) if table.gold(index, row) is not None]
        golds = [table.gold(index, row) or "" for row in rows]
        length = median(map(len, golds)) if golds else 0
        lines = median(len(gold.splitlines()) for gold in golds) if golds else 0
        if length > LONGEST_GOLD or lines > 1:
            yield Problem(
                f"the golds are long (median {length:,.0f} characters, {lines:.0f} lines; "
                f"{table.place(rows[0])}: {golds[0]!r:.80}), and only an answer that repeats all "
                "of its gold counts as right",
                f"if they are whole solutions, {suggest_extraction(source[1])}",
                path=f"rewards.{index}.{source[0]}",
                level="warning",
            )


def judge_cover(table: Table) -> Iterator[Problem]:
    """Rows to which no reward applies."""
    total = len(table.prompts)
    covered = {row for index in range(len(table.rewards)) for row in table.applying(index)}
    left = [row for row in range(total) if row not in covered]
    if left:
        named = {
            name for each in table.rewards if each.condition for name in each.condition.columns()
        }
        shown = ", ".join(f"{name}: {table.row(left[0]).get(name)!r:.40}" for name in sorted(named))
        yield Problem(
            f"no reward applies to {_count(len(left), total)}, the first is {table.place(left[0])} "
            f"({shown}): every `when` is false there, so what is sampled for them teaches nothing",
            "add a reward for these rows, widen a `when`, or leave the rows out of the data",
            path="rewards",
            level="error" if len(left) > MOST_UNCOVERED * total else "warning",
        )


def judge_variety_of_golds(table: Table) -> Iterator[Problem]:
    """One gold for nearly all rows: a model that always says it needs no question."""
    for index in table.judges:
        golds = [
            gold for row in table.applying(index) if (gold := table.gold(index, row)) is not None
        ]
        if len(golds) < FEWEST_GOLDS:
            continue
        commonest, count = Counter(golds).most_common(1)[0]
        if count >= MOST_ALIKE * len(golds):
            yield Problem(
                f"the gold is {commonest!r:.40} in {_count(count, len(golds))}: always answering that "
                "scores as well as solving the questions",
                "name the column that holds the answers, or take rows whose answers differ",
                path=f"rewards.{index}",
                level="error" if count == len(golds) else "warning",
            )


def judge_scores(table: Table, scored: Mapping[str, Scores]) -> Iterator[Problem]:
    """Golds that do not win, answers that deserve nothing and win, rewards that never change."""
    gold = scored.get("gold")
    if gold is None:
        yield Problem(
            "no reward of this recipe knows right answers, so there is none to compare with",
            "look at the table: should the best answer in it be the best?",
            path="rewards",
            level="note",
        )
    else:
        yield from _judge_gold(table, gold)
        yield from _judge_forms(table, scored)
        for name, scores in scored.items():
            if name.startswith(_GIVEN):
                yield from _compare_given(table, name, scores, gold)
            elif name != "gold":
                yield from _judge_degenerate(table, name, scores, gold)
    yield from _judge_variety(table, scored)
    yield from _count_failures(table, scored)


def _judge_gold(table: Table, gold: Scores) -> Iterator[Problem]:
    for index in table.judges:
        best = table.rewards[index].params.right_answer
        if best is None:
            continue
        mine = {
            row: scores[index]
            for row, scores in enumerate(gold)
            if scores and table.owner(row) == index
        }
        wrong = {
            row: score
            for row, score in mine.items()
            if score.value is not None
            and abs(score.value - table.rewards[index].clipped(best)) > _CLOSE
        }
        if wrong:
            row, score = next(iter(wrong.items()))
            yield Problem(
                f"the gold itself does not get {best:g} in {_count(len(wrong), len(mine))}, the "
                f"first in {table.place(row)}: {score.value:g} ({score.reason})",
                "correct these golds, or the reward's parameters",
                path=f"rewards.{index}",
            )


def _judge_forms(table: Table, scored: Mapping[str, Scores]) -> Iterator[Problem]:
    """Rewards of form that answers satisfy in part, but none in full; `_judge_variety` has those that give 0."""
    for index, reward in enumerate(table.rewards):
        best = reward.params.highest
        if best is None or index in table.judges:
            continue
        values = [
            scores[index].value for each in scored.values() for scores in each if scores is not None
        ]
        known = [value for value in values if value is not None]
        if any(known) and max(known) < table.rewards[index].clipped(best) - _CLOSE:
            yield Problem(
                f"no answer tried gets the {best:g} that `{reward.name}` can give (most: {max(known):g})",
                'try one in the form it wants: --answer "… {{ column }} …"',
                path=f"rewards.{index}",
                level="warning",
            )


def _judge_degenerate(table: Table, name: str, scores: Scores, gold: Scores) -> Iterator[Problem]:
    shown = {"wrong": "a wrong answer", "empty": "an empty answer"}.get(name, name)
    pairs = [(mine, best) for mine, best in zip(scores, gold, strict=True) if mine and best]
    if pairs:
        mean = sum(table.total(mine) for mine, _ in pairs) / len(pairs)
        best = sum(table.total(best) for _, best in pairs) / len(pairs)
        if mean >= best - _CLOSE:
            yield Problem(
                f"{shown} gets {mean:.3g} in total, the gold {best:.3g}: training will find it",
                "give the reward for right answers more weight, or narrow the others",
                path="rewards",
            )
    for index in table.judges:
        right = table.rewards[index].params.right_answer
        applying = [
            row for row, each in enumerate(scores) if each and each[index].value is not None
        ]
        taken = [row for row in applying if (scores[row] or [])[index].value == right]
        if right is not None and len(taken) > FEW_HACKED * len(applying):
            many = len(taken) > MOST_HACKED * len(applying) and len(taken) >= FEWEST_ROWS
            level: Level = "error" if many else "warning"
            yield Problem(
                f"{shown} counts as right in {_count(len(taken), len(applying))}, the first in "
                f"{table.place(taken[0])}",
                "narrow what counts, as with `extract`, or use `exact` or `choice`",
                path=f"rewards.{index}",
                level=level,
            )


def _compare_given(table: Table, name: str, scores: Scores, gold: Scores) -> Iterator[Problem]:
    """Whether an answer from the command line wins; only a person knows whether it should."""
    pairs = [(mine, best) for mine, best in zip(scores, gold, strict=True) if mine and best]
    wins = [table.total(mine) >= table.total(best) - _CLOSE for mine, best in pairs]
    if any(wins):
        yield Problem(
            f"{name} scores as much as the gold in {_count(sum(wins), len(wins))}",
            "if it should not, narrow what counts",
            path="rewards",
            level="note",
        )


def _judge_variety(table: Table, scored: Mapping[str, Scores]) -> Iterator[Problem]:
    for index, reward in enumerate(table.rewards):
        values = {
            scores[index].value for each in scored.values() for scores in each if scores is not None
        }
        failed = any(
            scores[index].failed
            for each in scored.values()
            for scores in each
            if scores is not None
        )
        if failed:
            continue
        if values == {None}:
            fix = "correct its `when`" if reward.condition else "see `grpo rewards show`"
            message = "gives no score to any row tried"
        elif len(values - {None}) == 1 and reward.weight > 0:
            [value] = values - {None}
            message = (
                f"gives every answer tried the same score ({value:g}): it cannot teach anything"
            )
            fix = "correct its parameters; a reward of form may need an --answer in that form"
        else:
            continue
        level: Level = "warning"
        if values == {0.0} and reward.right_answer is None and reward.kind != "python":
            # A reward of form: golds and wrong answers need not have it, and a model that is asked may.
            level, message = (
                "note",
                "gives 0 to every answer tried: none has the form that it rewards",
            )
            fix = "try one that has: grpo rewards test --answer '…'"
        path = f"rewards.{index}"
        yield Problem(f"`{reward.name}` {message}", fix, path=path, level=level)


def _count_failures(table: Table, scored: Mapping[str, Scores]) -> Iterator[Problem]:
    """Failures that `on_error` forgives, and so would go unseen."""
    for index, reward in enumerate(table.rewards):
        tried = [scores[index] for each in scored.values() for scores in each if scores is not None]
        failed = [score for score in tried if score.failed]
        if failed:
            level: Level = "error" if len(failed) == len(tried) else "warning"
            yield Problem(
                f"`{reward.name}` failed on {len(failed):,} of {len(tried):,} answers, which "
                f"`on_error: {reward.on_error}` forgives; the first: {failed[0].reason}",
                "mend what fails; with `on_error: raise` all of its message is shown",
                path=f"rewards.{index}",
                level=level,
            )


def _count(some: int, all_: int) -> str:
    return f"{some:,} of {all_:,} rows ({some / max(all_, 1):.1%})"
