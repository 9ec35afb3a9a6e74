"""What every test starts from."""

import signal

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
