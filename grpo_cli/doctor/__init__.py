"""`grpo doctor`: what is wrong with this machine, found by trying."""
