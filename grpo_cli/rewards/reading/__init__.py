"""Reading answers: where they stand in a completion, what they say, and when two of them are equal."""
