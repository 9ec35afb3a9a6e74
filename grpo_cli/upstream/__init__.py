"""Names of TRL, transformers and vLLM that are not part of their public interface.

Owns one file for each library, with the version it was read in; `tests/unit/upstream/test_upstream.py` fails with
the name that changed. The fallbacks for a missing name stay where the name is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object, and restore them afterwards."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)
