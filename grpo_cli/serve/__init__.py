"""Talks with a trained model: vLLM's server in front of it, and a chat in the terminal."""
