"""The account of a Python script: what is taken, what is left to the user and what is dropped, with lines."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import KeyReport, by_key, read_keys, write_value
from grpo_cli.convert.rewards import Reward, name_file
from grpo_cli.convert.script_environment import Assignment, TooLongError
from grpo_cli.convert.script_evaluator import Evaluator
from grpo_cli.convert.script_values import (
    METHODS,
    MISSING,
    Choice,
    Function,
    Literal,
    Object,
    Value,
    code_of,
    default_of,
    line_of,
    parts_of,
    plain,
    reachable,
    root_of,
)
from grpo_cli.convert.trl import find_home
from grpo_cli.issues import Location
from grpo_cli.recipe.yaml_tree import Node, as_node, read_source

_TRLS = ("trl", "unsloth", "open_r1", "swift")
"""Packages whose trainer is TRL's, or takes what TRL's takes."""
ALL_SECTIONS = ("model", "dataset", "rewards", "training", "generation", "logging")
_SIGNS = ("GRPOConfig", "LoraConfig", "GRPOTrainer", "load_dataset")
Bound = dict[str, tuple[Value, ast.AST]]
"""Arguments of a call by name, with the code of each."""


def kind_of(made: Object) -> str:
    """Return which part of a training a call makes; empty for another."""
    (loader, _, last), args = made.name.rpartition("."), made.args or {}
    if not made.is_call:
        return ""
    if last.endswith("Trainer") and ("GRPO" in made.name.upper() or "reward_funcs" in args):
        return "trainer"
    if last.endswith("Config") and "GRPO" in last:
        return "config"
    if last in ("get_peft_model", "LoraConfig", "BitsAndBytesConfig"):
        return "adapter"
    if last == "from_pretrained":
        is_adapter = "Peft" in loader and "Auto" not in loader
        if loader.endswith(("Tokenizer", "Processor", "TokenizerFast")):
            return "tokenizer"
        return "adapter" if is_adapter or loader.endswith("Config") else "model"
    is_rows = last in ("load_dataset", "load_from_disk") or made.name.startswith("pandas.read_")
    return "rows" if is_rows or ".Dataset.from_" in f".{made.name}" else ""


def find_other_package(made: Object, folder: FilePath) -> str:
    """Return the package that a trainer or config comes from; empty for TRL, and for a file here that uses TRL."""
    package = made.name.rpartition(".")[0].removesuffix(f".{made.last_name}")
    if not package or package.partition(".")[0] in _TRLS:
        return ""
    path = package.lstrip(".").replace(".", "/")
    files = (
        base / f"{path}{end}" for base in (folder, FilePath()) for end in (".py", "/__init__.py")
    )
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
    # unsloth returns the tokenizer with the model.
    while kind == "model" and isinstance(value, Object) and value is not root:
        if value.name == "[1]":
            return "tokenizer"
        value = value.owner
    return "model" if kind == "adapter" else kind


def is_item(value: Value) -> bool:
    """Return whether a value is an item of something."""
    return isinstance(value, Object) and value.name.startswith("[")


def code_of_call(made: Object, longest: int = 120) -> str:
    """Return the code of a method call; what it is called on is left out if it is a call itself."""
    call = made.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return code_of(call, longest)
    if isinstance(call.func.value, ast.Name | ast.Attribute):
        return code_of(call, longest)
    return code_of(ast.Call(ast.Name(f"….{made.last_name}"), call.args, call.keywords), longest)


class ScriptAccount:
    """A script that was read, and the report on it."""

    def __init__(
        self,
        module: ast.Module,
        cells: Sequence[int],
        source: FilePath,
        folder: FilePath,
        flags: Mapping[str, Any] | None,
        places: Mapping[str, Location] | None = None,
    ) -> None:
        self.file, self._cells = source, cells
        module_file = source.with_suffix(".py") if source.suffix == ".ipynb" else source
        self.path = name_file(module_file.resolve(), folder)
        self.nodes = list(ast.walk(module))
        self.body = module.body
        self.evaluator = Evaluator(flags, places)
        self.report = KeyReport(Node({}, Location(str(source), 1, 1)), "trl")
        self.rewards: dict[str, Reward] = {}
        """Rewards that a config cannot name."""
        self.extra: dict[str, tuple[str, Any, ast.AST]] = {}
        """Keys of the recipe that no config of TRL has: key of the report, value and code."""
        self.condition = ""
        """That under which the script makes the trainer."""
        self._accounted: set[ast.AST] = set()
        """Code that is in the report."""
        self.parts: dict[int, str] = {}
        """Roles of what the trainer gets from functions that are not read, by id."""
        self._read()
        self.made = self.evaluator.made

    def _read(self) -> None:
        stopped = ""
        try:
            self.evaluator.execute(self.body, self.evaluator.module)
            self._call_entry_points()
        except TooLongError:
            stopped = "has more steps than are read"
        except RecursionError:
            stopped = "is nested deeper than is read"
        if stopped:
            self.report.add_to_do("training", f"{self.file.name} {stopped}; write what is missing")
            self.report.unread.update(ALL_SECTIONS)
        names = [made.last_name for made in self.evaluator.made]
        signs = [sign for sign in _SIGNS if any(name.endswith(sign) for name in names)]
        self.report.signs = [f"{sign}(…)" for sign in signs]

    def _call_entry_points(self) -> None:
        """Read functions that the script itself does not call, until one makes a trainer.

        Those that no other function names come first.
        """
        evaluator = self.evaluator
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        inside = {node for each in self.nodes if isinstance(each, kinds) for node in ast.walk(each)}
        used = Counter(getattr(node, "id", None) or getattr(node, "attr", None) for node in inside)
        instances: dict[int, Value] = {}
        for function in sorted(evaluator.functions, key=lambda each: used[each.name] > 0):
            if any(kind_of(made) == "trainer" for made in evaluator.made):
                return
            node, cls = function.node, function.cls
            owner = node if cls is None else cls.node
            is_start = cls is None and not used[function.name]
            is_trainers = cls is not None and cls.outside_base is not None
            if node in evaluator.entered or is_trainers or function.name.startswith("__"):
                continue
            if not is_start and "GRPO" not in code_of(owner, 10**6):
                continue
            unknown: dict[str, Value] = {"**": Object(node, parts=(Object(node),))}
            if cls is not None and id(cls) not in instances:
                instances[id(cls)] = evaluator.call_value(cls.node, cls, [], unknown)
            positional = (instances[id(cls)],) if cls is not None else ()
            entry = Function(node, frame=function.frame, positional=positional, cls=cls)
            evaluator.call_value(node, entry, [], unknown)

    # Finding.

    def find(self, value: Value | None, meant: str) -> tuple[list[Object], list[Object]]:
        """Return the calls of a kind or name that a value begins with, and those that it passes through."""
        inside = reachable(value)
        ids = {id(each) for each in inside}
        calls = [each for each in inside if isinstance(each, Object) and each.is_call]
        begins = [made for made in calls if meant in (kind_of(made), made.last_name)]
        passes = {
            made.node: made
            for made in self.made
            if id(made) in ids and made not in begins and {*begins} & {*reachable(made)}
        }
        return begins, [*passes.values()]

    def bind(self, made: Object, parameters: Sequence[str] = ()) -> Bound:
        """Return the arguments of a call by name, with the code of each."""
        bound: Bound = {}
        for key, value in (made.args or {}).items():
            is_named = not key.isdigit() or int(key) >= len(parameters)
            bound[key if is_named else parameters[int(key)]] = (value, self.node_of(made, key))
        return bound

    @staticmethod
    def node_of(made: Object, name: str) -> ast.AST:
        """Return the code of an argument of a call."""
        call = made.node
        if isinstance(call, ast.Call):
            written = None if name == "**" else name
            nodes = [each.value for each in call.keywords if each.arg == written]
            if len(nodes) == 1:
                return nodes[0]
            if name.isdigit() and int(name) < len(call.args):
                return call.args[int(name)]
        value = (made.args or {}).get(name)
        return value.node if value is not None else call

    # The account.

    def account(self, node: ast.AST, *, inside: bool = False) -> None:
        """Cross off code, and what its value is computed from; with `inside`, what is written in it.

        Calls have arguments of their own to account for: all of them with `inside`, those of parts of a
        training otherwise.
        """
        nodes = [*ast.walk(node)] if inside else [node]
        nodes += [node.value] if isinstance(node, ast.Assign) else []
        self._accounted.update(nodes)
        queue = [value for each in nodes for value in self.evaluator.values.get(each, ())]
        seen = {id(each) for each in queue}
        for value in queue:
            is_call = isinstance(value, Object) and value.is_call
            if is_call and (inside or kind_of(value)):  # type: ignore[arg-type]
                continue
            self._accounted.add(value.node)
            more = [each for each in parts_of(value) if id(each) not in seen]
            seen.update(map(id, more))
            queue += more

    def is_accounted(self, node: ast.AST) -> bool:
        """Return whether code, or what it stands for, is in the report."""
        if node in self._accounted:
            return True
        for value in self.evaluator.values.get(node, ()):
            items = [*parts_of(value)] if isinstance(value, Literal) else []
            are_items = bool(items) and all(each.node in self._accounted for each in items)
            if value.node in self._accounted or are_items:
                return True
        return False

    def _locate(self, line: int, name: str) -> tuple[str, int]:
        """Return the file (and cell of a notebook) of a line, and the line in it."""
        starts = [start for start in self._cells if start <= line]
        return (f"{name}, cell {len(starts)}", line - starts[-1] + 1) if starts else (name, line)

    def locate(self, node: ast.AST) -> str:
        """Return the file and line of code, such as `train.py:12`."""
        if isinstance(place := getattr(node, "place", None), Location):
            return f"{FilePath(place.source).name}:{place.line}"
        name, line = self._locate(line_of(node), self.file.name)
        return f"{name}:{line}"

    def line_of(self, node: ast.AST) -> str:
        """Return the line of code, such as `line 12`, or `cell 3:12` in a notebook."""
        name, line = self._locate(line_of(node), "")
        return f"{name.removeprefix(', ')}:{line}" if name else f"line {line}"

    def place(self, node: ast.AST) -> Location:
        """Return where code is written."""
        if isinstance(place := getattr(node, "place", None), Location):
            return place
        name, line = self._locate(getattr(node, "lineno", 1), str(self.file))
        return Location(name, line, getattr(node, "col_offset", 0) + 1)

    def put(self, key: str, value: Any, node: ast.AST) -> None:
        """Write a key of the config."""
        self.account(node)
        where = self.place(node)
        self.report.tree.value[key] = as_node(value, where)
        self.report.tree.key_locations[key] = where

    def drop(self, key: str, node: ast.AST, reason: str) -> None:
        """Record something without a counterpart in a recipe."""
        self.account(node, inside=True)
        self.report.note(key, self.place(node), reason)

    def drop_all(
        self, prefix: str, bound: Bound, reasons: Mapping[str, str], other: str = ""
    ) -> None:
        """Record arguments of a call without a counterpart in a recipe."""
        for name, (_, node) in bound.items():
            reason = reasons.get(name) or other or f"`{code_of(node)}` has no place in a recipe"
            self.drop(f"{prefix}.{name}", node, reason)

    def leave(
        self, target: str, value: Value | None, node: ast.AST, fix: str = "write its value"
    ) -> None:
        """Leave a key of the recipe to the user, with the code that computes it and its default."""
        self.account(node, inside=value is None)
        default = default_of(value)
        target = target.removesuffix(".**").removesuffix(".*")
        example = ""
        about = self._describe(value, node) if plain(value) is MISSING else ""
        if default is not MISSING and default is not None and "." in target:
            example = f"\n{write_value(target.rpartition('.')[2], default)}"
            if target == "generation.backend":
                default = "vllm" if default else "transformers"
                example = f"\nbackend: {default}"
            self.report.defaults[target] = default
        self.report.add_to_do(
            target, f"{self.locate(node)} has `{code_of(node)}`{about}; {fix}{example}"
        )

    def _describe(self, value: Value | None, node: ast.AST) -> str:
        """Return what is known of a value that is not known as a whole."""
        if isinstance(value, Choice):
            pairs = [(self._name_option(each), test) for test, each in value.options]
            texts = [f"{text} if `{test}`" if test else text for text, test in pairs]
            return f" ({', or '.join(texts)})"
        default = default_of(value)
        if default is not MISSING and isinstance(value, Object) and value.name == "replaceable":
            others = " or ".join(f"`{code_of(each.node)}`" for each in value.parts[1:])
            return f", which is {default!r} unless {others} replaces it"
        flag = value.name if isinstance(value, Object) and value.name.startswith("--") else ""
        if default is not MISSING:
            return (
                f", which is {default!r} unless {f'`{flag}`' if flag else 'another value'} is given"
            )
        if flag:
            return f" (`{flag}`, which has no default)"
        if not isinstance(value, Object) or not isinstance(node, ast.Name | ast.Attribute):
            return ""
        made = code_of(value.node)
        return "" if made in code_of(node) or isinstance(value.node, ast.arg) else f" (`{made}`)"

    @staticmethod
    def _name_option(value: Value) -> str:
        data = plain(value)
        if isinstance(value, Object) and value.name == "unset":
            return "not set"
        if isinstance(value, Object) and value.name.startswith("--"):
            return f"`{value.name}`"
        return code_of(value.node) if data is MISSING else repr(data)

    @staticmethod
    def advice_for(value: Value) -> str:
        """Return where values that are not in the script come from."""
        objects = [each for each in reachable(value) if isinstance(each, Object)]
        if any(each.name == "flags" for each in objects):
            return "they come from the command line, or the YAML that it names; convert that YAML"
        imports = (each for each in objects if each.is_import)
        imported = next((each for each in imports if isinstance(each.node, ast.ImportFrom)), None)
        return f"`{imported.name}` is in another file" if imported else "the script computes it"

    # What is left.

    def sweep(self, bound: Bound) -> None:
        """Name every argument, assignment and method call that is not in the report.

        These are the ones on the training's objects, and those that have the name of a setting.

        Args:
            bound: What the trainer gets.
        """
        reached = {id(each) for value, _ in bound.values() for each in reachable(value)}
        harmless = {*by_key(read_keys("script-harmless"))}
        parts: list[tuple[Object, str]] = []
        for made in {made.node: made for made in self.made}.values():
            role = self._find_role(made)
            if role and made is root_of(made):
                parts.append((made, role))
            elif self.is_accounted(made.node):
                continue
            elif role:
                self._sweep_method(made, role)
            elif not {made.name.partition(".")[0], made.last_name} & harmless:
                self._sweep_call(made, id(made) in reached)
        left = [each for each in self.evaluator.assignments if each.node not in self._accounted]
        for change in {(each.node, each.name): each for each in left}.values():
            if role := self._find_role(change.owner):
                self._sweep_assignment(change, role)
        for made, role in parts:
            self._sweep_arguments(made, role, id(made) in reached)
        self._sweep_unread()

    def _find_role(self, value: Value | None) -> str:
        """Return the role of a value, which the trainer may get from a function that is not read."""
        role = role_of(value)
        while not role and isinstance(value, Object):
            role, value = self.parts.get(id(value), ""), value.owner
        return role

    def when(self, made: Object) -> str:
        """Return the condition under which a call happens if the trainer is made; empty if it always does."""
        condition, outer = made.condition, self.condition
        if f"{outer} and ".startswith(f"{condition} and "):
            return ""
        return condition.removeprefix(f"{outer} and ")

    def leave_change(self, made: Object) -> None:
        """Leave what a function does to the config to the user."""
        self.leave("training", None, made.node, "it may change the config; write what it changes")
        self.report.unread |= {"training", "generation", "logging"}

    def _sweep_arguments(self, made: Object, role: str, is_reached: bool) -> None:
        """Name the arguments of a part of a training."""
        bound = self.bind(made)
        if made.cls is not None and isinstance(made.node, ast.Call):
            # Its `__init__` may not pass them on.
            pairs = [(str(index), each) for index, each in enumerate(made.node.args)]
            pairs += [(each.arg, each.value) for each in made.node.keywords if each.arg]
            values = self.evaluator.values
            bound |= {name: (values[node][-1], node) for name, node in pairs if node in values}
        left = {
            name: each
            for name, each in bound.items()
            if plain(each[0]) is not None
            and not self._find_role(each[0])  # it has arguments of its own
            and not self.is_accounted(each[1])
        }
        reason = "it does not reach GRPOTrainer"
        if is_reached:
            when = self.when(made)
            reason = "it is a part of what is left to write"
            reason = f"whether GRPOTrainer gets it depends on `{when}`" if when else reason
        if role in ("trainer", "config"):
            reason = f"of another {role}, or of one that GRPOTrainer is not known to get"
        if made.cls is not None and is_reached:
            reason = f"an argument of the script's own {role}; what that sets is taken"
        reason = read_keys("script-unreached").get(role, reason)
        code = code_of(made.node, 10**6)
        if left and len(left) == len(bound) and len(code) <= 100:
            self.drop(code, made.node, reason)
        else:
            self.drop_all(made.cls.name if made.cls else made.last_name, left, {}, reason)

    def _sweep_method(self, made: Object, role: str) -> None:
        name, code = made.last_name, code_of_call(made)
        if role == "rows" and made.name in METHODS:
            return
        if role == "trainer" and name == "train" and not made.args:
            self.put(code, None, made.node)
            self.report.settle((code,), "training", "what `grpo train` does")
            return
        reasons = by_key(read_keys(f"script-{role}-calls"))
        self.drop(code, made.node, reasons.get(name, "recipes have no such step"))

    def _sweep_call(self, made: Object, is_reached: bool) -> None:
        """Name a call that gets a part of the training, and may change it."""
        objects = [each for each in (made.args or {}).values() if isinstance(each, Object)]
        roles = [
            self._find_role(each)
            for each in objects
            # What a tokenizer makes of a text is not the tokenizer.
            if not (each.is_call and each.owner and self._find_role(each) == "tokenizer")
        ]
        touched = [role for role in roles if role not in ("", "rows")]
        if is_reached or not touched:
            return
        if any(kind_of(each) == "config" for each in objects):
            self.leave_change(made)
        else:
            reason = f"gets the {touched[0]}, and may change it; it is not read"
            self.drop(code_of_call(made), made.node, reason)

    def _sweep_assignment(self, change: Assignment, role: str) -> None:
        reasons = by_key(read_keys("script-assignments"))
        reason = reasons.get(change.name, f"recipes do not set this on the {role}")
        if role == "config":
            reason = "of another config, or of one that GRPOTrainer is not known to get"
        target = change.node.targets[0] if isinstance(change.node, ast.Assign) else change.node
        if isinstance(target, ast.Tuple | ast.List):
            named = [each for each in target.elts if getattr(each, "attr", "") == change.name]
            target = named[0] if named else target
        where = f" (if `{change.condition}`)" if change.condition else ""
        self.drop(f"{code_of(target)} = {code_of(change.value.node)}{where}", change.node, reason)

    def _sweep_unread(self) -> None:
        """Name parts of a training in code that was not read, and settings that reach nothing that was."""
        values = self.evaluator.values
        for node in self.nodes:
            name = code_of(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if node not in values and kind_of(Object(node, name, args={name: Object(node)})):
                self.drop(code_of(node, 240), node, self._find_unread(node))
            if any(isinstance(each, Object) and each.is_call for each in values.get(node, ())):
                continue  # of another part, which is named
            for setting, value in _list_settings(node):
                if not self.is_accounted(value):
                    reason = "not known to reach GRPOTrainer"
                    self.drop(f"{setting} = {code_of(value)}", value, reason)

    def _find_unread(self, node: ast.AST) -> str:
        """Return why code was not read, as far as it is known."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        owners = [each for each in self.nodes if isinstance(each, kinds) and node in ast.walk(each)]
        if not owners or owners[-1] in self.evaluator.entered:
            return "this code is in a branch or loop that was not read"
        name = owners[-1].name
        used = {getattr(each, "id", None) or getattr(each, "attr", None) for each in self.nodes}
        if name in used or name.startswith("__"):
            return f"`{name}` was not read: how it is called was not followed"
        return "no call of this code was found"


def _list_settings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
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
    for name, value in pairs:
        target = find_home(name) if isinstance(name, str) else None
        if target is not None and target.startswith("training.") and not _is_unset(value):
            yield name, value


def _is_unset(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
