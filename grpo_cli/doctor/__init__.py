"""`grpo doctor`: what is wrong with this machine, found by trying.

Owns the checks of packages, devices, memory, disk, environment and hub. Recipes and models are checked elsewhere.
"""
