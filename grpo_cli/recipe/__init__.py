"""The recipe: its schema, the YAML positions behind it, overrides and loading. Pure data, no torch."""
