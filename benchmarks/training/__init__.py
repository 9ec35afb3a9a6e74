"""Plain `GRPOTrainer` against `grpo train`, in real processes: `python -m benchmarks.training`."""
