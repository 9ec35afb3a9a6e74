"""Mathematical equality through math-verify (sympy): expressions, sets, intervals, matrices.

Owns the calls to math-verify, their time limits, and the guard against expressions that would
never finish. Plain numbers do not come here: `quantities.py` compares them exactly.
"""

import logging
import os
import re
import threading
from functools import lru_cache
from typing import Any

LONGEST_EXPRESSION = 300
"""Characters beyond which an expression is not parsed."""
TIMEOUT_S = 3
"""Limit of one parse or comparison, where a limit can be set."""

_INTEGER = r"[-+]?\s*[0-9]+"
_RAISE = r"(?:\^|\*\*)"
_EXPLOSIVE = re.compile(
    rf"{_RAISE}[\s{{(\[]*[-+]?[0-9]{{5,}}"  # an exponent of five digits or more
    rf"|[0-9)\]}}]\s*{_RAISE}[\s{{(\[]*{_INTEGER}[\s}})\]]*(?:{_RAISE}|!)"  # a tower of powers
    rf"|{_RAISE}\s*\{{[^{{}}]*[0-9][\s)]*(?:\*|\\times|\\cdot|\()[\s(]*[0-9]"  # 9^{{99*99}}
    rf"|{_RAISE}\s*\([^()]*[0-9]\s*(?:\*|\\times|\\cdot)\s*[0-9]"  # 9^(99*99)
    r"|[0-9]{4,}\s*!|[!)}\]]\s*!"  # factorials of large or unknown numbers
    r"|binom\s*\{?\s*[0-9]{5,}"
)


def is_explosive(text: str, longest: int = LONGEST_EXPRESSION) -> bool:
    """Whether evaluating `text` could take for ever: towers of powers, factorials of big numbers.

    Judged by the text alone, on the safe side: nothing is evaluated. Texts of more than `longest`
    characters count as explosive.
    """
    return len(text) > longest or _EXPLOSIVE.search(text) is not None


def same_expression(gold: str, answer: str) -> bool:
    """Whether two LaTeX (or plain) expressions are mathematically equal.

    Args:
        gold: The reference. The order matters: an assignment or interval is read as the gold's.
        answer: The expression to compare; must not be explosive.

    Source: `math_verify.verify` (math-verify 0.9).
    """
    from math_verify import verify

    parsed = parse_expression(answer)
    return bool(parsed) and verify(parse_expression(gold), parsed, timeout_seconds=_timeout_s())


@lru_cache(maxsize=8192)
def parse_expression(text: str) -> list[Any]:
    """The sympy objects math-verify reads in `text`; empty where it reads none."""
    from math_verify import LatexExtractionConfig, parse

    # Off the main thread no limit can be set, which math-verify warns of; it also prints every
    # expression that takes too long, once a completion.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    boxed = f"\\boxed{{{text.replace('**', '^')}}}"
    configs = [LatexExtractionConfig(boxed_match_priority=0)]
    found = parse(boxed, configs, parsing_timeout=_timeout_s())
    return [part for part in found if not isinstance(part, str)]


def _timeout_s() -> int | None:
    """math-verify's limits are signals: they work on the main thread of a POSIX system only."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    return TIMEOUT_S if on_main_thread and os.name == "posix" else None
