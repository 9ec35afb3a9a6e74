"""When two mathematical expressions are equal: exactly where both are exact, else to six digits.

math-verify parses them and compares their form; numbers are compared here, as it rounds them to six decimals.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

TOLERANCE = Fraction(1, 10**6)
"""Relative difference of a decimal from a number that no decimal of its length can meet."""
_POWER_OF_TEN = re.compile(r"\s*(-?[0-9.]+)[eE]([-+]?[0-9]{1,3})\s*")
_SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (
        re.compile(r"([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar)\s*\{?([0-9]{1,20})\}?"),
        lambda match: _spell_repeating(*match.groups()),
    ),
    (re.compile(r"[⁰¹²³⁴-⁹⁻]+"), lambda match: f"^{{{_plain(match[0])}}}"),
    (re.compile(r"[¼-¾⅐-⅞]"), lambda match: rf"\frac{{{_plain(match[0])}}}"),
    (re.compile(r"√"), r"\\sqrt "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"·"), r"\\cdot "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"(?<=[0-9])\s*\\,\s*(?=[0-9])(?![0-9]{3}(?![0-9]))"), " "),
]
"""What math-verify does not read, and the LaTeX that it reads."""
_ARITHMETIC = re.compile(
    r"(?!.*[0-9)]\s*(?:\(|\s[0-9]))(?:[0-9.+*/^(){}\s-]|\\(?:cdot|times|div|[dt]?frac|sqrt))*"
)
"""What is read in one way only: `8(3)` and `1 1/2` are not."""
_ROUNDING = 0.01
"""Relative difference of two sides of an equation of which one is rounded."""
_DIGITS = 100
_EXACT = 10.0**-90
"""Relative difference of two equal numbers, computed to `_DIGITS` digits."""


def is_near(gold: Fraction, answer: Fraction) -> bool:
    """Return whether two numbers are equal, or one is a decimal and the other is 1/3 or the like and near it."""
    if gold == answer:
        return True
    if _is_decimal(gold) == _is_decimal(answer) or 1 in (gold.denominator, answer.denominator):
        return False
    return abs(gold - answer) <= TOLERANCE * abs(gold)


def spell(text: str) -> str:
    r"""Return the text in LaTeX that math-verify reads: `x²` as `x^{2}`, `½` and `0.\overline{3}` as fractions."""
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text


def _spell_repeating(whole: str, fixed: str, repeated: str) -> str:
    top = int(whole + fixed + repeated) - int(whole + fixed or 0)
    return rf"\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _plain(characters: str) -> str:
    return unicodedata.normalize("NFKC", characters).replace("−", "-").replace("⁄", "}{")


def same_expression(gold: str, answer: str) -> bool:
    """Return whether two LaTeX (or plain) expressions are mathematically equal.

    Args:
        gold: The reference. The order matters: an assignment or interval is read as the gold's.
        answer: The expression to compare; must not be explosive.

    Source: the forms are compared by `math_verify.verify` (math-verify 0.9).
    """
    golds, answers = parse_expression(gold), parse_expression(answer)
    if _is_false_equation(answer):
        return False
    return any(_is_same(*_unwrap(left, right)) for left in golds for right in answers)


def _is_false_equation(text: str) -> bool:
    """Return whether numbers are said to be equal that are not: math-verify reads `3 = 4` as 4."""
    for sides in pairwise(text.split("=")):
        if all(map(_ARITHMETIC.fullmatch, sides)):
            numbers = [each for side in sides for each in parse_expression(side)[:1]]
            if len(numbers) == 2 and all(map(_is_number, numbers)):
                left, right = (complex(number) for number in numbers)
                if abs(left - right) > _ROUNDING * abs(right):
                    return True
    return False


@lru_cache(maxsize=8192)
def parse_expression(text: str) -> list[Any]:
    """Return the sympy objects math-verify reads in `text`; empty if it reads none."""
    import logging

    from math_verify import LatexExtractionConfig, parse

    # The time limit is the worker's, which math-verify warns of.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    power = _POWER_OF_TEN.fullmatch(text)
    plain = rf"{power[1]} \cdot 10^{{{power[2]}}}" if power else text.replace("**", "^")
    boxed = f"\\boxed{{{plain}}}"
    configs = [LatexExtractionConfig(boxed_match_priority=0)]
    parts = parse(boxed, configs, parsing_timeout=None)
    return [part for part in parts if not isinstance(part, str)]


def _unwrap(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Return the sides to compare of assignments (`x = 5`), as math-verify does."""
    is_gold, is_answer = (_is_assignment(each) for each in (gold, answer))
    same = is_gold and is_answer and gold.lhs == answer.lhs
    return (
        gold.rhs if same or (is_gold and not is_answer) else gold,
        answer.rhs if same or (is_answer and not is_gold) else answer,
    )


def _is_assignment(expression: Any) -> bool:
    from sympy import Eq

    return isinstance(expression, Eq) and expression.lhs.is_Symbol


def _is_same(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    if _is_number(gold) and _is_number(answer):
        return _same_number(gold, answer)
    matched = answer
    if not _is_number(answer):
        numbers = _list_numbers(gold)
        matched = _replace_numbers(answer, lambda number: _match(number, numbers))
    if not verify(gold, matched, timeout_seconds=None):
        return False
    sides = [each for each in (gold, answer) if getattr(each, "is_Relational", False)]
    if len(sides) == 2 and type(gold) is type(answer) and gold.lhs == answer.lhs:
        return _is_same_anywhere(gold.rhs, answer.rhs)
    return bool(sides) or _is_same_anywhere(gold, matched)


def _is_same_anywhere(gold: Any, answer: Any) -> bool:
    """Return whether two terms have the same value for a value of their variables; True if that is unknown."""
    from sympy import Expr, Rational

    variables: set[Any] = getattr(gold, "free_symbols", set())
    if (
        not all(isinstance(each, Expr) for each in (gold, answer))
        or variables != answer.free_symbols
    ):
        return True
    values = {
        symbol: Rational(17 + 4 * index, 7 + 3 * index)
        for index, symbol in enumerate(sorted(variables, key=str))
    }
    left, right = gold.subs(values), answer.subs(values)
    return not (_is_number(left) and _is_number(right)) or _same_number(left, right)


def _is_number(expression: Any) -> bool:
    from sympy import Expr

    return isinstance(expression, Expr) and bool(expression.is_number)


def _list_numbers(expression: Any) -> list[Any]:
    numbers: dict[Any, Any] = {}
    _replace_numbers(expression, lambda number: numbers.setdefault(number, number))
    return list(numbers)


def _replace_numbers(expression: Any, change: Callable[[Any], Any]) -> Any:
    """Return a set, tuple, matrix or bound with its numbers changed; anything else as it is."""
    from sympy import And, FiniteSet, Interval, MatrixBase, Tuple

    if _is_number(expression):
        return change(expression)
    if isinstance(expression, MatrixBase):
        return expression.applyfunc(lambda each: _replace_numbers(each, change))
    if isinstance(expression, And):
        parts = getattr(expression, "_unsorted_args", expression.args)
        return type(expression)(*[_replace_numbers(each, change) for each in parts])
    if getattr(expression, "is_Relational", False):
        sides = expression.args
        is_bound = any(each.is_Symbol for each in sides)
        changed = [_replace_numbers(each, change) if is_bound else each for each in sides]
        return expression.func(*changed, evaluate=False)
    if not isinstance(expression, FiniteSet | Interval | Tuple):
        return expression
    return expression.func(*[_replace_numbers(each, change) for each in expression.args])


def _match(number: Any, numbers: list[Any]) -> Any:
    """Return the one that is the same number; if there is none, what equals nothing."""
    from sympy import Dummy

    if number.is_infinite:
        return number
    return next((each for each in numbers if _same_number(each, number)), Dummy(real=True))


def _same_number(gold: Any, answer: Any) -> bool:
    """Return whether two expressions without variables are the same number."""
    from sympy import Float, Rational

    left, right = _exact(gold), _exact(answer)
    scale = Rational(100) if _is_percent(gold) else Rational(1, 100)
    if _is_percent(gold) != _is_percent(answer) and _is_close(left * scale, right):
        return True
    return _is_close(left, right, is_decimal=gold.has(Float) or answer.has(Float))


def _is_close(gold: Any, answer: Any, *, is_decimal: bool = False) -> bool:
    from sympy import nan, zoo

    if gold.has(nan, zoo):
        return False
    if gold == answer:
        return True
    if gold.is_Rational and answer.is_Rational:
        return is_near(Fraction(gold.p, gold.q), Fraction(answer.p, answer.q))
    is_decimal = is_decimal or any(
        each.is_Rational and each.q != 1 and _is_decimal(Fraction(1, each.q))
        for each in (gold, answer)
    )
    size = abs(gold.evalf(_DIGITS))
    difference = abs((gold - answer).evalf(_DIGITS, maxn=10 * _DIGITS))
    if not (size.is_Float or size.is_Integer) or not difference.is_comparable:
        return bool((gold - answer).equals(0))
    return bool(
        difference <= (TOLERANCE.numerator / TOLERANCE.denominator if is_decimal else _EXACT) * size
    )


def _exact(number: Any) -> Any:
    """Return a number with its decimals as fractions."""
    from sympy import Float, Rational

    return number.xreplace(
        {each: Rational(repr(float(each))) for each in number.atoms(Float)}
    ).doit()


def _is_percent(number: Any) -> bool:
    from sympy import Rational, UnevaluatedExpr

    return bool(number.has(UnevaluatedExpr(Rational(1, 100))))


def _is_decimal(number: Fraction) -> bool:
    """Return whether a number can be written with a finite number of decimals."""
    rest = number.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1
