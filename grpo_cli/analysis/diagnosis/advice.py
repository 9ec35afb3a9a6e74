"""How fixes are put: as settings of a recipe and commands of ours, or in the words of the tool that trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Advice:
    """The names of settings in fixes, and which settings of a run are known."""

    names: Mapping[str, str] | None = None
    """The recipe's keys → the tool's names; None for a recipe of ours."""
    form: str = "{name}: {value}"
    unknown: frozenset[str] = field(default_factory=frozenset)
    """Keys whose value in this run is not known."""

    @property
    def is_own(self) -> bool:
        """True if the run has a recipe."""
        return self.names is None

    @property
    def completions(self) -> str:
        """Where completions are to be read."""
        return "`completions/`" if self.is_own else "the completions"

    @property
    def read_best(self) -> str:
        """The advice to read what is rewarded most."""
        return "read the best completions" + (f" in {self.completions}" if self.is_own else "")

    def name(self, key: str) -> str:
        """Return what the tool calls a setting."""
        return key if self.names is None else self.names.get(key, key.rpartition(".")[2])

    def edit(self, key: str, value: Any, way: str = "a larger") -> str:
        """Return the edit that sets a key; of one that is not known, the way in which to change it."""
        if key in self.unknown and way:
            return f"{way} `{self.name(key)}`"
        return f"`{self.form.format(name=self.name(key), value=value)}`"
