"""Numbers as a person reads them: durations, sizes, counts, scores."""

_PLAIN_FROM = 1000
"""From here on three digits are an exponent to `g`, and whole numbers are read better."""
_FEWER_DECIMALS_FROM = 100
_ZERO = 1e-12
"""What is below it is left by the rounding of sums."""


def format_duration(seconds: float) -> str:
    """`75` as `1m15s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def format_bytes(count: float) -> str:
    """Return a size in the binary unit that suits it, such as `1.28 MiB`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{say_number(count / 1024**power)} {unit}"
    return f"{count:.0f} bytes"


def format_count(count: float) -> str:
    """Return a count in thousands, millions or billions, such as `135M`."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        # Three digits may round up to the next unit.
        if count >= 0.9995 * limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


def say_number(value: float, sign: str = "") -> str:
    """A number in three digits, or whole: `0.0123`, `656`, `3,429`; with the sign `+` also of numbers above 0."""
    # Rounding to three digits may make a thousand of a bit less.
    large = _PLAIN_FROM - 0.5 <= abs(value) < 1e9
    value = 0.0 if abs(value) < _ZERO else value
    return _show_minus(f"{value:{sign},.0f}" if large else f"{value:{sign}.3g}")


def format_value(value: float | None, sign: str = "") -> str:
    """Return a score with three decimals, a larger one with fewer; a dash if there is none.

    With the sign `+` also of numbers above 0, as a difference has it.
    """
    if value is None:
        return "–"
    if abs(value) >= _PLAIN_FROM:
        return say_number(value, sign)
    digits = 3 if abs(value) < _FEWER_DECIMALS_FROM else 1
    # Rounding may leave a minus before a zero.
    return _show_minus(f"{round(value, digits) + 0.0:{sign}.{digits}f}")


def format_interval(low: float | None, high: float | None, sign: str = "") -> str:
    """Return the ends of an interval, such as `0.722 to 0.875`; empty if there is none."""
    return "" if low is None else f"{format_value(low, sign)} to {format_value(high, sign)}"


def _show_minus(number: str) -> str:
    return f"−{number[1:]}" if number.startswith("-") else number


def count_noun(number: int, noun: str) -> str:
    """`1 error`, `2 errors`, `3 processes`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def spread(total: int, count: int) -> list[int]:
    """Return so many places at equal distances among a total; all of them if there are fewer."""
    count = min(total, count)
    return [index * total // count for index in range(count)]
