"""Which rows a reward applies to: the `when` of a recipe, an expression on columns.

Owns reading and evaluating it; the sandbox it runs in is `templating.py`'s.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch
from grpo_cli.templating import bounded_range, environment


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
            reason = (error.message or "").rstrip(".")
            raise RewardError(f"`when` cannot be read: {reason}. {_FIX}") from error
        except RecursionError as error:
            raise RewardError(f"`when` is nested too deep. {_FIX}") from error
        return frozenset(name.name for name in found) - {"range"}

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
            ids = batch.columns.get("row_id")
            where = f"row {row}" if ids is None else f"row_id {ids[row]}"
            raise RewardError(
                f"`when: {self.text}` fails on {where}: {error} "
                f"(columns: {', '.join(batch.columns)}). {_FIX}"
            ) from error

    @cached_property
    def _named(self) -> frozenset[str]:
        return self.columns()

    @cached_property
    def _expression(self) -> Any:
        return environment().compile_expression(self.text, undefined_to_none=False)


_FIX = 'Fix: write an expression on columns, such as when: task == "math"'
