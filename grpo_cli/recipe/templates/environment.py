"""A text environment: sums, with a hint after each wrong answer."""

import random
import re


class Sums:
    """Asks for a sum of two numbers up to 20; right within three answers wins."""

    def reset(self, seed: int) -> str:
        """Begin an episode. All completions of a prompt get the same seed, and must get the same question."""
        numbers = random.Random(seed)
        self.first, self.second = numbers.randint(1, 20), numbers.randint(1, 20)
        self.right = False
        return f"State the final answer: {self.first} + {self.second} ="

    def step(self, text: str) -> tuple[str, bool]:
        """Take an answer; return what the model reads next, and whether the episode is over."""
        found = re.findall(r"\d+", text)
        if not found:
            return "That is not a number. Try again.", False
        answer, total = int(found[-1]), self.first + self.second
        self.right = answer == total
        return f"It is {'more' if answer < total else 'less'} than {answer}. Try again.", self.right

    def reward(self) -> float:
        """Return the score of the episode; a dict of named parts works too."""
        return float(self.right)

    def gold(self) -> str:
        """Return an answer that wins, for `grpo env test`."""
        return str(self.first + self.second)
