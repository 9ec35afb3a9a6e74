"""Checks that need more than the recipe: disk, columns, reward parameters, hardware. No torch."""
