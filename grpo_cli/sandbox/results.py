"""Compares what a program returned or printed with what was expected, where neither can be changed any more."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TOLERANCE = 1e-6
_SHOWN = 40


def find_difference(value: "Any", expected: "Any", compare: str, verb: str = "got") -> str:
    """Return how a value differs; empty if it does not, with `compare: float` beyond a tolerance."""
    if value == expected or (compare == "float" and _is_close(value, expected)):
        return ""
    return f"expected {_show(expected)}, {verb} {_show(value)}"


def find_result_difference(value: "Any", expected: "Any", compare: str, is_wrapped: bool) -> str:
    """Return how the result of a call differs from one that was JSON; it may be the only item of a list."""
    value, expected = _as_json(value), _as_json(expected)
    if is_wrapped and not find_difference([value], expected, compare):
        return ""
    return find_difference(value, expected, compare)


def _is_close(value: "Any", expected: "Any") -> bool:
    """Return whether two values are alike, with numbers (or texts of numbers) nearly equal."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_is_close(*pair) for pair in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):
        keys = value.keys() == expected.keys()
        return keys and all(_is_close(value[key], expected[key]) for key in expected)
    if value == expected:
        return True
    from math import isclose

    try:
        number, right = _read_number(value), _read_number(expected)
        if isinstance(number, int) and isinstance(right, int):
            return number == right
        return isclose(number, right, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except (TypeError, ValueError, OverflowError):
        return False


def _read_number(value: "Any") -> "Any":
    """Return a number, or what a text is the number of as contest checkers read it; other values as they are."""
    import re

    if not isinstance(value, str):
        return None if isinstance(value, bool) else value
    if re.fullmatch(r"[+-]?[0-9]+", value):
        return int(value)
    is_number = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value)
    return float(value) if is_number else None


def _as_json(value: "Any") -> "Any":
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return value


def _show(value: "Any") -> str:
    try:
        text = repr(value.strip() if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        # Python refuses to write integers of thousands of digits.
        return f"a {type(value).__name__}"
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]} … {text[-half:]}"
