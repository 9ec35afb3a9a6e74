"""What every test starts from."""

import os
import signal

from hypothesis import settings

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No test asserts on time; and what a change is judged by must not hang on the examples of the day.
settings.register_profile("here", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("here")
