"""Arguments of tools that JSON alone does not describe: their schemas, and the values that the tools declared."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NotRequired, Union

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from typing_extensions import TypedDict

from grpo_cli.environments.contract import EpisodeError

_PLAIN = (str, int, float, bool, list, dict, tuple, type(None), Any, inspect.Parameter.empty)
"""Types whose schemas transformers writes, and whose values are what JSON gives."""
_DROPPED = ("title", "default")
"""Parts of pydantic's schemas that say nothing beside the name of an argument."""


class UndescribedError(EpisodeError):
    """An argument has a type without a schema."""


def find_declared(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments whose types are more than JSON's: models, dataclasses, `TypedDict`s, enums, dates, …"""
    hints = typing.get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return {name: _readable(hint) for name, hint in hints.items() if not _is_plain(hint)}


def _readable(hint: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Return a type in which `typing.TypedDict`s are those of typing_extensions.

    Source: pydantic 2.14, which takes no others before Python 3.12.
    """
    if typing.is_typeddict(hint):
        if hint in inside:
            return dict[str, Any]
        fields = typing.get_type_hints(hint, include_extras=True)
        marked: dict[str, Any] = {}
        for name, each in fields.items():
            is_marked = typing.get_origin(each) in (typing.Required, typing.NotRequired)
            part = _readable(typing.get_args(each)[0] if is_marked else each, (*inside, hint))
            marked[name] = part if name in hint.__required_keys__ else NotRequired[part]
        copied = TypedDict(hint.__name__, marked)  # type: ignore[misc]
        copied.__doc__ = hint.__doc__
        return copied
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_readable(each, inside) for each in arguments)]  # noqa: UP007
    if typing.get_origin(hint) in (list, dict, tuple, set, frozenset):
        return typing.get_origin(hint)[tuple(_readable(each, inside) for each in arguments)]
    return hint


def describes(function: Callable[..., Any], name: str) -> bool:
    """Return whether the docstring has a line for an argument."""
    return bool(re.search(rf"^\s*{name}\b.*:", inspect.getdoc(function) or "", re.MULTILINE))


def make_schema(function: Callable[..., Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's schema: transformers' for plain arguments, pydantic's for those that are declared.

    Raises `UndescribedError` if the type of an argument has no schema, and `Exception` for whatever
    transformers meets in annotations and docstrings.
    """
    from transformers.utils import get_json_schema

    adapters = {name: _adapt(name, hint) for name, hint in declared.items()}
    if not adapters:
        return dict(get_json_schema(function))
    schema = get_json_schema(_as_plain(function, adapters))
    written = schema["function"]["parameters"]
    signature = inspect.signature(function).parameters
    properties = {
        name: _write(adapters[name], written["properties"].get(name, {}))
        if name in adapters
        else written["properties"][name]
        for name in signature
        if name != "self"
    }
    required = [name for name in properties if signature[name].default is inspect.Parameter.empty]
    schema["function"]["parameters"] = {**written, "properties": properties, "required": required}
    return dict(schema)


def convert_arguments(
    function: Callable[..., Any], declared: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function that takes JSON's values, and calls the other one with the types that it declared.

    What does not fit raises a `ValueError` that names the argument and the part of it.
    """
    if not declared:
        return function
    adapters = {name: TypeAdapter(hint) for name, hint in declared.items()}

    def call(**arguments: Any) -> Any:
        faults = []
        for name in adapters.keys() & arguments.keys():
            try:
                arguments[name] = adapters[name].validate_python(arguments[name])
            except ValidationError as error:
                faults += [
                    f"{'.'.join(map(str, (name, *each['loc'])))}: {each['msg']}"
                    for each in error.errors(include_url=False, include_context=False)
                ]
        if faults:
            raise ValueError("; ".join(sorted(faults)))
        return function(**arguments)

    return call


def _is_plain(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return True
    if origin is None:
        return hint in _PLAIN if not isinstance(hint, str) else True
    if origin in (list, dict, tuple, Union, types.UnionType):
        return all(each is ... or _is_plain(each) for each in typing.get_args(hint))
    return False


def _adapt(name: str, hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type, without references; what may be null is marked as transformers does."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else ()
    is_nullable = type(None) in parts
    if is_nullable:
        hint = Union[tuple(part for part in parts if part is not type(None))]  # noqa: UP007
    try:
        schema = TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        shown = getattr(hint, "__name__", str(hint))
        fix = "make it a dataclass, a TypedDict or a pydantic model"
        if getattr(error, "code", None) == "typed-dict-version":
            fix = "import TypedDict from typing_extensions"
        raise UndescribedError(f"the type of `{name}`, {shown}, has no schema", fix) from error
    written = _inline(schema, schema.pop("$defs", {}), ())
    return {**written, "nullable": True} if is_nullable else written


def _inline(
    value: Any, definitions: Mapping[str, Any], inside: tuple[str, ...], *, names: bool = False
) -> Any:
    """Put what `$ref` names in its place; a type that holds itself is an object there."""
    if isinstance(value, list):
        return [_inline(each, definitions, inside) for each in value]
    if not isinstance(value, dict):
        return value
    name = str(value.get("$ref", "")).rpartition("/")[2]
    if name and not names:
        rest = {key: each for key, each in value.items() if key != "$ref"}
        if name in inside or name not in definitions:
            return {"type": "object", **rest}
        return _inline({**definitions[name], **rest}, definitions, (*inside, name))
    return {
        key: _inline(each, definitions, inside, names=key == "properties" and not names)
        for key, each in value.items()
        if names or key not in _DROPPED
    }


def _write(schema: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the property of an argument; the docstring's line describes it before the type does."""
    description = plain.get("description") or schema.get("description")
    rest = {key: value for key, value in schema.items() if key != "description"}
    return {**rest, "description": description} if description else rest


def _as_plain(function: Callable[..., Any], declared: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a stand-in with plain arguments alone, which transformers can describe."""
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    hidden = {name for name in declared if not describes(function, name)}

    def stand_in(*args: Any, **kwargs: Any) -> None: ...

    shown = {name: each for name, each in signature.parameters.items() if name not in hidden}
    stand_in.__name__ = getattr(function, "__name__", type(function).__name__)
    stand_in.__doc__ = function.__doc__
    plain = {name: dict if name in declared else hint for name, hint in hints.items()}
    stand_in.__annotations__ = {name: hint for name, hint in plain.items() if name not in hidden}
    stand_in.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
    return stand_in
