"""Gold answers: read from a cell, and what is odd about those that no answer of a model equals."""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo_cli.issues import Issue
from grpo_cli.rewards.contract import Gold

_LIST = re.compile(r"""\s*\[\s*["'].*\]\s*""", re.DOTALL)


def make_gold(
    text: str | None, cell: Any, column: str, vote: Callable[[str], str | None] = lambda text: None
) -> Gold | Issue:
    """Return the gold answer of a row, or why there is none.

    Args:
        text: As it was read; None or empty if it could not be.
        cell: What the column holds.
        column: The column, which the parameter `answer` names.
        vote: That of `Gold`.
    """
    if text:
        return Gold(text, vote, _find_oddity(cell))
    what, fix = "there is no gold", "fill it, or leave such rows out of the data"
    if cell is not None and str(cell).strip():
        what = "the gold cannot be read"
        fix = f"name the column that holds it (`answer: …`), or {suggest_extraction(column)}"
    seen = f"{what}, so the reward gives no score: {cell!r:.80}"
    return Issue(seen, fix, "answer", level="warning")


def suggest_extraction(column: str) -> str:
    """Return the edit that takes answers out of a column of whole solutions."""
    return (
        "take the answer out of it with a `regex` under `dataset.columns`, such as "
        f"`{column}: {{from: {column}, regex: '####\\s*(.+)$'}}`"
    )


def _find_oddity(cell: Any) -> Issue | None:
    as_text = f"which are read as the text {str(cell)!r:.60}"
    texts = cell if isinstance(cell, list | tuple) else [cell]
    lists = [text for text in texts if isinstance(text, str) and _is_list(text)]
    if isinstance(cell, bytes):
        seen, fix = f"the gold is bytes, {as_text}", "store it as text: value.decode()"
    elif isinstance(cell, Mapping):
        seen = f"the gold has keys ({', '.join(map(str, cell))}), {as_text}"
        fix = f"store one of its values as the column, such as `{next(iter(cell), '')}`"
    elif lists:
        seen = f"the gold {lists[0]!r:.60} is a list written as text, which is compared whole"
        fix = (
            "store a list (in JSON lines or Parquet): then each of its texts is an accepted answer"
        )
    else:
        return None
    return Issue(seen, fix, "answer", level="warning")


def _is_list(text: str) -> bool:
    try:
        return bool(_LIST.fullmatch(text)) and isinstance(ast.literal_eval(text.strip()), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
