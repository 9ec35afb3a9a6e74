"""The sandbox in which a recipe's Jinja runs: the templates of prompts, the conditions of rewards.

Owns what may be called there. What is written in it, and what its failures are called, is for the rooms that use
it.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment


@lru_cache(maxsize=1)
def environment() -> "ImmutableSandboxedEnvironment":
    """Return the sandbox: no files, no randomness, no undefined names, and no None printed as text."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_refuse_unreadable)
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    return sandbox


def is_unreadable(value: object) -> bool:
    """Return whether a value, printed as it is, would show a model Python's way of writing it."""
    messages = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    return value is None or messages or isinstance(value, dict)


def _refuse_unreadable(value: Any) -> Any:
    if value is None:
        raise ValueError("a value is empty (None) and would be printed as the word None")
    if isinstance(value, list) and is_unreadable(value):
        raise ValueError("a list of objects would be printed as Python's list")
    if is_unreadable(value):
        raise ValueError(
            f"an object with the keys {', '.join(map(str, value))} would be printed as Python's dict"
        )
    return value
