"""Tables of completions with their rewards, as records: what rules read of texts, and how groups were scored."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

TEXTS = frozenset(
    {"completion", "completions", "response", "output", "generated_text", "generation"}
)
"""Names of texts that a model wrote."""
_PROMPTS = ("prompt", "prompts", "input", "question", "query")
_TOTALS = ("reward", "score", "total_reward", "rewards")
_NOT_SCORES = frozenset(
    "step global_step advantage advantages epoch index id row idx rank temperature length tokens "
    "num_tokens completion_length prompt_length response_length group uid".split()
)
_FLAT = 1e-8
_MOST_IN_GROUP = 16
"""Completions of a table's only prompt; more are of several prompts that differ in what is not in the text."""


@dataclass
class _Step:
    """The completions of one step."""

    groups: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Prompt → its rows; texts by their hashes."""
    texts: list[int] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)


class CompletionTable:
    """Collects rows of completions by step."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = defaultdict(_Step)

    def add(self, row: Mapping[str, Any], step: int) -> bool:
        """Add a row; return whether it is a completion with a score."""
        values = {str(name).lower(): value for name, value in row.items()}
        text = next((values[name] for name in TEXTS if values.get(name)), None)
        scores = {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float)
            and not isinstance(value, bool)
            and str(name).lower() not in _NOT_SCORES
        }
        if not isinstance(text, str | list) or not scores:
            return False
        prompt = next((values[name] for name in _PROMPTS if values.get(name)), "")
        table = self._steps[step]
        table.groups[hash(str(prompt))].append(len(table.texts))
        table.texts.append(hash(str(text).strip()))
        table.scores.append(scores)
        return True

    def records(self) -> Iterator[tuple[int, dict[str, float], str]]:
        """Yield each step, its metrics by TRL's names, and what they are of in words."""
        for step in sorted(self._steps):
            yield step, *_measure(self._steps[step])


def _measure(table: _Step) -> tuple[dict[str, float], str]:
    names = list(dict.fromkeys(name for each in table.scores for name in each))
    total = next((name for name in names if name.lower() in _TOTALS), None)
    parts = [name for name in names if name != total]
    totals = [each.get(total, 0.0) if total else sum(each.values()) for each in table.scores]
    metrics = {"reward": fmean(totals)}
    for name in parts:
        scores = [each[name] for each in table.scores if name in each]
        metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = (
            fmean(scores),
            pstdev(scores),
        )
    rows, groups = len(table.texts), [each for each in table.groups.values() if len(each) > 1]
    distinct = len(set(table.texts))
    words = f"{rows} completions, {distinct} of them different"
    known = len(table.groups) > 1 or rows <= _MOST_IN_GROUP
    if not groups or not known:
        why = "one prompt" if not known else "no prompt twice"
        return metrics, f"{words}; {why}, so that groups are not known"
    spreads = [pstdev([totals[row] for row in each]) for each in groups]
    silent = sum(spread < _FLAT for spread in spreads)
    counts = [Counter(table.texts[row] for row in each) for each in groups]
    repeated = sum(count for each in counts for count in each.values() if count > 1)
    metrics |= {
        "reward_std": fmean(spreads),
        "frac_reward_zero_std": silent / len(groups),
        "completions/repeated_share": repeated / sum(map(len, groups)),
    }
    return metrics, f"{words}; {silent} of {len(groups)} groups have no two different rewards"
