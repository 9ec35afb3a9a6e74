"""What is asked: rows from where they are, their prompts, and the columns rewards receive.

Owns reading, peeking, templates and datasets. Knows neither models nor rewards: what it needs of a
tokenizer is handed in as a function.
"""
