"""Which part of a training a call or a value of a Python script is, and which names are settings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_cli.convert.key_report import read_keys
from grpo_cli.convert.script_values import (
    MISSING,
    Choice,
    Literal,
    Object,
    Value,
    code_of,
    default_of,
    describe_test,
    parts_of,
    plain,
    reachable,
    root_of,
)
from grpo_cli.convert.trl import find_home, find_model_key
from grpo_cli.recipe.yaml_tree import read_source

_TRLS = ("trl", "unsloth", "open_r1", "swift")
"""Packages whose trainer is TRL's, or takes what TRL's takes."""


def kind_of(made: Object) -> str:
    """Return which part of a training a call makes; empty for another."""
    (loader, _, last), args = made.name.rpartition("."), made.args or {}
    if not made.is_call:
        return ""
    if last.endswith("Config") and "GRPO" in last:
        return "config"
    if re.search("Trainer(?!.*(Callback|Config|State))", last):
        has_config = any(
            isinstance(each, Object) and kind_of(each) == "config" for each in args.values()
        )
        if "GRPO" in made.name.upper() or "reward_funcs" in args or has_config:
            return "trainer"
    if last in ("get_peft_model", "LoraConfig", "BitsAndBytesConfig"):
        return "adapter"
    if last == "from_pretrained":
        is_adapter = "Peft" in loader and "Auto" not in loader
        if loader.endswith(("Tokenizer", "Processor", "TokenizerFast")):
            return "tokenizer"
        return "adapter" if is_adapter or loader.endswith("Config") else "model"
    is_rows = last in ("load_dataset", "load_from_disk") or made.name.startswith("pandas.read_")
    return "rows" if is_rows or ".Dataset.from_" in f".{made.name}" else ""


def find_other_package(made: Object, folder: Path) -> str:
    """Return the package that a trainer or config comes from; empty for TRL, and for a file here that uses TRL."""
    package = made.name.rpartition(".")[0].removesuffix(f".{made.last_name}")
    if not package or package.partition(".")[0] in _TRLS:
        return ""
    path = package.lstrip(".").replace(".", "/")
    files = (base / f"{path}{end}" for base in (folder, Path()) for end in (".py", "/__init__.py"))
    is_ours = any(re.search(r"\btrl\b", read_source(each)) for each in files if each.is_file())
    return "" if is_ours else package


def role_of(value: Value | None) -> str:
    """Return which part of a training a value belongs to; empty for another."""
    root = root_of(value)
    if not isinstance(root, Object):
        return ""
    if root.is_import and "GRPOTrainer" in root.last_name:
        return "trainer"
    kind = kind_of(root)
    if not kind and root.is_call and root is not value:
        args = [*(root.args or {}).values()]
        args += [each for arg in args if isinstance(arg, Literal) for each in parts_of(arg)]
        # An item of rows, such as a text, is not rows.
        is_given = any(role_of(each) == "rows" and not is_item(each) for each in args)
        return "rows" if is_given else ""
    chain: list[Object] = []
    while isinstance(value, Object) and value is not root:
        chain.append(value)
        value = next(iter(value.parts), None) if isinstance(value, Choice) else value.owner
    if kind == "model" and chain and chain[-1].name == "[1]":
        kind = "tokenizer"  # unsloth returns it with the model
    if kind in ("trainer", "tokenizer") and any(each.is_call for each in chain[1:]):
        return ""  # of a result, such as metrics or the tokens of a text
    return "model" if kind == "adapter" else kind


def rows_of(value: Value | None) -> list[Value]:
    """Return a value and the rows that it is made of, the nearest first; what chooses among them is left out."""
    queue = [value] if value is not None else []
    for current in queue:
        parts = [*parts_of(current)]
        if isinstance(current, Object) and current.owner is not None:
            parts = [current.owner]
        elif isinstance(current, Object) and current.is_call:
            parts = [
                each for each in parts if not isinstance(each, Object) or role_of(each) == "rows"
            ]
        queue += [each for each in parts if not any(each is other for other in queue)]
    return queue


def is_item(value: Value) -> bool:
    """Return whether a value is an item of something."""
    return isinstance(value, Object) and value.name.startswith("[")


def find_target(name: str) -> str | None:
    """Return the recipe's key for a key of TRL's config, or None."""
    return read_keys("script-targets").get(name) or find_home(name) or find_model_key(name)


def code_of_call(made: Object, longest: int = 120) -> str:
    """Return the code of a method call; what it is called on is left out if it is a call itself."""
    call = made.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return code_of(call, longest)
    if isinstance(call.func.value, ast.Name | ast.Attribute):
        return code_of(call, longest)
    return code_of(ast.Call(ast.Name(f"….{made.last_name}"), call.args, call.keywords), longest)


def list_settings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments, items or attributes with the name of a setting of a training, and their code."""
    pairs: list[tuple[Any, ast.expr]] = []
    match node:
        case ast.Call(keywords=keywords):
            pairs = [(each.arg, each.value) for each in keywords]
        case ast.Dict(keys=keys, values=values):
            pairs = [*zip((getattr(each, "value", None) for each in keys), values, strict=True)]
        case ast.ClassDef(body=body):
            fields = [each for each in body if isinstance(each, ast.AnnAssign) and each.value]
            pairs = [(getattr(each.target, "id", None), each.value) for each in fields]  # type: ignore[misc]
        case ast.Assign(targets=[ast.Attribute(attr=name)], value=value):
            pairs = [(name, value)]
        case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=name))], value=value):
            pairs = [(name, value)]
    pairs = [
        (name, value)
        for name, value in pairs
        if isinstance(name, str)
        and find_target(name)
        and getattr(value, "value", value) is not None
    ]
    # Names such as `temperature` have other meanings too.
    if any(str(find_target(name)).startswith("training.") for name, _ in pairs):
        yield from pairs


def describe(value: Value | None, node: ast.AST) -> str:
    """Return what is known of a value that is not known as a whole."""
    if isinstance(value, Choice):
        pairs = [(_name_option(each), test) for test, each in value.options]
        texts = [f"{text} {describe_test(test)}" if test else text for text, test in pairs]
        return f" ({', or '.join(texts)})"
    default = default_of(value)
    if default is not MISSING and isinstance(value, Object) and value.name == "replaceable":
        others = " or ".join(f"`{code_of(each.node)}`" for each in value.parts[1:])
        return f", which is {default!r} unless {others} replaces it"
    flag = value.name if isinstance(value, Object) and value.name[:1] in ("-", "$") else ""
    if default is not MISSING:
        given = f"`{flag}` is {'set' if flag[:1] == '$' else 'given'}"
        return f", which is {default!r} unless {given if flag else 'another value is given'}"
    if flag[:1] == "-":
        return f" (`{flag}`, which has no default)"
    if not isinstance(value, Object) or not isinstance(node, ast.Name | ast.Attribute):
        return ""
    made = code_of(value.owner.node if value.owner and is_item(value) else value.node)
    return "" if made in code_of(node) or isinstance(value.node, ast.arg) else f" (`{made}`)"


def _name_option(value: Value) -> str:
    data = plain(value)
    if isinstance(value, Object) and value.name == "unset":
        return "not set"
    if isinstance(value, Object) and value.name.startswith("--"):
        return f"`{value.name}`"
    return code_of(value.node) if data is MISSING else repr(data)


def advice_for(value: Value) -> str:
    """Return what to write for values that are not in the script."""
    objects = [each for each in reachable(value) if isinstance(each, Object)]
    if any(each.name == "flags" for each in objects):
        text = "its values come from the command line, or from a YAML that it names"
        return f"{text}: convert that YAML, or write them"
    imports = (each for each in objects if each.is_import)
    imported = next((each for each in imports if isinstance(each.node, ast.ImportFrom)), None)
    other = f"; it comes from `{imported.name}`, in another file" if imported else ""
    return f"write its values{other}"
