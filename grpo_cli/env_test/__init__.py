"""`grpo env test`: a recipe's tools and environments tried without a model."""
