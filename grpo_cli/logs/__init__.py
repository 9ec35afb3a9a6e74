"""Owns logs of other tools, read as the records and the recipe that `Run` gives; names per tool are data."""
