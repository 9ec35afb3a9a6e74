"""The recipe: its schema, the YAML positions behind it, overrides and loading. Pure data, no torch."""

NUM_GENERATIONS = 8
"""Default of TRL 1.16, here since the schema takes half of a start to import and batch arithmetic needs it too."""
