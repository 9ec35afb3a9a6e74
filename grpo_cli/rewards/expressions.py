"""When two mathematical expressions are equal: exactly where both are exact, else to six digits.

math-verify parses them and compares their form; numbers are compared here, as it rounds them to six decimals.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

TOLERANCE = Fraction(1, 10**6)
"""Relative difference of a decimal from a number that no decimal of its length can meet."""
_SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (
        re.compile(r"([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar)\s*\{?([0-9]{1,20})\}?"),
        lambda match: _spell_repeating(*match.groups()),
    ),
    (re.compile(r"[⁰¹²³⁴-⁹⁻]+"), lambda match: f"^{{{_plain(match[0])}}}"),
    (re.compile(r"[¼-¾⅐-⅞]"), lambda match: rf"\frac{{{_plain(match[0])}}}"),
    (re.compile(r"\A\s*(-?[0-9.]+)[eE]([-+]?[0-9]{1,3})\s*\Z"), r"\1 \\cdot 10^{\2}"),
    (re.compile(r"√"), r"\\sqrt "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"·"), r"\\cdot "),
    (re.compile(r"[！-～]"), lambda match: _plain(match[0])),
    (re.compile(r"°|\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\A(?:\\left)?<([^<>=]{1,300},[^<>=]{1,300})>\Z"), r"(\1)"),
    (re.compile(r"\\langle(?![A-Za-z])|⟨"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])|⟩"), ")"),
    (re.compile(r"(\\text\s?\{\s?)?\(?\s?\bbase\s?(?(1)\}?)\s?([0-9]+)\)?(?(1)\}?)"), r"_{\2}"),
    (re.compile(r"\\text\s?\{([^{}]{0,99}(?:,|\b(?:and|or)\b)[^{}]{0,99})\}"), r" \1 "),
    (re.compile(r"\A\\(?:left\\)?\{\s*[A-Za-z]\s*(?:\\mid|\|)(.+?)\\(?:right\\)?\}\Z"), r"\1"),
    (re.compile(r"\\&"), " and "),
    (re.compile(r"\\(?:cdot|times)\s*(?=\\(?:sin|cos|tan|cot|sec|csc)(?![a-z]))"), " "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"(?<=[0-9])\s*\\,\s*(?=[0-9])(?![0-9]{3}(?![0-9]))"), " "),
]
"""What math-verify does not read, or reads as something else, and the LaTeX that it reads."""
_BASED = re.compile(
    r"(?<![\w\\.}])(\()?([0-9A-F]*[0-9][0-9A-F]*)(?:\.([0-9A-F]+))?(?(1)\))"
    r"\s*_\s*(?:([0-9])|\{\s*(?:\\text\s*\{)?\s*\(?\s*([0-9]{1,2})\s*\)?\s*\}{1,2})"
)
r"""A number and its base: `101_2`, `101_{(2)}`, `(101)_2`."""
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
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


@lru_cache(maxsize=256)
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
    """Return whether two LaTeX (or plain) expressions are equal; assignments are read as the gold's."""
    golds, answers = parse_expression(gold), parse_expression(answer)
    if _is_false_equation(answer):
        return False
    return any(_is_same(left, right) for left in golds for right in answers)


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
    plain = _BASED.sub(_spell_based, text.replace("**", "^"))
    configs = [LatexExtractionConfig(boxed_match_priority=0)]
    readings = dict.fromkeys([plain, _DEGREE.sub(r"\\cdot\\frac{\\pi}{180}", plain)])
    boxes = [f"\\boxed{{{each}}}" for each in readings]
    parts = [parse(each, configs, "no_fallback", "first_match", None) for each in boxes]
    return [_replace(part, _normalize) for part in chain(*parts)]


def _spell_based(match: re.Match[str]) -> str:
    """Return a number of another base than 10 as a multiple of a symbol, which no plain number equals."""
    whole, fraction, base = match[2], match[3] or "", int(match[4] or match[5])
    if base == 10 or not all(int(digit, 16) < base for digit in whole + fraction):
        return match[0]
    return rf"\frac{{{int(whole + fraction, base)}}}{{{base ** len(fraction)}}}\flat_{{{base}}}"


def _normalize(term: Any) -> Any:
    """Return a term with `i` as the imaginary unit, real variables, and fractions for its decimals."""
    from sympy import I, Symbol

    names = {each: each.name for each in term.free_symbols}
    symbols = {each: I if name == "i" else Symbol(name, real=True) for each, name in names.items()}
    exact = _use_fractions(term) if {*names.values()} - {"i"} else term
    return exact.xreplace(symbols)


def _is_same(gold: Any, answer: Any) -> bool:
    from math_verify import verify
    from sympy import Eq, MatrixBase, Tuple

    pair = [gold, answer]
    sides = [each.lhs for each in pair if isinstance(each, Eq)]
    if len({*sides}) == 1 and (len(sides) == 2 or sides[0].is_Symbol):
        pair = [each.rhs if isinstance(each, Eq) else each for each in pair]
    if sum(isinstance(each, MatrixBase) for each in pair) == 1:
        pair = [Tuple(*each) if 1 in getattr(each, "shape", ()) else each for each in pair]
    gold, answer = pair
    if _is_number(gold) and _is_number(answer):
        return _same_number(gold, answer)
    if not _is_number(answer):
        numbers: dict[Any, Any] = {}
        _replace_numbers(gold, lambda number: numbers.setdefault(number, number))
        answer = _replace_numbers(answer, lambda number: _match(number, [*numbers]))
    return verify(
        gold, answer, _DIGITS, _DIGITS, allow_set_relation_comp=True, timeout_seconds=None
    )


def _is_number(expression: Any) -> bool:
    from sympy import Expr

    return isinstance(expression, Expr) and bool(expression.is_number)


def _replace_numbers(expression: Any, change: Callable[[Any], Any]) -> Any:
    """Return a set, tuple, matrix or bound with its numbers changed; anything else as it is."""
    return _replace(expression, lambda each: change(each) if _is_number(each) else each)


def _replace(expression: Any, change: Callable[[Any], Any]) -> Any:
    """Return a term, or a set, tuple, matrix or bound, with its terms changed; anything else as it is."""
    from sympy import And, Expr, FiniteSet, Interval, MatrixBase, Tuple

    if isinstance(expression, MatrixBase):
        return expression.applyfunc(lambda each: _replace(each, change))
    if isinstance(expression, Expr):
        return change(expression)
    if isinstance(expression, And):
        parts = getattr(expression, "_unsorted_args", expression.args)
        return type(expression)(*[_replace(each, change) for each in parts])
    if getattr(expression, "is_Relational", False):
        sides = expression.args
        is_bound = change is _normalize or any(each.is_Symbol for each in sides)
        changed = [_replace(each, change) if is_bound else each for each in sides]
        return expression.func(*changed, evaluate=False)
    if not isinstance(expression, FiniteSet | Interval | Tuple):
        return expression
    return expression.func(*[_replace(each, change) for each in expression.args])


def _match(number: Any, numbers: list[Any]) -> Any:
    """Return the one that is the same number; if there is none, what equals nothing."""
    from sympy import Dummy

    if number.is_infinite:
        return number
    return next((each for each in numbers if _same_number(each, number)), Dummy(real=True))


def _same_number(gold: Any, answer: Any) -> bool:
    """Return whether two expressions without variables are the same number."""
    from sympy import Float, Rational

    left, right = (_use_fractions(each).doit() for each in (gold, answer))
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
    parts = (gold - answer).evalf(_DIGITS, maxn=10 * _DIGITS).as_real_imag()
    if not all(each.is_Float or each.is_Integer for each in (size, *parts)):
        return bool((gold - answer).equals(0))
    difference = max(map(abs, parts))
    return bool(
        difference <= (TOLERANCE.numerator / TOLERANCE.denominator if is_decimal else _EXACT) * size
    )


def _use_fractions(term: Any) -> Any:
    from sympy import Float, Rational

    return term.xreplace({each: Rational(repr(float(each))) for each in term.atoms(Float)})


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
