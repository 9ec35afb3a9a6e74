"""`grpo probe`: what a few real completions, the data and the settings say before hours are spent."""
