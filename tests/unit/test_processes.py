"""Processes that are bound to the one that started them."""

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import os, signal, subprocess, sys
from grpo_cli.processes import child

if sys.argv[1] == "noted":
    signal.signal(signal.SIGINT, lambda number, frame: print("noted"))
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    with child([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        print("going on" if process.poll() is None else "ended")
except KeyboardInterrupt:
    print("interrupted")
"""


def say(*argv):
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *argv], capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_signal_in_the_midst_of_a_fork_is_not_lost():
    assert say("raised") == ["interrupted"]
    assert say("noted") == ["noted", "going on"]
