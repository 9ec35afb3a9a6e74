"""What every test starts from."""

import signal

from hypothesis import settings

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes depends on what else the machine is doing.
settings.register_profile("here", deadline=None)
settings.load_profile("here")
