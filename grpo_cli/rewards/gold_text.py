"""Golds that can be read, and that no answer of a model equals: they are not text."""

import ast
import re
from typing import Any

_LIST = re.compile(r"""\s*\[\s*["'].*\]\s*""", re.DOTALL)


def explain_odd_gold(value: Any) -> tuple[str, str] | None:
    """Return what is odd about a gold, and the fix; None if a model may write it."""
    as_text = f"which are read as the text {str(value)!r:.60}"
    if isinstance(value, bytes):
        return f"the gold is bytes, {as_text}", "store it as text: value.decode()"
    if isinstance(value, dict):
        fix = f"store one of its values as the column, such as `{next(iter(value), '')}`"
        return f"the gold has keys ({', '.join(map(str, value))}), {as_text}", fix
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str) and _LIST.fullmatch(text) and _is_list(text):
            return (
                f"the gold {text!r:.60} is a list written as text, which is compared whole",
                "store a list (in JSON lines or Parquet): then each of its texts is an accepted answer",
            )
    return None


def _is_list(text: str) -> bool:
    try:
        return isinstance(ast.literal_eval(text.strip()), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
