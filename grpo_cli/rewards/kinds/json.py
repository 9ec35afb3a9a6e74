"""The reward `json`: structured output, valid or matching a JSON Schema."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from grpo_cli.errors import RewardError
from grpo_cli.input_files import read_input_text
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Number, OneOrMany
from grpo_cli.rewards.answers import find_answer
from grpo_cli.rewards.contract import (
    Batch,
    Columns,
    Meta,
    RewardContext,
    RewardParams,
    Score,
    TimeLimit,
)
from grpo_cli.rewards.kinds import find_missing

JsonPlace = Literal["block", "answer_tag", "text"]
Check = Callable[[Any], str]
"""Says why a value does not match; empty if it does."""


class JsonParams(RewardParams):
    """Rewards completions that contain JSON, optionally matching a schema.

    Formula: 1 if the JSON is valid and matches the schema, `partial` if it is only valid,
    else 0. Only text after `</think>` is read. Without a schema, any non-empty object or list counts
    (a bare `72` is JSON too, but proves nothing); with one, the schema decides. `NaN` and
    `Infinity` are not JSON. Remote schema references are never fetched. The reward does not apply
    to rows without a schema in `column`.
    Range: {0, partial, 1}.

    Source: RFC 8259; JSON Schema 2020-12 (or what `$schema` names) through jsonschema 4.
    """

    kind = "json"
    meta = Meta((0.0, 1.0))

    json_schema: dict[str, Any] | None = None
    """A JSON Schema, written here."""
    path: str | None = None
    """A file with the JSON Schema, relative to the recipe."""
    column: str | None = None
    """The column with each row's JSON Schema, as JSON text or as a mapping."""
    extract: OneOrMany[JsonPlace] = Field(default=("block", "answer_tag", "text"), min_length=1)
    """Where to look for the JSON, in this order: the last fenced block, `<answer>`, or the whole text. The
    first match counts."""
    partial: Number = Field(default=0.0, ge=0, lt=1)
    """The score of valid JSON that does not match."""

    @model_validator(mode="after")
    def _check_sources(self) -> "JsonParams":
        given = [name for name in ("json_schema", "path", "column") if getattr(self, name)]
        if len(given) > 1:
            raise PydanticCustomError(
                "grpo_schemas", "has {names}; keep one", {"names": " and ".join(given)}
            )
        return self

    def columns(self) -> Columns:
        return Columns((self.column,) if self.column else ())

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        if not self._has_schema:
            return []
        if missing := find_missing("jsonschema", "jsonschema", "json"):
            return missing
        try:
            _ = self._shared_check
        except RewardError as error:
            issue = error.as_issue("path" if self.path else "json_schema")
            return [replace(issue, fix=issue.fix or "correct the schema")]
        return []

    def gold(self, batch: Batch, row: int) -> Issue | None:
        """Return why the row's schema cannot be used; a row may have none."""
        if self.column is None or batch.cell(self.column, row) is None:
            return None
        try:
            _compile_schema(_as_text(batch.cell(self.column, row)))
        except RewardError as error:
            fix = "write schemas with `json.dumps` (not `str` or `repr`) when you make the data"
            issue = error.as_issue("column")
            return replace(issue, fix=issue.fix or fix)
        return None

    def time_limit(self) -> TimeLimit | None:
        """Return one if a schema may hold patterns, which can keep a text busy forever."""
        return TimeLimit(5.0, late_score=0.0) if self._has_schema else None

    def score(self, batch: Batch, row: int) -> Score:
        check = self._shared_check
        if self.column is not None:
            cell = batch.cell(self.column, row)
            if cell is None:
                return Score(None, "there is no schema")
            check = _compile_schema(_as_text(cell))
        found = find_answer(batch.texts[row], self.extract)
        if found is None:
            return Score(0.0, "no JSON found")
        try:
            value = json.loads(found.text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return Score(0.0, f"not JSON: {str(error)[:80]}")
        fault = check(value)
        return Score(self.partial, fault) if fault else Score(1.0, "matches")

    @property
    def _has_schema(self) -> bool:
        return bool(self.json_schema is not None or self.path or self.column)

    @cached_property
    def _shared_check(self) -> Check:
        if self.json_schema is not None:
            return _compile_schema(json.dumps(self.json_schema))
        if self.path is None:
            return _check_content
        try:
            return _compile_schema(read_input_text(self.path))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            fix = "correct the path, or write the file"
            raise RewardError(f"{self.path} cannot be read ({why})", fix) from error


def _as_text(cell: Any) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_content(value: Any) -> str:
    return "" if isinstance(value, dict | list) and value else "not an object or list with content"


@lru_cache(maxsize=1024)
def _compile_schema(written: str) -> Check:
    """Return the check of a JSON Schema; raises `RewardError` if the text is none."""
    import jsonschema
    from referencing import Registry

    try:
        schema = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"the schema is not JSON ({error}): {written[:60]!r}") from error
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = f" at {error.json_path}" if error.path else ""
        raise RewardError(f"not a JSON Schema: {error.message[:200]}{where}") from error
    # Without a registry of its own, it would fetch references from the network.
    registry: Any = Registry()
    validate = validator(schema, registry=registry)

    def check(value: Any) -> str:
        fault = next(validate.iter_errors(value), None)
        return f"{fault.json_path}: {fault.message[:80]}" if fault else ""

    return check
