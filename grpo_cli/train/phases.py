"""What a training step spends its time on: sampling, handing over weights, scoring, learning.

Owns the clock. Which of the trainer's methods belong to which phase is `trainer.py`'s.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class PhaseClock(TrainerCallback):
    """Seconds of each phase of this process's optimizer steps; learning is what the others leave."""

    def __init__(self) -> None:
        self._now: Callable[[], float] = time.perf_counter
        self._seconds: dict[str, float] = {}
        self._wall_s = 0.0
        self._steps = 0
        self._began: float | None = None

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Counts the time inside to a phase; between steps, as in an evaluation, nothing is counted."""
        started = self._now()
        try:
            yield
        finally:
            self.move(phase, self._now() - started)

    def move(self, phase: str, seconds: float, *, out_of: str | None = None) -> None:
        """Counts seconds to a phase, and no longer to another that they were counted to."""
        if self._began is None:
            return
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        if out_of is not None:
            self._seconds[out_of] = self._seconds.get(out_of, 0.0) - seconds

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Starts the clock."""
        self._began = self._now()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stops it: saving, logging and evaluating are no part of a step."""
        if self._began is not None:
            self._wall_s += self._now() - self._began
            self._began = None
            self._steps += 1

    def take(self) -> dict[str, float]:
        """Mean seconds of each phase over the steps since the last call, as `time/PHASE`.

        Nothing where no sampling was ever seen: the rest would then be taken for learning.
        """
        if not self._steps or "sampling" not in self._seconds:
            return {}
        learning = max(self._wall_s - sum(self._seconds.values()), 0.0)
        found = {**self._seconds, "learning": learning}
        steps, self._steps, self._wall_s = self._steps, 0, 0.0
        # The names stay: a step that samples nothing spends 0 seconds on it.
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return {f"time/{phase}": seconds / steps for phase, seconds in found.items()}
