"""`grpo sweep`: a grid of settings and seeds, as ordinary trainings side by side, and their comparison."""
