"""Recipes from other tools' GRPO configs, and TRL's flat config from a recipe. Imports no model library."""
