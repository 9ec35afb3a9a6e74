"""The order in which fresh prompts stand in for those that taught nothing. Knows places in the data, no rows."""

import random
from collections.abc import Set


class FreshPrompts:
    """ServerLocation in the training data, pass after pass, each pass in another seeded order.

    The order is this one's alone: the trainer's own shuffling neither changes it nor is changed by it.
    A count is all it takes to go on where another process left off.
    """

    def __init__(self, size: int, seed: int, taken: int = 0) -> None:
        """Starts, or goes on.

        Args:
            size: Training prompts.
            seed: Of the run.
            taken: ServerLocation gone through before, those passed over among them.
        """
        self.taken = taken
        self._size = size
        self._seed = seed
        self._pass: int | None = None
        self._order: list[int] = []

    def take(self, count: int, avoid: Set[int]) -> list[int]:
        """The next places that are not to be avoided, all of them different.

        Args:
            count: How many; with `avoid` at most as many as there are prompts.
            avoid: ServerLocation in use already; they are passed over.
        """
        found: list[int] = []
        while len(found) < count:
            place = self._next()
            if place not in avoid and place not in found:
                found.append(place)
        return found

    def _next(self) -> int:
        number, at = divmod(self.taken, self._size)
        if number != self._pass:
            self._pass, self._order = number, list(range(self._size))
            random.Random(f"{self._seed}/{number}").shuffle(self._order)
        self.taken += 1
        return self._order[at]
