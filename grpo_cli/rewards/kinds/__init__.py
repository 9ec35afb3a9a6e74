"""The kinds of rewards: a schema of parameters each, and how it scores.

A kind knows its formula and nothing of weights, failures or time; those are `scoring.py`'s.
"""
