"""What is wrong with rewards, as their scores of made-up answers show."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median

from grpo_cli.issues import Issue, Level
from grpo_cli.reward_test.table import Scores, Table
from grpo_cli.rewards.contract import Score, gold_column, text_of
from grpo_cli.rewards.gold import suggest_extraction
from grpo_cli.rewards.scoring import Condition, clip_score

MOST_UNREADABLE = 0.01
"""Share of golds that may be unreadable before it is an error."""
FEW_ODD = 0.1
"""Share of rows whose golds may be too long, or differ for the same prompt, before it is a warning."""
FEW_HACKED, MOST_HACKED = 0.15, 0.2
"""Shares of rows on which an answer that deserves nothing counts as right: beyond the first it is a
warning (one in ten sums of digits, such as `0 + 5`, ends with its answer), beyond the second an error."""
LONGEST_GOLD = 60
"""Characters that half of the golds may pass before they look like whole solutions."""
MOST_UNCOVERED = 0.5
"""Share of rows to which no reward may apply before it is an error."""
MOST_OUTWEIGHED = 10
"""Times that another reward may change the total as much as a right answer does."""
FEWEST_ROWS = 3
"""Rows on which it must count as right to be an error: one or two may be chance."""
GOLD_COLUMNS = frozenset("answer final_answer ground_truth gold label solution target".split())
"""Columns that hold the right answer, as their names say."""
FEWEST_GOLDS = 8
"""Rows that it takes to say that all golds are the same."""
_VALUES = 4
"""Values shown of a column."""
_CLOSE = 1e-9
_SHOWN = {"wrong": "a wrong answer", "empty": "an empty answer", "repetition": "a long repetition"}
_EMPTY = ("empty", "repetition")
"""Answers that say nothing."""


def check_rows(table: Table) -> Iterator[Issue]:
    """Check all rows of the data, without an answer to any."""
    yield from _check_coverage(table)
    for index, reward in enumerate(table.rewards):
        if reward.condition and not table.applying(index):
            path = f"rewards.{index}.when"
            yield unmet_condition(reward.condition, table.columns, len(table.prompts), path)
    for index in table.judges:
        yield from check_golds(table, index)
        yield from _check_gold_length(table, index)
        yield from _check_same_prompts(table, index)
        golds = table.golds(index)
        if len(golds) >= FEWEST_GOLDS and len(set(golds.values())) == 1:
            gold = next(iter(golds.values()))
            seen = f"the gold is {gold!r:.40} in all rows: a model that always answers that needs no question"
            fix = "name the column that holds the answers, or take rows whose answers differ"
            yield Issue(seen, fix, f"rewards.{index}", level="warning")


def unmet_condition(
    condition: Condition, columns: Mapping[str, Sequence[object]], rows: int, path: str
) -> Issue:
    """Return the issue of a `when` that holds for no row."""
    values = {
        name: list(dict.fromkeys(map(str, columns[name])))
        for name in sorted(condition.columns())
        if name in columns
    }
    shown = "; ".join(f"{name}: {', '.join(each[:_VALUES])}" for name, each in values.items())
    seen = f"`{condition.text}` holds for none of {rows:,} rows looked at ({shown:.200})"
    return Issue(seen, "correct it, or leave it out", path, level="warning", subject="`when`")


def unreadable_share(table: Table, index: int) -> float:
    """Return the share of the rows a reward applies to whose gold it cannot read."""
    return len(table.unreadable(index)) / max(len(table.applying(index)), 1)


def check_golds(table: Table, index: int) -> Iterator[Issue]:
    """Find golds that cannot be read; their rows teach nothing about the answer."""
    rows, params = table.unreadable(index), table.rewards[index].params
    _, column = gold_column(params)
    if not rows or not column:
        return
    fault = table.gold_issue(index, rows[0])
    yield Issue(
        f"the gold cannot be read in {_count(len(rows), len(table.applying(index)))}, the first in "
        f"{table.row_name(rows[0])}: {table.row(rows[0]).get(column)!r:.80}{_name_more(table, rows)}; there the "
        "reward gives no score",
        f"{fault.fix if fault else suggest_extraction(column)}; or leave such rows out",
        path=f"rewards.{index}",
        level="error" if unreadable_share(table, index) > MOST_UNREADABLE else "warning",
    )


def _name_more(table: Table, rows: Sequence[int]) -> str:
    """Return the names of the rows after the first, so that all can be mended at once."""
    names = [table.row_name(row) for row in rows[1 : 1 + _VALUES]]
    rest = f" and {len(rows) - 1 - _VALUES:,} more" if len(rows) > 1 + _VALUES else ""
    return f" (also {', '.join(names)}{rest})" if names else ""


def _check_gold_length(table: Table, index: int) -> Iterator[Issue]:
    params, golds = table.rewards[index].params, table.golds(index)
    parameter, column = gold_column(params)
    if not column or not params.meta.repeats_gold or not golds:
        return
    length = median(map(len, golds.values()))
    lines = median(len(gold.splitlines()) for gold in golds.values())
    if length > LONGEST_GOLD or lines > 1:
        row, first = next(iter(golds.items()))
        yield Issue(
            f"the golds are long (median {length:,.0f} characters, {lines:.0f} lines; "
            f"{table.row_name(row)}: {first!r:.80}), and only an answer that repeats all "
            "of its gold counts as right",
            f"if they are whole solutions, {suggest_extraction(column)}",
            path=f"rewards.{index}.{parameter}",
            level="warning",
        )


def _check_same_prompts(table: Table, index: int) -> Iterator[Issue]:
    """Find rows that ask the same and have different golds."""
    golds = table.golds(index)
    rows_of: dict[str, list[int]] = {}
    for row in golds:
        # Rows that ask of images, or of what an environment shows, may share their text.
        prompt = table.prompts[row]
        if text_of(prompt).strip() and "'type': 'image'" not in str(prompt):
            rows_of.setdefault(str(prompt), []).append(row)
    groups = [rows for rows in rows_of.values() if len({golds[row] for row in rows}) > 1]
    total = sum(map(len, groups))
    if total > FEW_ODD * len(golds):
        first = groups[0][0]
        other = next(row for row in groups[0] if golds[row] != golds[first])
        yield Issue(
            f"{_count(total, len(golds))} have the same prompt as another row and a different gold, such as "
            f"{table.row_name(first)} ({golds[first]!r:.40}) and {table.row_name(other)} ({golds[other]!r:.40})",
            "name the column that the answer depends on in `dataset.prompt.user`, or leave such rows out",
            path="dataset.prompt",
            level="warning",
        )


def _check_coverage(table: Table) -> Iterator[Issue]:
    total = len(table.prompts)
    covered = {row for index in range(len(table.rewards)) for row in table.applying(index)}
    left = [row for row in range(total) if row not in covered]
    if left:
        conditions = [each.condition for each in table.rewards if each.condition]
        names = sorted({name for each in conditions for name in each.columns()})
        shown = ", ".join(f"{name}: {table.row(left[0]).get(name)!r:.40}" for name in names)
        yield Issue(
            f"no reward applies to {_count(len(left), total)}, the first is {table.row_name(left[0])} "
            f"({shown}): every `when` is false there, so what is sampled for them teaches nothing",
            "add a reward for these rows, widen a `when`, or leave the rows out of the data",
            path="rewards",
            level="error" if len(left) > MOST_UNCOVERED * total else "warning",
        )


def check_scores(
    table: Table, scored: Mapping[str, Scores], degenerate: Level = "error"
) -> Iterator[Issue]:
    """Find golds that do not win, answers that deserve nothing and win, and rewards that never change.

    `degenerate` is the level of the latter while no gold is known.
    """
    by_reward = [
        [scores[index] for each in scored.values() for scores in each.values()]
        for index in range(len(table.rewards))
    ]
    gold = scored.get("gold")
    if gold is None:
        if not any(name.startswith("--answer") for name in scored):
            yield Issue(
                "these rewards declare no gold answer, so there is none to compare with",
                "score one of your own with --answer '…'",
                path="rewards",
                level="note",
            )
        yield from [*_check_columns(table, scored)] or _check_without_gold(
            table, scored, degenerate
        )
    else:
        yield from check_gold(table, gold)
        for name, each in scored.items():
            if name != "gold" and not name.startswith(("column ", "--answer")):
                yield from _check_degenerate(table, name, each, gold)
    yield from _check_balance(table, scored)
    for index, scores in enumerate(by_reward):
        yield from _check_variety(table, index, scores)
        yield from check_failures(table, index, scores)


def check_gold(table: Table, gold: Scores) -> Iterator[Issue]:
    """Find golds that their own reward does not count as right."""
    for index in table.judges:
        reward = table.rewards[index]
        best = reward.meta.right_answer
        own = {row: scores[index] for row, scores in gold.items() if table.owners[row] == index}
        wrong = [
            row
            for row, score in own.items()
            if best is not None
            and score.value is not None
            and abs(score.value - clip_score(best, reward.clip)) > _CLOSE
        ]
        if wrong:
            score = own[wrong[0]]
            yield Issue(
                f"the gold itself does not get {best:g} in {_count(len(wrong), len(own))}, the "
                f"first in {table.row_name(wrong[0])}: {score.value:g} ({score.reason})",
                "correct these golds, or the reward's parameters",
                path=f"rewards.{index}",
            )


def _check_columns(table: Table, scored: Mapping[str, Scores]) -> Iterator[Issue]:
    """Find answers without content that get more than the right ones that a column seems to hold."""
    totals = {name: mean(map(table.total, each.values())) for name, each in scored.items() if each}
    columns = [f"column {name}" for name in GOLD_COLUMNS if f"column {name}" in totals]
    for column in columns[:1]:
        best = max(
            ("empty", "tags alone", "repetition"), key=lambda name: totals.get(name, -math.inf)
        )
        if totals[best] > max(totals[name] for name in columns) + _CLOSE:
            yield Issue(
                f"{_SHOWN.get(best, best)} gets {totals[best]:.3g} in total, and what the {column} holds "
                f"{totals[column]:.3g} in the best of the forms tried",
                "compare with the column as it is (text or number, spaces, units), or score a right answer in "
                "the form that you ask for: grpo rewards test --answer '…'",
                path="rewards",
                level="warning",
            )


def _check_without_gold(
    table: Table, scored: Mapping[str, Scores], level: Level
) -> Iterator[Issue]:
    """Find an empty or a repeated answer that gets more than every answer that says something."""
    totals = {name: mean(map(table.total, each.values())) for name, each in scored.items() if each}
    others = {name: total for name, total in totals.items() if name not in (*_EMPTY, "tags alone")}
    worst = max(_EMPTY, key=lambda name: totals.get(name, -math.inf))
    best = max(others, key=lambda name: others[name], default=None)
    if best is None or totals.get(worst, -math.inf) <= others[best] + _CLOSE:
        return
    # What is right may depend on a reward that has seen nothing right.
    silent = any(
        reward.weight > 0
        and len({s[index].value for each in scored.values() for s in each.values()}) == 1
        for index, reward in enumerate(table.rewards)
    )
    yield Issue(
        f"{_SHOWN.get(worst, worst)} gets {totals[worst]:.3g} in total, and the best of the answers with content "
        f"{others[best]:.3g} ({best}): training will find it",
        "correct the reward (is its sign right?), or score an answer that deserves more: "
        "grpo rewards test --answer '…'",
        path="rewards",
        level="warning" if silent else level,
    )


def _check_degenerate(table: Table, name: str, scores: Scores, gold: Scores) -> Iterator[Issue]:
    shown = _SHOWN.get(name, name)
    rows = [row for row in scores if row in gold]
    # Rewards without weight only measure.
    if rows and any(reward.weight for reward in table.rewards):
        average = mean(table.total(scores[row]) for row in rows)
        best = mean(table.total(gold[row]) for row in rows)
        if average >= best - _CLOSE:
            yield Issue(
                f"{shown} gets {average:.3g} in total, the gold {best:.3g}: training will find it",
                "give the reward for right answers more weight, or narrow the others",
                path="rewards",
            )
    for index in table.judges:
        right = table.rewards[index].meta.right_answer
        values = {row: each[index].value for row, each in scores.items()}
        applying = {row: value for row, value in values.items() if value is not None}
        hacked = [row for row, value in applying.items() if value == right]
        if right is not None and len(hacked) > FEW_HACKED * len(applying):
            many = len(hacked) > MOST_HACKED * len(applying) and len(hacked) >= FEWEST_ROWS
            yield Issue(
                f"{shown} counts as right in {_count(len(hacked), len(applying))}, the first in "
                f"{table.row_name(hacked[0])}",
                "narrow what counts, as with `extract`, or use `exact` or `choice`",
                path=f"rewards.{index}",
                level="error" if many else "warning",
            )


def _check_balance(table: Table, scored: Mapping[str, Scores]) -> Iterator[Issue]:
    """Find rewards beside which a right answer hardly counts."""
    # A repetition has as many words as there are tokens: longer than nearly all completions.
    rows = [row for name, each in scored.items() if name != "repetition" for row in each.values()]
    spreads: list[float] = []
    for index, reward in enumerate(table.rewards):
        values = [row[index].value or 0.0 for row in rows if not row[index].failed] or [0.0]
        spreads.append(abs(reward.weight) * (max(values) - min(values)))
    right = max((spreads[index] for index in table.judges), default=0.0)
    for index, spread in enumerate(spreads):
        if index not in table.judges and 0 < right < spread / MOST_OUTWEIGHED:
            reward = table.rewards[index]
            yield Issue(
                f"`{reward.name}` changes the total by up to {spread:.3g} between these answers, and whether one "
                f"is right by {right:.3g}, so right answers hardly affect training",
                f"set `weight: {reward.weight * right / spread:.1g}`, or a smaller scale if it has one",
                path=f"rewards.{index}",
                level="warning",
            )


def _check_variety(table: Table, index: int, scores: list[Score]) -> Iterator[Issue]:
    reward, values = table.rewards[index], {score.value for score in scores}
    if reward.meta.needs_episode or any(score.failed for score in scores):
        return
    level: Level = "warning"
    if values == {None}:
        # A few rows need not have one for which its `when` holds; all of them are looked at before.
        if not table.applying(index):
            return
        message, fix = "gives no score to any row tried", "see `grpo rewards show`"
        if reward.kind == "python":
            fix = "return a number in every branch of the function"
    elif values == {0.0} and reward.kind != "python" and not table.golds(index):
        # Nothing that was tried deserves more: a model that is asked for a form, or a program, may.
        if reward.weight <= 0:
            return
        level, fix = "note", "try one that is right: grpo rewards test --answer '…'"
        why = ", none of which has the form that it rewards"
        if index in table.judges:
            why = ": none is right, as the data has no right ones to try"
        if fault := table.gold_issue(index, table.applying(index)[0]):
            level, fix, why = fault.level, fault.fix, f": {fault.seen}"
        message = f"gives 0 to the answers tried{why}"
    elif len(values - {None}) == 1 and reward.weight > 0:
        [value] = values - {None}
        message = f"gives every answer tried the same score ({value:g}): it cannot teach anything"
        fix = "correct it, or score an answer that deserves another: grpo rewards test --answer '…'"
    else:
        return
    yield Issue(f"`{reward.name}` {message}", fix, path=f"rewards.{index}", level=level)


def check_failures(table: Table, index: int, scores: list[Score]) -> Iterator[Issue]:
    """Find failures that `on_error` forgives, and scores of time limits: both would go unseen."""
    reward, failed = table.rewards[index], [score for score in scores if score.failed]
    if failed:
        yield Issue(
            f"`{reward.name}` failed on {len(failed):,} of {len(scores):,} answers, which "
            f"`on_error: {reward.on_error}` forgives; the first: {failed[0].reason}",
            "correct what fails; with `on_error: raise` all of its message is shown",
            path=f"rewards.{index}",
            level="error" if len(failed) == len(scores) else "warning",
        )
    if late := [score for score in scores if score.late and not score.failed]:
        pattern = r"leave no repetition inside another: `[\w\s]+` for `(\w+\s?)+`"
        yield Issue(
            f"`{reward.name}` {late[0].reason} on {len(late):,} of {len(scores):,} answers, which then score "
            f"{late[0].value or 0:g}",
            pattern if reward.kind == "regex" else "let it take less time, or raise `timeout_s`",
            path=f"rewards.{index}",
            level="warning",
        )


def _count(some: int, all_: int) -> str:
    return f"{some:,} of {all_:,} rows ({some / max(all_, 1):.1%})"
