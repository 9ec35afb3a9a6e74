"""The environment `textarena`: the single-player games of TextArena."""

import io
import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.environments.contract import (
    Environment,
    EnvironmentParams,
    EnvironmentSource,
    EpisodeError,
    Reward,
)
from grpo_cli.issues import Issue
from grpo_cli.rewards.kinds import find_missing, import_optional

_VERSIONS = re.compile(r"-(train|raw)$")
"""What TextArena appends to a game's name for other wrappers, which make no difference here."""


class TextArenaEnvironmentParams(EnvironmentParams):
    """Plays a single-player game of TextArena.

    The prompt gets the game's rules and first board; after each move the model reads what the game says to it. A
    move without brackets gets them, as by TextArena's own wrapper (`5` becomes `[5]`). The score is the game's
    reward, mostly from 0 to 1; it is 0 if the episode ends before the game does, so let `episode.max_turns` allow
    as many turns as the game. Games follow from their seed alone. Some games load word lists or ask a model over
    the network, and fail without it. With `dataset: {kind: environment}` every row is a new game.

    Source: `textarena.make` and `textarena.core.State` (textarena 0.7.4).
    """

    kind: ClassVar[str] = "textarena"

    game: str
    """The game's name, such as `GuessTheNumber-v0`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the game's class, such as `{max_number: 50}`; by default those of its name."""

    def problems(self) -> list[Issue]:
        """Report that TextArena is not installed."""
        return find_missing("textarena", "textarena", "textarena")

    def open(self) -> EnvironmentSource:
        """Import TextArena (a second or two), and reset the game once."""
        arena = import_optional("textarena", "textarena", "textarena")

        def make() -> TextArenaEnvironment:
            return TextArenaEnvironment(arena, _VERSIONS.sub("", self.game), self.params)

        try:
            with redirect_stdout(io.StringIO()):  # some games print what they download
                make().reset({}, seed=0)
        except Exception as error:  # a game's own code
            reason = " ".join(str(error).replace("*", "").split())[:200] or type(error).__name__
            raise EpisodeError(
                f"TextArena's game {self.game} cannot be reset: {reason}",
                "correct `game` or `params`; it has to be a game for one player",
            ) from error
        return EnvironmentSource(make)


class TextArenaEnvironment(Environment):
    """One game."""

    takes_text = True
    _lock = threading.Lock()
    """Games draw from Python's and NumPy's own random numbers, so only one moves at a time."""

    def __init__(self, arena: Any, game: str, params: Mapping[str, Any]) -> None:
        self._arena = arena
        self._game = arena.make(game, **params)
        # Its observations, without the wrapper that repeats all earlier ones.
        self._core = self._game
        while isinstance(self._core, arena.Wrapper):
            self._core = self._core.env
        self._random: tuple[Any, Any] = (None, None)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Begin a game; return its rules and the first board."""
        import numpy

        self._random = random.Random(seed).getstate(), numpy.random.RandomState(seed).get_state()
        with self._own_random():
            self._game.reset(num_players=1, seed=seed)
        return self._observe()

    def step(self, text: str) -> tuple[str, bool]:
        """Make a move."""
        with self._own_random():
            is_done, _ = self._game.step(action=text)
        observed = self._observe()
        if is_done:
            observed = f"{observed}\n{self._core.state.game_info[0].get('reason', '')}".strip()
        return observed, bool(is_done)

    def reward(self) -> Reward:
        """Return the game's reward; 0 while it goes on."""
        rewards = self._core.state.rewards
        return float(rewards[0]) if rewards else 0.0

    def _observe(self) -> str:
        """Return what the game has said since it was last asked, without the player's own moves."""
        _, messages = self._core.get_observation()
        own = self._arena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind is not own).strip()

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Let the game draw from random numbers of its own; those of training stay as they are."""
        import numpy

        with self._lock:
            before = random.getstate(), numpy.random.get_state()
            self._set_random(self._random)
            try:
                yield
            finally:
                self._random = random.getstate(), numpy.random.get_state()
                self._set_random(before)

    @staticmethod
    def _set_random(state: tuple[Any, Any]) -> None:
        import numpy

        random.setstate(state[0])
        numpy.random.set_state(state[1])
