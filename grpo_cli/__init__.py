"""`grpo`: train, measure and ship language models with GRPO from YAML recipes.

Importing this package loads nothing heavy; see `docs/` for the map of its rooms.
"""

__version__ = "0.1.0"
