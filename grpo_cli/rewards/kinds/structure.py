"""Reward for structured output: `json`, valid or matching a JSON Schema.

Owns finding and reading the JSON. Matching is the jsonschema library's, loaded on first need.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from grpo_cli.errors import RewardError, SetupError, install_extra
from grpo_cli.recipe.base import Number, OneOrMany
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.reading.extraction import after_thinking
from grpo_cli.rewards.reading.golds import read_cell
from grpo_cli.rewards.rows import score_rows

JsonPlace = Literal["block", "answer_tag", "text"]
Check = Callable[[Any], str]
"""What keeps a value from matching; empty where it matches."""

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


class JsonParams(RewardParams):
    """Rewards completions that hold JSON, or JSON of a given shape.

    Formula: 1 where the JSON is valid and matches the schema, `partial` where it is valid only,
    else 0. What follows `</think>` is looked at. Without a schema any object or list that is not
    empty counts (a bare `72` is JSON too, but shows nothing); with one, the schema decides. `NaN`
    and `Infinity` are not JSON. References to schemas elsewhere are never fetched. A row without
    a schema in `column` is one to which the reward does not apply.
    Range: {0, partial, 1}.

    Source: RFC 8259; JSON Schema 2020-12 (or what `$schema` names) through jsonschema 4.
    """

    kind: ClassVar[str] = "json"
    highest: ClassVar[float | None] = 1.0

    json_schema: dict[str, Any] | None = None
    """A JSON Schema, written here."""
    path: str | None = None
    """A file that holds the JSON Schema, relative to the recipe."""
    column: str | None = None
    """The column with each row's JSON Schema, as JSON text or as a mapping."""
    extract: OneOrMany[JsonPlace] = Field(default=("block", "answer_tag", "text"), min_length=1)
    """Where the JSON stands: the last fenced block, `<answer>`, or all of the text. The first
    place that is there counts."""
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

    def required_columns(self) -> tuple[str, ...]:
        """The schemas' column, where they come from one."""
        return (self.column,) if self.column else ()

    def problems(self) -> list[tuple[str, str, str]]:
        """Reports a missing library, and a schema that cannot be read or is none."""
        if self.json_schema is None and self.path is None and self.column is None:
            return []
        if importlib.util.find_spec("jsonschema") is None:
            return [("kind", "jsonschema is not installed", install_extra("json"))]
        try:
            self._read_check()
        except RewardError as error:
            return [("path" if self.path else "json_schema", str(error), "correct the schema")]
        return []

    def default_timeout_s(self) -> float | None:
        """A schema may hold patterns, which can keep a text that nearly matches busy for ever."""
        return 5.0 if self.json_schema or self.path or self.column else None

    def late_score(self) -> float:
        """What was not matched in time does not match."""
        return 0.0

    def build(self, context: RewardContext) -> Scorer:
        """Reads the schema, where there is one, and imports jsonschema for it."""
        if self.column is not None:
            _import_jsonschema()
        shared = self._read_check()

        def score(batch: Batch, row: int) -> Score:
            check = shared
            if self.column is not None:
                cell = read_cell(batch, self.column, row)
                if cell is None:
                    return Score(None, "there is no schema")
                check = _check_of(cell if isinstance(cell, str) else json.dumps(cell))
            return self._score(batch.texts[row], check)

        return score_rows(score)

    def _read_check(self) -> Check:
        if self.path is not None:
            return _check_of(_read_file(Path(self.path)))
        return _fill_fault if self.json_schema is None else _check_of(json.dumps(self.json_schema))

    def _score(self, completion: str, check: Check) -> Score:
        text = _find(after_thinking(completion), self.extract)
        if text is None:
            return Score(0.0, "no JSON found")
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return Score(0.0, f"not JSON: {str(error)[:80]}")
        fault = check(value)
        return Score(self.partial, fault) if fault else Score(1.0, "matches")


def _find(text: str, places: tuple[JsonPlace, ...]) -> str | None:
    for place in places:
        found = _FINDERS[place](text)
        if found and found.strip():
            return found.strip()
    return None


def _last_block(text: str) -> str | None:
    """The content of the last closed fence: the parts between fences alternate."""
    parts = text.split("```")
    last = (len(parts) - 1) // 2 * 2 - 1
    if last < 1:
        return None
    label, newline, content = parts[last].partition("\n")
    named = newline and label.strip().lower() in {"", "json", "jsonc", "json5"}
    return content if named else parts[last].removeprefix("json")


def _last_tagged(text: str) -> str | None:
    found = _TAG.findall(text)
    return found[-1] if found else None


_FINDERS: Mapping[JsonPlace, Callable[[str], str | None]] = {
    "block": _last_block,
    "answer_tag": _last_tagged,
    "text": str,
}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _fill_fault(value: Any) -> str:
    """What keeps a value from counting where there is no schema."""
    return "" if isinstance(value, dict | list) and value else "not an object or list with content"


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise RewardError(f"{path} cannot be read ({why})") from error


@lru_cache(maxsize=1024)
def _check_of(written: str) -> Check:
    """The check of a JSON Schema; raises `RewardError` where the text is none."""
    jsonschema, registry = _import_jsonschema()
    try:
        schema = json.loads(written)
    except ValueError as error:
        raise RewardError(f"the schema is not JSON ({error}): {written[:60]!r}") from error
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = f" at {error.json_path}" if error.path else ""
        raise RewardError(f"not a JSON Schema: {error.message[:200]}{where}") from error
    validate = validator(schema, registry=registry)

    def check(value: Any) -> str:
        fault = next(validate.iter_errors(value), None)
        return f"{fault.json_path}: {fault.message[:80]}" if fault else ""

    return check


def _import_jsonschema() -> tuple[Any, Any]:
    """The library, and an empty registry, without which it would fetch references from the net."""
    try:
        import jsonschema
        from referencing import Registry
    except ImportError as error:
        raise SetupError(
            f"jsonschema cannot be imported: {error}. Fix: {install_extra('json')}"
        ) from error
    return jsonschema, Registry()
