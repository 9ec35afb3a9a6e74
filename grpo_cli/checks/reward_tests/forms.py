"""Which of the usual forms a recipe wants its answers in, found by scoring the gold in all of them."""

from collections.abc import Mapping, Sequence

from grpo_cli.checks.reward_tests.answers import Form, all_forms, wrong_answers
from grpo_cli.checks.reward_tests.table import Table

FORM_ROWS = 8
"""Rows on which a form is chosen."""


def choose_forms(table: Table) -> dict[int, Form]:
    """For each reward whose gold answers some row: the form in which it scores best."""
    owned: dict[int, list[int]] = {}
    for row in range(len(table.prompts)):
        owner = table.owner(row)
        if owner is not None:
            owned.setdefault(owner, []).append(row)
    return {index: _best_form(table, index, rows[:FORM_ROWS]) for index, rows in owned.items()}


def _best_form(table: Table, index: int, rows: Sequence[int]) -> Form:
    def worth(form: Form) -> tuple[float, float]:
        """The reward's own scores first: a negative weight must not choose a form it cannot read."""
        texts: list[str | None] = [None] * len(table.prompts)
        for row in rows:
            texts[row] = form.write(table.gold(index, row) or "")
        scored = table.score(texts, "forms of the gold", costly=False)
        known = [scores for scores in scored if scores is not None]
        own = sum(scores[index].value or 0.0 for scores in known)
        return own, sum(table.total(scores) for scores in known)

    # `max` keeps the first of equals, which is the simplest.
    return max(all_forms(), key=worth)


def gold_answers(table: Table, forms: Mapping[int, Form]) -> dict[str, list[str | None]]:
    """The gold, and a wrong answer in the same form; nothing where no reward knows right answers."""
    if not forms:
        return {}
    rows = range(len(table.prompts))
    owners = [table.owner(row) for row in rows]
    golds = [
        None if owner is None else table.gold(owner, row)
        for row, owner in zip(rows, owners, strict=True)
    ]

    def write(texts: Sequence[str | None]) -> list[str | None]:
        return [
            None if owner is None or text is None else forms[owner].write(text)
            for owner, text in zip(owners, texts, strict=True)
        ]

    return {"gold": write(golds), "wrong": write(wrong_answers(golds))}
