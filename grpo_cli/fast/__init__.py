"""The exact fast path: the gradient of TRL's step, and its completions, for less work. Knows no run folder."""
