"""How much a test tries: little by default, everything in `make test-nightly`, which sets `NIGHTLY=1`."""

import os

NIGHTLY = os.environ.get("NIGHTLY") == "1"


def scale(usually: int, nightly: int) -> int:
    """Return how many cases or examples to try."""
    return nightly if NIGHTLY else usually
