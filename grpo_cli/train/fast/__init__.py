"""The exact fast path: the gradient of TRL's step, for less work."""
