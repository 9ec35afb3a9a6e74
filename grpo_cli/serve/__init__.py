"""`grpo serve`: the server that is started for a model or a run, and the chat with it."""
