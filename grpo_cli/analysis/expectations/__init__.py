"""Where a normal run lies: bands from finished runs, and runs compared with bands. Reads files only.

Used wherever a run is told: at its end, by `grpo expect`, in the model card, in a report. The form of
the block in a recipe is `recipe.expect`'s.
"""
