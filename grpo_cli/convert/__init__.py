"""Recipes from other tools' GRPO configs and training scripts.

Owns the tables that map keys of TRL, open-r1, axolotl and ms-swift to a recipe's. Imports no model library.
"""
