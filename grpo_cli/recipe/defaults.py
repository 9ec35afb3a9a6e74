"""Defaults that the schema and the batch arithmetic share; importing the schema takes half of a start."""

NUM_GENERATIONS = 8
"""Of TRL 1.16, as `tests/unit/recipe/test_grpo_fields.py` compares."""
