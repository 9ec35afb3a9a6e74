"""Runs an untrusted program, and reports what it printed or computed; knows nothing of rewards.

`runner.py` belongs to the trainer. The rest runs in the child, once per program, and so imports only modules that
load in no time: no dataclasses, no typing, no `json`.
"""
