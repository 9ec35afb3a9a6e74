"""The table of names: what each tool calls a metric or a setting."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from operator import itemgetter
from typing import Any

import yaml

from grpo_cli.logs.completions import TEXTS

Source = tuple[tuple[str, ...], str]
"""Names in a record, which are added up, and the metric that they are."""
_REWARD = re.compile(r"rewards?/([^/]+(?:/[^/]+)*?)(?<!_std)(?<!_max)(?<!_min)(?:/(mean|std))?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_VALIDATION = re.compile(r"(?:eval|val|validation|val-core|test)[/_]")
_OF_VALIDATION = re.compile(
    r"(?:test_score|reward|rewards|score|accuracy|acc)(?:/.*)?|.*/(?:reward|score|acc)/mean(?:@\d+)?"
)


@cache
def read_table() -> dict[str, Any]:
    """Return the table in `names.yaml`."""
    text = resources.files("grpo_cli.logs").joinpath("names.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded


def plain(name: str) -> str:
    """Return a name as the table has it: in lower case, without `train/` and blanks around a slash."""
    # A chart that W&B exports has the run's name before that of the metric.
    lowered = re.sub(r"\s*/\s*", "/", str(name).rpartition(" - ")[2].strip().lower())
    for prefix in ("train/", "metrics/", "grpo/"):
        lowered = lowered.removeprefix(prefix)
    return lowered.replace("_", " ") if lowered in _spaced() else lowered


@cache
def _spaced() -> frozenset[str]:
    names = (name for names in read_table()["metrics"].values() for name in names)
    return frozenset(name.replace(" ", "_") for name in names if " " in name and "+" not in name)


@dataclass(frozen=True, eq=False)
class Sources:
    """Where the metrics of a record come from."""

    parts: tuple[Source, ...]

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(metric for _, metric in self.parts)

    @cached_property
    def get(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]] | None:
        """Takes the values of a record; None if some are sums, or if there are fewer than two."""
        names = [parts[0] for parts, _ in self.parts if len(parts) == 1]
        return itemgetter(*names) if len(names) == len(self.parts) > 1 else None


@dataclass(frozen=True, eq=False)
class Layout:
    """How the names of a record are read."""

    step: str | None
    """The name of the step."""
    train: Sources
    evaluation: Sources
    marks: frozenset[str]
    """All names, as the table has them."""
    is_completion: bool = False
    """Whether a text is among them that a model may have written."""

    @cached_property
    def is_supervised(self) -> bool:
        """True if supervised training logs such names."""
        return not self.marks.isdisjoint(read_table()["supervised"])

    @cached_property
    def is_preference(self) -> bool:
        """True if training on preferences logs such names."""
        return not self.marks.isdisjoint(read_table()["preferences"])


def find_layout(names: Iterable[str]) -> Layout:
    """Return how a record with these names is read."""
    by_plain: dict[str, str] = {}
    for name in names:
        by_plain.setdefault(plain(_CONTROL.sub("", name)), name)
    held_out = {name: own for name, own in by_plain.items() if _VALIDATION.match(name)}
    trained = {name: own for name, own in by_plain.items() if name not in held_out}
    step = next((by_plain[each] for each in read_table()["steps"] if each in by_plain), None)
    evaluation = {_VALIDATION.sub("", name, count=1): own for name, own in held_out.items()}
    return Layout(
        step,
        Sources(tuple(_find_sources(trained))),
        Sources(tuple((parts, f"eval_{metric}") for parts, metric in _find_held_out(evaluation))),
        frozenset(by_plain),
        not TEXTS.isdisjoint(by_plain),
    )


def _find_sources(names: Mapping[str, str]) -> Iterator[Source]:
    taken: set[str] = set()
    for metric, known in read_table()["metrics"].items():
        for parts in (each.split(" + ") for each in known):
            if all(part in names for part in parts):
                yield tuple(names[part] for part in parts), metric
                break
        taken.update(part for each in known for part in each.split(" + "))
    steps, ignored = read_table()["steps"], _ignored()
    for name, own in names.items():
        if name in taken or name in steps or ignored.fullmatch(name):
            continue
        match = _REWARD.fullmatch(name)
        # The name of a reward keeps its upper case.
        clean = _CONTROL.sub("", own)
        yield (own,), _rename_reward(clean, match) if match else clean


def _find_held_out(names: Mapping[str, str]) -> Iterator[Source]:
    sources = list(_find_sources(names))
    scores = [own for name, own in names.items() if _OF_VALIDATION.fullmatch(name)]
    if scores and not any(metric == "reward" for _, metric in sources):
        yield (scores[0],), "reward"
        sources = [each for each in sources if each[0] != (scores[0],)]
    yield from sources


def _rename_reward(own: str, match: re.Match[str]) -> str:
    parts = [part.strip() for part in own.split("/")]
    start = next((at for at, part in enumerate(parts) if part.lower() in ("rewards", "reward")), 0)
    parts = parts[start + 1 : -1 if match[2] else None]
    return f"rewards/{'/'.join(parts)}/{match[2] or 'mean'}"


@cache
def _ignored() -> re.Pattern[str]:
    return re.compile(read_table()["ignored"])


def find_tool(names: Iterable[str]) -> str | None:
    """Return the tool that logs under most of these names; None if none does."""
    marks = set(names)
    counts = {
        tool: len(marks.intersection(each["marks"])) for tool, each in read_table()["tools"].items()
    }
    best = max(counts, key=lambda tool: counts[tool])
    return best if counts[best] else None
