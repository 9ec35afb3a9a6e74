"""Rows that are dropped: counted once each, even if a mixture draws them often, and told in one line."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from grpo_cli.issues import Issue, Level

REASONS = {
    "no_match": "in which a pattern of `dataset.columns` finds nothing",
    "too_long": "longer than `max_prompt_length`",
}
"""Why rows are dropped: key of the counts → how it is told."""
_MOST_TOO_LONG = 0.1
"""Share of rows from which on a limit of length is worth a warning."""
Dropped = Mapping[str, Mapping[str, int]]
"""`training` or `evaluation` → `rows` of the sources, and how many of them are dropped for each reason, and the
tokens of the `longest` prompt that is."""


def count_dropped(parts: Iterable[tuple[str, Mapping[str, int]]]) -> Dropped:
    """Return the counts of all sources together, by split."""
    total: dict[str, dict[str, int]] = {}
    for split, counts in parts:
        sums = total.setdefault(split, dict.fromkeys(("rows", *REASONS, "longest"), 0))
        longest = max(sums["longest"], counts.get("longest", 0))
        sums.update({name: value + counts.get(name, 0) for name, value in sums.items()})
        sums["longest"] = longest
    return total


def say_dropped(dropped: Dropped) -> str:
    """Return how many rows of each split are dropped, and why; empty if none is."""
    parts = []
    for split, counts in dropped.items():
        known = {reason: counts[name] for name, reason in REASONS.items() if counts.get(name)}
        if known:
            listed = [f"{count:,} {reason}" for reason, count in known.items()]
            why = ", ".join(listed if len(listed) > 1 else known)
            parts.append(f"{sum(known.values()):,} of {counts['rows']:,} {split} rows ({why})")
    return " and ".join(parts)


def check_dropped(dropped: Dropped, path: str = "", first: str = "") -> Iterator[Issue]:
    """Yield one issue if rows are dropped; a pattern at `path` finds nothing in the row called `first`."""
    if not (line := say_dropped(dropped)):
        return
    levels: list[Level] = []
    reasons: Counter[str] = Counter()
    for counts in dropped.values():
        is_much = counts["no_match"] >= counts["rows"] / 2 > 0
        is_much |= counts["too_long"] > counts["rows"] * _MOST_TOO_LONG
        levels.append("warning" if is_much else "note")
        reasons.update({name: counts[name] for name in REASONS})
    longest = max(counts["longest"] for counts in dropped.values())
    example = f" (such as {first})" if first else ""
    fixes = {
        "no_match": f"correct the pattern, unless rows without an answer are meant{example}",
        "too_long": f"set `max_prompt_length: {longest}` to keep all prompts",
    }
    fix = "; ".join(fixes[name] for name in REASONS if reasons[name])
    path = path or ("dataset.columns" if reasons["no_match"] else "dataset.max_prompt_length")
    level = max(levels, key=("note", "warning").index)
    yield Issue(f"dropped {line}", fix, path, level=level, subject="data: rows")
