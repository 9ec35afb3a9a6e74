"""Runs a program nobody vouches for, and reports what it printed or computed.

`runner.py` and `folders.py` are the trainer's side. The rest runs in the child, once a program, and
so imports only those parts of the standard library that load in no time: no dataclasses, no typing.
Knows nothing of rewards, tests or scores.
"""
