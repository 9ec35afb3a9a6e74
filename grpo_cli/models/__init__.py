"""What answers: where a model comes from, how it is loaded, and how completions are sampled."""
