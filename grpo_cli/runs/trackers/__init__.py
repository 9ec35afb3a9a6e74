"""Trackers: which there are, what they need, where they write, and what they are given after a run."""
