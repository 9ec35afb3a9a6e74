"""Golds that can be read, and that no answer of a model equals: not text, or text that was decoded wrongly."""

import ast
import html
import re
from typing import Any

_UNWRITTEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\xad\u200b\u200e\u200f\u2060\ufeff\ufffd]")
"""Characters that a model never writes: control characters, invisible ones, and the mark of a decoding error."""
_ENTITY = re.compile(r"&(#\d+|#x[0-9a-f]+|[a-z]+\d*);", re.IGNORECASE)
_LIST = re.compile(r"""\s*\[\s*["'].*\]\s*""", re.DOTALL)


def explain_odd_gold(value: Any) -> tuple[str, str] | None:
    """Return what is odd about a gold, and the fix; None if a model may write it."""
    as_text = f"which are read as the text {str(value)!r:.60}"
    if isinstance(value, bytes):
        return f"the gold is bytes, {as_text}", "store it as text: value.decode()"
    if isinstance(value, dict):
        fix = f"store one of its values as the column, such as `{next(iter(value), '')}`"
        return f"the gold has keys ({', '.join(map(str, value))}), {as_text}", fix
    texts = value if isinstance(value, list | tuple) else [value]
    found = (_explain_odd_text(text) for text in texts if isinstance(text, str))
    return next(filter(None, found), None)


def _explain_odd_text(text: str) -> tuple[str, str] | None:
    shown = f"the gold {text!r:.60}"
    if _LIST.fullmatch(text) and _is_list(text):
        fix = (
            "store a list (in JSON lines or Parquet): then each of its texts is an accepted answer"
        )
        return f"{shown} is a list written as text, which is compared whole", fix
    if odd := _UNWRITTEN.search(text):
        return (
            f"{shown} has a character that no answer has (U+{ord(odd[0]):04X})",
            "remove it from the data",
        )
    if (meant := _decode_again(text)) is not None:
        return (
            f"{shown} is UTF-8 read in another encoding; {meant!r:.60} is meant",
            "read the data as UTF-8",
        )
    if _ENTITY.search(text) and (meant := html.unescape(text)) != text:
        fix = "unescape the data (Python: html.unescape), unless answers are to be HTML"
        return f"{shown} has HTML's way of writing {meant!r:.60}", fix
    return None


def _is_list(text: str) -> bool:
    try:
        return isinstance(ast.literal_eval(text.strip()), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _decode_again(text: str) -> str | None:
    """Return the text that was UTF-8 and was read in an encoding of Western Europe; None if it was not."""
    for encoding in () if text.isascii() else ("cp1252", "latin-1"):
        try:
            return text.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
    return None
