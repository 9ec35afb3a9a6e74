"""What the processes of a run have in common: that each stops when the one above it dies.

Owns the call to the kernel. What a process does with the signal is its own affair.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Asks the kernel for a SIGTERM when the parent dies, however that happens; Linux alone can."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
