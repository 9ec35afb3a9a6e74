"""What became of the rows: counts of both splits, lengths of prompts, and a fingerprint."""

import hashlib
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow

from grpo_cli.data.dropped import Dropped, count_dropped
from grpo_cli.data.rows import RowNames
from grpo_cli.data.scored import GroupReport
from grpo_cli.data.sources import IDENTIFYING, identify
from grpo_cli.data.table import fingerprint, iterate_rows, similar_rows
from grpo_cli.recipe.dataset import DatasetConfig, FilesDataset, MixtureDataset


@dataclass(frozen=True)
class PromptTokens:
    """Lengths of the prompts kept, in tokens; nearest-rank percentiles."""

    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True)
class DataReport:
    """What became of the rows."""

    train_rows: int | None
    """None if they are streamed: what is said of training rows is then of the first ones."""
    eval_rows: int | None
    """None if nothing is held out."""
    dropped: Dropped
    """Rows that are dropped, by split and reason, beside the number of rows of the sources."""
    dropped_columns: tuple[str, ...]
    """Columns not passed on because TRL or `grpo` uses their names."""
    prompt_tokens: PromptTokens | None
    """None if tokens could not be counted; of many rows without `max_prompt_length`, those of a sample."""
    exact_duplicates_between_splits: int
    """Evaluation rows whose prompt is also a training prompt."""
    fingerprint: str
    """SHA-256 in hex over the prompts and columns of both splits, in order."""
    fingerprint_version: int = 2
    """Of the way it is computed; fingerprints of different versions cannot be compared."""
    plain_text: bool = False
    """Whether prompts are plain text, not messages."""
    groups: GroupReport | None = None
    """Of scored data, whose rows are groups; None of other kinds."""
    sources: dict[str, dict[str, Any]] | None = None
    """Of a mixture, whose `train_rows` are the prompts of an epoch: each source's own rows, and its ratio."""

    def as_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


@dataclass
class Split:
    """One split while it is built."""

    rows: pyarrow.Table
    names: RowNames
    total: int = 0
    """Rows of the source; none if these were divided off the training rows."""
    no_match: int = 0
    too_long: int = 0
    longest: int = 0
    """Tokens of the longest prompt that is dropped."""
    single: int = 0
    """Prompts of scored data with a single response, which are left out."""
    tokens: list[int] = field(default_factory=list)
    """Of the rows kept, or of a sample of them."""
    dropped_columns: frozenset[str] = frozenset()

    @property
    def counts(self) -> dict[str, int]:
        """The rows of the source, and those that are dropped by reason."""
        dropped = {"no_match": self.no_match, "too_long": self.too_long}
        return {"rows": self.total, **dropped, "longest": self.longest}


def make_report(
    dataset: DatasetConfig,
    trains: list[Split],
    helds: list[Split],
    groups: GroupReport | None,
    drawn: int,
) -> DataReport:
    """Return the report on the splits of all sources; training draws `drawn` rows in an epoch."""
    splits = [*trains, *helds]
    held_out = [identify(row) for held in helds for row in iterate_rows(held.rows, IDENTIFYING)]
    asked = {*held_out}
    asked &= {
        identify(row)
        for train in (trains if asked else ())
        for row in iterate_rows(
            similar_rows(train.rows, [held.rows for held in helds]), IDENTIFYING
        )
    }
    digest, sources = fingerprint(split.rows for split in splits), None
    if isinstance(dataset, MixtureDataset):
        held = [len(each.rows) for each in helds] or [0] * len(trains)
        sources = {
            source.name: {"train_rows": len(train.rows), "eval_rows": count, "ratio": source.ratio}
            for source, train, count in zip(dataset.sources, trains, held, strict=True)
        }
    elif dataset.streams is not None:
        # Of the rows, only the first are here.
        paths = dataset.train if isinstance(dataset, FilesDataset) else ()
        sizes = [Path(path).expanduser().stat().st_size for path in paths]
        digest = hashlib.sha256(f"{digest} {sizes}".encode()).hexdigest()
    counts, lengths = sorted(count for split in splits for count in split.tokens), None
    if counts:
        median, p95 = (counts[math.ceil(share * len(counts)) - 1] for share in (0.5, 0.95))
        lengths = PromptTokens(counts[0], median, p95, counts[-1])
    return DataReport(
        train_rows=None if dataset.streams is not None else drawn,
        eval_rows=len(held_out) if helds else None,
        dropped=count_dropped(
            (split.names.split if split.total else "training", split.counts) for split in splits
        ),
        dropped_columns=tuple(sorted(set().union(*(split.dropped_columns for split in splits)))),
        prompt_tokens=lengths,
        exact_duplicates_between_splits=sum(map(asked.__contains__, held_out)),
        fingerprint=digest,
        plain_text=all(pyarrow.types.is_string(each.rows["prompt"].type) for each in trains),
        groups=groups,
        sources=sources,
    )
