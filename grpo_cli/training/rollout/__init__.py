"""One generation step as data: rows are sampled, scored, replaced and logged as a `Rollout`, stage by stage.

Owns what happens to a batch before TRL makes tensors of it. `trainer.py` passes the finished rollout to TRL.
"""
