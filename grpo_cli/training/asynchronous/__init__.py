"""`training.mode: async`: TRL's experimental `AsyncGRPOTrainer` in a run folder.

Owns sampling from a server while the trainer learns, with our rewards and checkpoints. The algorithm is TRL's.
"""
