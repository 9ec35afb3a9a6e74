"""Numbers as a person reads them: durations, sizes, counts."""


def format_duration(seconds: float) -> str:
    """`75` as `1m15s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def format_bytes(count: float) -> str:
    """A size in the binary unit that suits it, such as `1.28 MiB`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.3g} {unit}"
    return f"{count:.0f} bytes"


def format_count(count: float) -> str:
    """A count in thousands, millions or billions, such as `135M`."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"
