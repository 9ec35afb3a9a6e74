"""Responses that are scored already: a group of TRL's is filled from the data instead of sampled.

Owns which responses a group gets, and the measure of what can be learned from them. The loss is TRL's.
"""
