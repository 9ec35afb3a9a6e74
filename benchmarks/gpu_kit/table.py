"""The results as text: one table for each part, and estimated beside measured memory."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def compare_memory(rows: Sequence[Row]) -> list[Row]:
    """Put estimates beside measured peaks, from the rows of learning and sampling."""
    found = []
    for row in rows:
        what = ", ".join(f"{key} {row[key]}" for key in ("model", "C", "batch") if key in row)
        for side in ("TRL", "grpo"):
            if (measured := row.get(f"{side} GiB")) is not None:
                estimate = row[f"{side} estimate GiB"]
                gib = {"measured GiB": measured, "estimate GiB": estimate}
                found.append({"of": f"{what}, {side}", **gib, "ratio": estimate / measured})
    return found


def format_part(title: str, result: dict[str, Any]) -> str:
    """Return a heading with the part's state, and its rows in aligned columns."""
    heading = f"{title} ({result['state']}, {result['seconds']:.0f} s)"
    names = list(dict.fromkeys(name for row in result["rows"] for name in row))
    lines = [names, *([_format(row.get(name, "")) for name in names] for row in result["rows"])]
    widths = [max(len(line[at]) for line in lines) for at in range(len(names))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([heading, "-" * len(heading), *table, ""])


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "–" if value is None else str(value)
