"""Rewards: what each kind is called, how it scores a batch, and what happens when one fails.

Importing this room loads no reward's library; `RewardParams.build` does.
"""
