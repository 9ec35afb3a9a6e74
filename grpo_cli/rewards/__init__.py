"""Rewards: the kinds, how a batch is scored, the weighted sum, and trying a recipe's rewards.

Owns everything between a completion and its score. Importing it loads no reward's library; `RewardParams.build`
does.
"""
