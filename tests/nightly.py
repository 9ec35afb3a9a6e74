"""What `make test-nightly` tries, which sets `NIGHTLY=1`, and the other targets do not."""

import os
from typing import Any

import pytest

NIGHTLY = os.environ.get("NIGHTLY") == "1"


def scale(usually: int, at_night: int) -> int:
    """Return how many cases or examples to try."""
    return at_night if NIGHTLY else usually


def nightly(*values: Any) -> Any:
    """Mark a set of parameters as one that only `make test-nightly` tries."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.nightly])
