"""What a paired difference says in one sentence, and which metric it is said of. Computes nothing."""

from collections.abc import Mapping

from grpo_cli.estimates import ALL_EQUAL
from grpo_cli.measure.metrics import Metric


def primary_metric(right: Mapping[str, float]) -> str:
    """The metric a verdict speaks of: accuracy of the first reward that judges answers, else the total."""
    return next((f"accuracy/{name}" for name in right), "reward")


def say_difference(metric: str, found: Metric, name: str, baseline: str) -> str:
    """A paired difference as a sentence."""
    on = f"on the same {found.prompts} prompts"
    if found.value is None:
        return f"{name} and {baseline} have no prompt with a score of {metric} in common"
    if found.value == 0 and found.reason == ALL_EQUAL:
        return f"no difference: {metric} is the same for {name} and {baseline} {on}"
    gain = f"{found.value:+.3g} in {metric}"
    if found.reason == ALL_EQUAL:
        sense = "better" if found.value > 0 else "worse"
        return f"{sense}: {gain} against {baseline} on each of the same {found.prompts} prompts"
    if found.low is None or found.high is None:
        return f"{gain} over {baseline} {on}; no interval, since {found.reason}"
    interval = f"(95 % interval {found.low:+.3g} to {found.high:+.3g})"
    if found.low > 0:
        return f"better: {gain} {interval} over {baseline} {on}"
    if found.high < 0:
        return f"worse: {gain} {interval} against {baseline} {on}"
    return f"no clear difference: {gain} {interval} from {baseline} {on}"
