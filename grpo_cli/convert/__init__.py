"""Recipes from other tools' GRPO configs, and TRL's flat config from a recipe.

Owns the tables that map TRL's, open-r1's and axolotl's keys to a recipe's. Imports no model library.
"""
