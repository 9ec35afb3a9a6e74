"""What several rules propose, so that all findings of a run propose the same."""

import shlex

from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.recipe.rates import rates_of
from grpo_cli.recipe.recipe import Recipe

_HARDLY_ANY = 0.95
"""Share of groups without signal beyond which replacing them would take twenty prompts for one."""
_ROUNDS = 3
_WAITING = ("judge", "code")
"""Kinds of rewards that wait for something outside of the trainer's process."""
_SLOWER = 5
"""By how much a rate that is not unusual is divided."""


def slower(recipe: Recipe) -> str:
    """A lower learning rate: a fraction of the recipe's, or the usual one where that is far above it."""
    rate, rates = recipe.training.learning_rate, rates_of(recipe)
    lower = rates.usual if rate > rates.most else rate / _SLOWER
    return f"`training.learning_rate: {lower:.2g}`"


def held(recipe: Recipe) -> str:
    """A KL term that holds the policy, or twice the one that is there."""
    beta = recipe.training.extras.get("beta") or 0.0
    return f"`training.beta: {2 * beta:g}`" if beta else "`training.beta: 0.01`"


def overlapped(recipe: Recipe, place: int) -> str | None:
    """Scoring one part of a batch while the next is sampled; None where the reward takes no part in that."""
    reward, parts = recipe.rewards[place], recipe.generation.sampling_parts
    waits = reward.kind in _WAITING or (reward.kind == "python" and reward.timeout_s is not None)
    return f"`generation.sampling_parts: {2 * parts}`" if waits else None


def try_rewards(history: History) -> str:
    """The command that shows what rewards say of answers."""
    return f"`grpo rewards test {shlex.quote(history.source)}`"


def resampled(history: History, silent: float) -> list[str]:
    """Replacing groups without signal, or more rounds of it; nothing where hardly a group has one.

    Args:
        history: Of the run.
        silent: Share of groups without.
    """
    dynamic = history.recipe.generation.dynamic_sampling
    if silent > _HARDLY_ANY:
        return []
    rounds = _ROUNDS if dynamic is None else 2 * dynamic.max_resample
    return [f"`generation.dynamic_sampling.max_resample: {rounds}`"]


def on_run(history: History, command: str, flags: str = "") -> str:
    """A command on the run itself."""
    run = "RUN" if history.run is None else shlex.quote(history.run)
    return f"`{' '.join(filter(None, ('grpo', command, run, flags)))}`"
