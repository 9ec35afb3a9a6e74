"""The sandbox in which a recipe's Jinja runs: the templates of prompts, the conditions of rewards.

Owns what may be called there and how much of it. What is written in it, and what its failures are
called, is for the rooms that use it.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_TEXT = 1_000_000
"""Characters a template may make."""
MOST_ROUNDS = 100_000
"""Rounds that all loops of a template may make together."""


@lru_cache(maxsize=1)
def environment() -> "ImmutableSandboxedEnvironment":
    """Return the sandbox: no files, no randomness, no undefined names, and no None printed as text."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _refuse_explosion(operator, left, right)
            return super().call_binop(context, operator, left, right)

    # Without the optimizer, which would work out `"a" * 10**10` while compiling.
    environment = Sandbox(undefined=StrictUndefined, finalize=_refuse_unreadable, optimized=False)
    del environment.globals["lipsum"], environment.filters["random"]
    return environment


def _refuse_explosion(operator: str, left: Any, right: Any) -> None:
    """Stop `"a" * 10**10` and `9 ** 10**9` before they fill the memory."""
    if operator == "**":
        if isinstance(right, int | float) and abs(right) > MOST_ROUNDS:
            raise OverflowError(f"a power of {right} is too large here")
        return
    for many, value in ((left, right), (right, left)):
        length = len(value) if hasattr(value, "__len__") else 0
        if isinstance(many, int) and many * length > LONGEST_TEXT:
            raise OverflowError(f"the text passes {LONGEST_TEXT:,} characters")


def is_unreadable(value: object) -> bool:
    """Return whether a value, printed as it is, would show a model Python's way of writing it."""
    return value is None or isinstance(value, dict)


def _refuse_unreadable(value: Any) -> Any:
    if value is None:
        raise ValueError("a value is empty (None) and would be printed as the word None")
    if is_unreadable(value):
        raise ValueError(
            f"an object with the keys {', '.join(map(str, value))} would be printed as Python's dict"
        )
    return value


def bounded_range() -> Callable[..., range]:
    """Return the templates' `range`: the sandbox bounds each one, this bounds all of a prompt together."""
    rounds = 0

    def bounded(*limits: int) -> range:
        nonlocal rounds
        numbers = range(*limits)
        rounds += len(numbers)
        if rounds > MOST_ROUNDS:
            raise OverflowError(f"the loops pass {MOST_ROUNDS:,} rounds")
        return numbers

    return bounded
