"""What a paired difference says in one sentence, of which metric, and numbers in it. Computes nothing."""

from collections.abc import Iterable

from grpo_cli.analysis.estimates import ALL_EQUAL
from grpo_cli.analysis.metrics import Metric

PLAIN_FROM = 1000
"""From here on three digits are an exponent to `g`, and whole numbers are read better."""


def say_number(value: float, sign: str = "") -> str:
    """A number in three digits, or whole: `0.0123`, `656`, `3,429`.

    Args:
        value: The number.
        sign: `+` says it of numbers above 0 too.
    """
    # Rounding to three digits may make a thousand of a bit less.
    large = PLAIN_FROM - 0.5 <= abs(value) < 1e9
    return f"{value:{sign},.0f}" if large else f"{value:{sign}.3g}"


def primary_metric(right: Iterable[str]) -> str:
    """The metric a verdict speaks of: accuracy of the first reward that judges answers, else the total."""
    return next((f"accuracy/{name}" for name in right), "reward")


def say_difference(metric: str, found: Metric, name: str, baseline: str) -> str:
    """A paired difference as a sentence."""
    on = f"on the same {found.prompts} prompts"
    if found.value is None:
        return f"{name} and {baseline} have no prompt with a score of {metric} in common"
    if found.value == 0 and found.reason == ALL_EQUAL:
        return f"no difference: {metric} is the same for {name} and {baseline} {on}"
    gain = f"{say_number(found.value, '+')} in {metric}"
    if found.reason == ALL_EQUAL:
        sense = "better" if found.value > 0 else "worse"
        return f"{sense}: {gain} against {baseline} on each of the same {found.prompts} prompts"
    if found.low is None or found.high is None:
        if found.value == 0:
            same = f"no difference: {metric} is the same in the mean for {name} and {baseline}"
            return f"{same} {on}; no interval, since {found.reason}"
        return f"{gain} over {baseline} {on}; no interval, since {found.reason}"
    interval = f"(95 % interval {say_number(found.low, '+')} to {say_number(found.high, '+')})"
    if found.low > 0:
        return f"better: {gain} {interval} over {baseline} {on}"
    if found.high < 0:
        return f"worse: {gain} {interval} against {baseline} {on}"
    return f"no clear difference: {gain} {interval} from {baseline} {on}"
