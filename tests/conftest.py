"""What every test starts from."""

import os
import signal

# Read by torch and the hub's client as they are imported. Tests run side by side, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes depends on what else the machine is doing.
settings.register_profile("here", deadline=None)
settings.load_profile("here")
