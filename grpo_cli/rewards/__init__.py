"""Rewards: the kinds, how a batch is scored, and the weighted sum.

Owns everything between a completion and its score. Importing it loads no reward's library; `RewardParams.build`
does.
"""
