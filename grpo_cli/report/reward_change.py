"""How the training reward has changed from a run's first records to its last, beside its noise.

Owns how many records a beginning and an end are means of, and when a change is said to be noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_cli.analysis.diagnosis.trends import LIKELY, compare

_SHARE = 10
"""The part of a run, one record in so many, that its beginning and its end are."""
_FEWEST = 4
"""Records of each, where there are twice as many: single steps are too noisy to compare."""


@dataclass(frozen=True)
class RewardChange:
    """Two means of as many records, the first and the last."""

    first: float
    last: float
    width: int
    """Records that each is the mean of."""
    is_noise: bool | None
    """Whether the records differ among themselves so much that it may be no change; None where too few tell."""

    def say_width(self) -> str:
        """What was averaged."""
        if self.width == 1:
            return "the first and the last record"
        return f"mean of the first and last {self.width} records"

    def describe(self) -> str:
        """What was averaged, and whether the change is more than noise."""
        # Short: it stands in a table of a narrow terminal.
        return f"within noise (means of {self.width})" if self.is_noise else self.say_width()


def count_averaged(records: int) -> int:
    """How many of so many records the beginning is a mean of, and the end."""
    return max(records // _SHARE, min(_FEWEST, records // 2), 1)


def compare_ends(first: Sequence[float], last: Sequence[float]) -> RewardChange | None:
    """The change from the first records to the last; None where there are none."""
    if not first or not last:
        return None
    change = compare(first, last)
    noise = None if change is None else 0 < abs(change.difference) <= LIKELY * change.error
    return RewardChange(fmean(first), fmean(last), min(len(first), len(last)), noise)


def read_change(rewards: Sequence[float]) -> RewardChange | None:
    """The change over the rewards of a run, in their order; None where there are none."""
    width = count_averaged(len(rewards))
    return compare_ends(rewards[:width], rewards[-width:])
