"""Owns the study of `grpo diagnose` on runs of plain TRL: tiny models, 80 runs of known outcome, the score."""
