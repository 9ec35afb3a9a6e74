"""Checks of a recipe that need no model: the recipe itself, its data, its rewards and this machine. No torch."""
