"""Which rows a reward applies to: the `when` of a recipe, an expression on columns."""

import contextlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch
from grpo_cli.templating import environment

if TYPE_CHECKING:
    from jinja2 import TemplateSyntaxError

_QUOTED = re.compile(r"""("[^"]*"|'[^']*')""")
_FOREIGN = re.compile(_QUOTED.pattern + r"|(?<![=!<>])=(?!=)|&&|\|\|")
"""Quoted texts (the group), and what other languages write for the operators in `_OPERATORS`."""
_OPERATORS = {"=": "==", "&&": "and", "||": "or"}
_FIX = 'Fix: write an expression on columns, such as when: task == "math"'


@dataclass(frozen=True)
class Condition:
    """An expression such as `task == "math"`, evaluated by Jinja in `templating.py`'s sandbox."""

    text: str

    def columns(self) -> frozenset[str]:
        """Return the columns it reads; raises `RewardError` if it is not an expression."""
        from jinja2 import TemplateSyntaxError, nodes

        try:
            # Parsed alone first: `a }}{{ b` would pass for two expressions in a template.
            _ = self._expression
            parsed = environment().parse("{{ (" + self.text + ") }}")
        except TemplateSyntaxError as error:
            raise RewardError(f"`when` cannot be read: {self._explain(error)}") from error
        return frozenset(each.name for each in parsed.find_all(nodes.Name)) - {"range"}

    def _explain(self, error: "TemplateSyntaxError") -> str:
        corrected = _FOREIGN.sub(lambda match: match[1] or _OPERATORS[match[0]], self.text)
        foreign = [match[0] for match in _FOREIGN.finditer(self.text) if not match[1]]
        with contextlib.suppress(RewardError):
            if foreign and Condition(corrected).columns():
                sign, proper = foreign[0], _OPERATORS[foreign[0]]
                what = "sets a value" if sign == "=" else "is no operator here"
                use = f"use `{proper}` to {'compare' if sign == '=' else 'join conditions'}"
                return f"`{sign}` {what} (got `{self.text}`). Fix: {use}: when: {corrected}"
        reason = (error.message or "").rstrip(".")
        return f"`{self.text}` is not one expression ({reason}). {_FIX}"

    def holds(self, batch: Batch, row: int) -> bool:
        """Return whether it holds on a row; raises `RewardError` if it fails there."""
        values = {name: column[row] for name, column in batch.columns.items()}
        try:
            return bool(self._expression(values))
        except Exception as error:  # an expression is a user's code: it raises anything
            raise RewardError(
                f"`when: {self.text}` fails on {batch.row_name(row)}: {error} "
                f"(columns: {', '.join(batch.columns)}). {_FIX}"
            ) from error

    @cached_property
    def _expression(self) -> Any:
        return environment().compile_expression(self.text, undefined_to_none=False)
