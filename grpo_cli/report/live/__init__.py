"""A run while it goes on, in a terminal or line by line, from its folder alone."""
