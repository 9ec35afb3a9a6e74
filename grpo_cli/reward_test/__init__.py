"""`grpo rewards test`: a recipe's rewards tried on made-up answers to its rows, without a model."""
