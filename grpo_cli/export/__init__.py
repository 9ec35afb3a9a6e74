"""Ships a model: merges, converts, verifies, writes the card, pushes."""
