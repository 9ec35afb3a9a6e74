"""A language model as judge: what it is asked, how its replies are read, the way to and from it.

The kind itself, with its parameters, is `kinds/judge.py`.
"""
