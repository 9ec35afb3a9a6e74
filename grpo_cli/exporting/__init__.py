"""A trained model as a folder that other tools load: merged, converted, verified, with a model card.

Owns what an export holds, where it may go, and what counts as the trained model.
"""
