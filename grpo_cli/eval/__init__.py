"""`grpo eval`: a model measured with its recipe's own prompts and rewards, beside a baseline."""
