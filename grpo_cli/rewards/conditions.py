"""Which rows a reward applies to: the `when` of a recipe, an expression on columns.

Owns reading and evaluating it; the sandbox it runs in is `templating.py`'s.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch
from grpo_cli.templating import bounded_range, environment

if TYPE_CHECKING:
    from jinja2 import TemplateSyntaxError


@dataclass(frozen=True)
class Condition:
    """An expression such as `task == "math"`."""

    text: str

    def columns(self) -> frozenset[str]:
        """The columns it reads.

        Raises:
            RewardError: It is not an expression.
        """
        from jinja2 import TemplateSyntaxError, nodes

        try:
            # Parsed alone first: `a }}{{ b` would pass for two expressions in a template.
            _ = self._expression
            found = environment().parse("{{ (" + self.text + ") }}").find_all(nodes.Name)
        except TemplateSyntaxError as error:
            raise RewardError(f"`when` cannot be read: {self._explain(error)}") from error
        except RecursionError as error:
            raise RewardError(f"`when` is nested too deep. {_FIX}") from error
        names = frozenset(name.name for name in found)
        if "self" in names:
            raise RewardError(
                "`self` in `when` is Jinja's name for the template itself. "
                "Fix: give the column another name under `dataset.columns`"
            )
        return names - {"range"}

    def _explain(self, error: "TemplateSyntaxError") -> str:
        """What is wrong with its syntax, and the edit."""
        corrected = _FOREIGN.sub(lambda found: found[1] or _OURS[found[0]], self.text)
        foreign = [found[0] for found in _FOREIGN.finditer(self.text) if not found[1]]
        if foreign and Condition(corrected).is_expression():
            sign = foreign[0]
            what = "sets a value" if sign == "=" else "is no operator here"
            use = f"use `{_OURS[sign]}` to {'compare' if sign == '=' else 'join conditions'}"
            return f"`{sign}` {what} (got `{self.text}`). Fix: {use}: when: {corrected}"
        reason = (error.message or "").rstrip(".")
        return f"`{self.text}` is not one expression ({reason}). {_FIX}"

    def is_expression(self) -> bool:
        """Whether it can be read."""
        try:
            self.columns()
        except RewardError:
            return False
        return True

    def unnamable(self, columns: Iterable[str]) -> list[str]:
        """Columns whose names it holds though no expression can name them, such as `my-task`."""
        bare = _QUOTED.sub(" ", self.text)
        return [
            name
            for name in sorted(columns)
            if name
            and not name.isidentifier()
            and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", bare)
        ]

    def holds(self, batch: Batch, row: int) -> bool:
        """Whether it holds on a row of a batch.

        Raises:
            RewardError: It fails on the row, as where it names a column that is not there.
        """
        values = {name: column[row] for name, column in batch.columns.items()}
        try:
            for name in self._named - values.keys():
                # Jinja has values of its own for some names, such as `dict`.
                raise NameError(f"{name!r} is undefined")
            return bool(self._expression({"range": bounded_range(), **values}))
        except Exception as error:  # an expression is a user's code: it raises anything
            raise RewardError(
                f"`when: {self.text}` fails on {batch.row_name(row)}: {error} "
                f"(columns: {', '.join(batch.columns)}). {_FIX}"
            ) from error

    @cached_property
    def _named(self) -> frozenset[str]:
        return self.columns()

    @cached_property
    def _expression(self) -> Any:
        return environment().compile_expression(self.text, undefined_to_none=False)


_QUOTED = re.compile(r"""("[^"]*"|'[^']*')""")
_FOREIGN = re.compile(_QUOTED.pattern + r"|(?<![=!<>])=(?!=)|&&|\|\|")
"""Quoted texts (the group), and what other languages write for the operators in `_OURS`."""
_OURS = {"=": "==", "&&": "and", "||": "or"}
_FIX = 'Fix: write an expression on columns, such as when: task == "math"'
