"""Whether a run is what its label says: by its records, its model's answers and its weights, not by a rule."""

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

Records = list[dict[str, Any]]


class Change(NamedTuple):
    """Means of the first and the last quarter of the records, and the standard error of their difference.

    The noise is that of successive records, so that a trend within a quarter does not count as noise.
    """

    first: float
    last: float
    error: float

    def __str__(self) -> str:
        return f"{self.first:.3g} -> {self.last:.3g} (standard error {self.error:.2g})"

    @property
    def rose(self) -> bool:
        return self.last - self.first > 4 * self.error

    @property
    def fell(self) -> bool:
        return self.first - self.last > 4 * self.error


def measure_change(records: Records, metric: str) -> Change:
    """Compare the first quarter of the records with the last."""
    values = [float(record[metric]) for record in records if record.get(metric) is not None]
    count = max(len(values) // 4, 2)
    ends = values[:count], values[-count:]
    jumps = [(b - a) ** 2 / 2 for end in ends for a, b in pairwise(end)]
    error = math.sqrt(2 * statistics.fmean(jumps) / count)
    return Change(statistics.fmean(ends[0]), statistics.fmean(ends[1]), error)


def prove(label: str, records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    """Return whether the label is true, and the numbers that say so."""
    return _PROOFS[label](records, facts)


def _truth(facts: dict[str, Any]) -> str:
    before, after = facts["before"]["truth"], facts["after"]["truth"]
    return f"true reward of 160 samples {before:.2f} -> {after:.2f}"


def _gain(facts: dict[str, Any]) -> float:
    """Of the true reward; minus infinity if the model cannot be sampled any more."""
    gain = float(facts["after"]["truth"] - facts["before"]["truth"])
    return -math.inf if math.isnan(gain) else gain


def _healthy(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    reward = measure_change(records, "reward")
    learned = reward.rose and _gain(facts) > 0.1
    solved = abs(facts["before"]["truth"] - (1 if reward.first > 0 else 0)) < 0.15
    kept = solved and not reward.fell and _gain(facts) > -0.03
    return learned or kept, f"reward {reward}; {_truth(facts)}"


def _flat(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    reward, equal = (measure_change(records, key) for key in ("reward", "frac_reward_zero_std"))
    flat = not reward.rose and not reward.fell and equal.last < 0.8 and _gain(facts) < 0.1
    return flat, f"reward {reward}; equal groups {equal.last:.2f}; {_truth(facts)}"


def _all_equal(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    values = {float(record["reward"]) for record in records}
    equal = min(float(record["frac_reward_zero_std"]) for record in records)
    return len(values) == 1 and equal == 1, f"rewards {values}; equal groups always {equal:.2f}"


def _clipped(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    clipped = measure_change(records, "completions/clipped_ratio")
    zero = facts["after"]["truth"] < 0.01
    cut = min(clipped.first, clipped.last) >= 0.95
    return zero and cut, f"clipped {clipped}; {_truth(facts)}"


def _exploding_kl(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    divergence = measure_change(records, "kl")
    last = [float(record["kl"]) for record in records[-len(records) // 4 :]]
    proof = f"KL {divergence}; {_truth(facts)}"
    return statistics.median(last) > 2 and _gain(facts) < 0.05, proof


def _collapse(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    entropy, reward = measure_change(records, "entropy"), measure_change(records, "reward")
    before, after = facts["before"]["commonest"], facts["after"]["commonest"]
    one = after >= 0.5 and before < 0.4 and entropy.last < 0.2
    proof = (
        f"commonest answer {before:.2f} -> {after:.2f} of 160; entropy {entropy}; reward {reward}"
    )
    return one and _gain(facts) < 0.05, proof


def _too_high(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    reward, gradient = measure_change(records, "reward"), measure_change(records, "grad_norm")
    proof = f"reward {reward}; {_truth(facts)}; gradient {gradient}; weights moved {facts['weights_moved']:.2g}"
    return _gain(facts) < -0.05, proof


def _too_low(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    reward, equal = (measure_change(records, key) for key in ("reward", "frac_reward_zero_std"))
    still = not reward.rose and not reward.fell and facts["weights_moved"] < 1e-5
    proof = f"reward {reward}; equal groups {equal.last:.2f}; weights moved {facts['weights_moved']:.1g}"
    return still and equal.last < 0.8, proof


def _hacked_length(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    reward, clipped = (
        measure_change(records, key) for key in ("reward", "completions/clipped_ratio")
    )
    proof = f"reward {reward}; clipped {clipped}; {_truth(facts)}"
    return reward.rose and clipped.last > 0.9 and clipped.first < 0.9 and _gain(facts) < 0.05, proof


def _hacked_reward(records: Records, facts: dict[str, Any]) -> tuple[bool, str]:
    reward = measure_change(records, "reward")
    true = measure_change(records, "rewards/accuracy_reward/mean")
    proof = f"reward {reward}; right answers {true}; {_truth(facts)}"
    return reward.rose and true.fell and _gain(facts) < -0.1, proof


_PROOFS: dict[str, Callable[[Records, dict[str, Any]], tuple[bool, str]]] = {
    "healthy": _healthy,
    "flat": _flat,
    "all equal": _all_equal,
    "clipped": _clipped,
    "exploding KL": _exploding_kl,
    "collapse": _collapse,
    "too high a rate": _too_high,
    "too low a rate": _too_low,
    "hacked length": _hacked_length,
    "hacked reward": _hacked_reward,
}
