"""Guess a number from 1 to 9: the text environment of `recipes/offline/higher-lower.yaml`."""

import random


class HigherLower:
    """Says `higher` or `lower` after each wrong guess."""

    def reset(self, seed: int) -> str:
        """Choose a number by the seed, and ask."""
        self.number = random.Random(seed).randint(1, 9)
        self.won = False
        return "guess"

    def step(self, text: str) -> tuple[str, bool]:
        """Compare a guess; return the hint, and whether the game is over."""
        guess = int(text) if text.strip().isdecimal() else 0
        self.won = guess == self.number
        return ("higher" if guess < self.number else "lower"), self.won

    def reward(self) -> float:
        """Return 1 if the number was found."""
        return float(self.won)

    def gold(self) -> str:
        """Return the guess that wins at once."""
        return str(self.number)
