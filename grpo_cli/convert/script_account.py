"""The account of a Python script: what is taken, what is left to a person and what is dropped, with lines."""

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import KeyReport, by_key, read_keys, write_value
from grpo_cli.convert.rewards import Reward, name_file
from grpo_cli.convert.script_environment import Assignment, TooLongError
from grpo_cli.convert.script_statements import Evaluator
from grpo_cli.convert.script_values import (
    MISSING,
    Choice,
    Function,
    Object,
    Value,
    choose,
    code_of,
    default_of,
    line_of,
    plain,
    reachable,
    root_of,
    unset,
)
from grpo_cli.errors import RecipeError, recipe_error
from grpo_cli.issues import Location
from grpo_cli.recipe.yaml_tree import Node, as_node

ALL_SECTIONS = ("model", "dataset", "rewards", "training", "generation", "logging")
_SIGNS = ("GRPOConfig", "LoraConfig", "GRPOTrainer", "load_dataset")


class ScriptAccount:
    """A script that was read, and the report on it."""

    def __init__(
        self,
        module: ast.Module,
        cells: Sequence[int],
        source: FilePath,
        folder: FilePath,
        flags: Mapping[str, Any] | None,
    ) -> None:
        self.file, self._cells = source, cells
        self.path = name_file(source.resolve(), folder)
        self.nodes = list(ast.walk(module))
        self.body = module.body
        self.evaluator = Evaluator(flags)
        self.report = KeyReport(Node({}, Location(str(source), 1, 1)), "trl")
        self.rewards: dict[str, Reward] = {}
        """Rewards that a config cannot name."""
        self.processor: dict[str, Any] = {}
        """Settings of the processor for images."""
        self.extra: dict[str, tuple[str, Any, ast.AST]] = {}
        """Keys of the recipe that no config of TRL has: key of the report, value and place."""
        self.done: set[tuple[int, str]] = set()
        """Arguments (of calls by id), assignments and calls that are in the account."""
        self.merged: dict[int, list[Object]] = {}
        """Calls of branches that were made one, by id."""
        self.reached: list[Object] = []
        """What the trainer gets."""
        self.nodes_of: dict[str, ast.AST] = {}
        """Where the trainer gets its arguments."""
        self._read(module)

    def _read(self, module: ast.Module) -> None:
        stopped = ""
        try:
            self.evaluator.execute(module.body, self.evaluator.module)
            self._call_entry_points()
        except TooLongError:
            stopped = "has more steps than are read"
        except RecursionError:
            stopped = "is nested deeper than is read"
        if stopped:
            self.add_to_do("training", f"{self.file.name} {stopped}; write what is missing")
            self.report.unread.update(ALL_SECTIONS)
        names = [made.last_name for made in self.evaluator.made]
        self.report.signs = [
            f"{sign}(…)" for sign in _SIGNS if any(name.endswith(sign) for name in names)
        ]

    def _call_entry_points(self) -> None:
        """Read functions that the script itself does not call, if nothing that it calls trains."""
        evaluator = self.evaluator
        instances: dict[int, Value] = {}
        mentions = {node: self._mentions_training(node) for node in self._list_definitions()}
        named = self._list_named()
        # Those that no other function calls are where the script begins.
        for function in sorted(evaluator.functions, key=lambda each: named[_name_of(each)] > 0):
            if any(map(self.is_trainer, evaluator.made)):
                return
            node, cls = function.node, function.cls
            base = cls.outside_base if cls is not None else None
            if base is not None and (base.last_name.endswith("Trainer") or "GRPO" in base.name):
                continue  # a trainer that another file makes
            owner = node if cls is None else cls.node
            name = _name_of(function)
            is_start = cls is None and not named[name]
            if node in evaluator.entered or name.startswith("__"):
                continue
            if not is_start and not mentions.get(owner):
                continue
            unknown: dict[str, Value] = {"**": Object(node, parts=(Object(node),))}
            positional: tuple[Value, ...] = ()
            if cls is not None:
                if id(cls) not in instances:
                    instances[id(cls)] = evaluator.call_value(cls.node, cls, [], unknown)
                positional = (instances[id(cls)],)
            entry = Function(node, frame=function.frame, positional=positional, cls=cls)
            evaluator.call_value(node, entry, [], unknown)

    def _list_named(self) -> Counter[str]:
        """Count how often functions of the script name something."""
        inside = {node for each in self._list_definitions() for node in ast.walk(each)}
        names = [getattr(node, "id", None) or getattr(node, "attr", None) for node in inside]
        return Counter(name for name in names if isinstance(name, str))

    def _list_definitions(self) -> list[ast.AST]:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        return [node for node in self.nodes if isinstance(node, kinds)]

    @staticmethod
    def _mentions_training(definition: ast.AST) -> bool:
        """Return whether code names something of GRPO, or gives something rewards."""
        for node in ast.walk(definition):
            name = (
                getattr(node, "id", None)
                or getattr(node, "attr", None)
                or getattr(node, "arg", None)
            )
            if isinstance(name, str) and ("GRPO" in name or name == "reward_funcs"):
                return True
        return False

    # What an object is.

    @staticmethod
    def is_trainer(made: Object) -> bool:
        """Return whether a call makes a trainer for GRPO."""
        name = made.last_name
        return name.endswith("Trainer") and (
            "GRPO" in name.upper() or "reward_funcs" in (made.args or {})
        )

    @staticmethod
    def is_config(made: Object) -> bool:
        """Return whether a call makes a config of such a trainer."""
        return made.last_name.endswith("Config") and "GRPO" in made.last_name

    @staticmethod
    def is_tokenizer(made: Object) -> bool:
        """Return whether a call loads a tokenizer or a processor."""
        owner = made.name.rpartition(".")[0]
        return owner.endswith(("Tokenizer", "Processor", "TokenizerFast"))

    def loads_model(self, made: Object) -> bool:
        """Return whether a call loads the weights of a model."""
        is_load = made.is_call and made.last_name == "from_pretrained" and "Peft" not in made.name
        return (
            is_load
            and not self.is_tokenizer(made)
            and not made.name.endswith("Config.from_pretrained")
        )

    def _role(self, made: Object) -> str:
        """Return what a call makes, as far as it is part of a training; empty if it is not."""
        name = made.last_name
        if self.is_trainer(made):
            return "trainer"
        if self.is_config(made):
            return "config"
        if name == "from_pretrained":
            return "tokenizer" if self.is_tokenizer(made) else "model"
        if name in ("get_peft_model", "LoraConfig", "BitsAndBytesConfig"):
            return "model"
        is_rows = name in ("load_dataset", "load_from_disk") or ".Dataset.from_" in f".{made.name}"
        return "rows" if is_rows else ""

    # Finding.

    def find_trainer(self) -> Object | None:
        """Return the trainer that the script makes; None if it makes a config only."""
        trainers = [made for made in self.evaluator.made if self.is_trainer(made)]
        if not trainers and not any(map(self.is_config, self.evaluator.made)):
            raise self._refuse("makes neither a GRPOTrainer nor a GRPOConfig of TRL")
        return self.combine(trainers, "GRPOTrainer")

    def combine(self, made: list[Object], what: str) -> Object | None:
        """Return the only object, or those of branches of which one is taken as one."""
        if len(made) <= 1:
            return made[0] if made else None
        if not all(
            _are_exclusive(first, second)
            for first in made
            for second in made
            if first is not second
        ):
            lines = ", ".join(str(line_of(each.node)) for each in made)
            raise self._refuse(f"calls {what} {len(made)} times (lines {lines})")
        return self.merge([(each.condition, each) for each in made])

    def merge(self, options: list[tuple[str, Object]]) -> Object:
        """Return calls of which one is made as one, whose arguments and attributes are choices."""
        first = options[0][1]
        args = _merge_mappings(first.node, [(test, each.args or {}) for test, each in options])
        attrs = _merge_mappings(first.node, [(test, each.attrs) for test, each in options])
        merged = Object(first.node, name=first.name, args=args, cls=first.cls, attrs=attrs)
        for _, each in options:
            self.done |= {(id(each), name) for name in ("", *(each.args or {}))}
        self.merged[id(merged)] = [each for _, each in options]
        return merged

    def _refuse(self, message: str) -> RecipeError:
        fix = "name a script that makes one GRPOTrainer, or the YAML that it reads"
        return recipe_error(message, fix, location=self.report.tree.location)

    def find_in(self, value: Value | None, is_meant: Callable[[Object], bool]) -> Object | None:
        """Return the only call of some kind that a value is made of; None if there is none, or several."""
        if value is None:
            return None
        hits = [
            each
            for each in reachable(value)
            if isinstance(each, Object) and each.is_call and is_meant(each)
        ]
        if isinstance(value, Choice) and len(hits) > 1:
            return None
        return hits[0] if len(hits) == 1 else None

    @staticmethod
    def node_of(made: Object, name: str) -> ast.AST:
        """Return where a call gets an argument."""
        call = made.node
        if isinstance(call, ast.Call):
            for keyword in call.keywords:
                if keyword.arg == (None if name == "**" else name):
                    return keyword.value
            if name.isdigit() and int(name) < len(call.args):
                return call.args[int(name)]
        value = (made.args or {}).get(name)
        return value.node if value is not None else call

    # The account.

    def locate(self, node: ast.AST) -> Location:
        """Return the place of code."""
        line = getattr(node, "lineno", 1)
        source, line = self._locate_line(line)
        return Location(source, line, getattr(node, "col_offset", 0) + 1)

    def _locate_line(self, line: int, name: str | None = None) -> tuple[str, int]:
        """Return the file (and cell of a notebook) of a line, and the line in it."""
        name = name or str(self.file)
        starts = [start for start in self._cells if start <= line]
        return (f"{name}, cell {len(starts)}", line - starts[-1] + 1) if starts else (name, line)

    def place(self, node: ast.AST) -> str:
        """Return the place of code, such as `train.py:12`."""
        source, line = self._locate_line(line_of(node), self.file.name)
        return f"{source}:{line}"

    def put(self, key: str, value: Any, at: ast.AST) -> None:
        """Write a key of the config."""
        where = self.locate(at)
        self.report.tree.value[key] = as_node(value, where)
        self.report.tree.key_locations[key] = where

    def drop(self, key: str, at: ast.AST, reason: str) -> None:
        """Record something without a place in a recipe."""
        while key in self.report.tree.value:
            key = f"{key} (line {line_of(at)})" if "(line" not in key else f"{key} "
        self.put(key, None, at)
        self.report.drop((key,), reason)

    def leave(
        self, target: str, value: Value | None, at: ast.AST, fix: str = "write its value"
    ) -> None:
        """Leave a key of the recipe to a person, with the code that computes it and its default."""
        default = default_of(value) if value is not None else MISSING
        target = target.removesuffix(".**").removesuffix(".*")
        example = ""
        about = self._describe(value) if plain(value) is MISSING else ""
        if default is not MISSING and default is not None and target.count("."):
            example = f"\n{write_value(target.rpartition('.')[2], default)}"
            self.report.defaults[target] = default
        code = code_of(at)
        if isinstance(at, ast.Name | ast.Attribute) and isinstance(value, Object) and not about:
            made = code_of(value.node)
            about = "" if made in code or isinstance(value.node, ast.arg) else f" (`{made}`)"
        self.add_to_do(target, f"{self.place(at)} has `{code}`{about}; {fix}{example}")

    def _describe(self, value: Value | None) -> str:
        """Return what is known of a value that is not known as a whole."""
        if isinstance(value, Choice):
            texts = [
                f"{self._name_option(option)} if `{condition}`"
                if condition
                else self._name_option(option)
                for condition, option in value.options
            ]
            return f" ({', or '.join(texts)})"
        default = default_of(value) if value is not None else MISSING
        if default is MISSING:
            is_flag = isinstance(value, Object) and value.name.startswith("--")
            return f" (`{value.name}`, which has no default)" if is_flag else ""  # type: ignore[union-attr]
        flag = (
            value.name
            if isinstance(value, Object) and value.name.startswith("--")
            else "another value"
        )
        return f", which is {default!r} unless {f'`{flag}`' if flag[0] == '-' else flag} is given"

    def _name_option(self, value: Value) -> str:
        literal = plain(value)
        if isinstance(value, Object) and value.name == "unset":
            return "not set"
        if isinstance(value, Object) and value.name.startswith("--"):
            return f"`{value.name}`"
        return code_of(value.node) if literal is MISSING else repr(literal)

    def add_to_do(self, target: str, text: str) -> None:
        """Add to what a person has to write for a key."""
        before = self.report.to_do.get(target)
        if before is None:
            self.report.to_do[target] = text
        elif text.partition("\n")[0] not in before:
            first, _, example = before.partition("\n")
            more, _, other = text.partition("\n")
            examples = "\n".join(filter(None, (example, other)))
            self.report.to_do[target] = f"{first}. {more}" + (f"\n{examples}" if examples else "")

    def advice_for(self, value: Value) -> str:
        """Return where values that are not in the script come from."""
        codes = [each for each in reachable(value) if isinstance(each, Object)]
        if any(each.name == "flags" for each in codes):
            return "they come from the command line, or the YAML that it names; convert that YAML"
        imported = next(
            (each for each in codes if each.is_import and isinstance(each.node, ast.ImportFrom)),
            None,
        )
        if imported is not None:
            return f"`{imported.name}` is in another file"
        return "the script computes it"

    # What is left.

    def sweep(self, trainer: Object | None) -> None:
        """Name every argument, assignment and method call on the training's objects that is not taken."""
        roles = {id(made): self._role(made) for made in self.evaluator.made}
        for made in self.evaluator.made:
            root = root_of(made)
            if roles[id(made)] and made.owner is None:
                self._sweep_arguments(made, roles[id(made)], trainer)
            elif made is not root and isinstance(root, Object) and roles.get(id(root)):
                self._sweep_call(made, _role_in(made, roles[id(root)]))
            elif (id(made), "") not in self.done:
                self._sweep_passed(made, roles)
        for change in self.evaluator.assignments:
            root = root_of(change.owner)
            if (
                isinstance(root, Object)
                and roles.get(id(root))
                and (id(change), "") not in self.done
            ):
                self._sweep_assignment(change, _role_in(change.owner, roles[id(root)]))

    def _sweep_arguments(self, made: Object, role: str, trainer: Object | None) -> None:
        left = [name for name in made.args or {} if (id(made), name) not in self.done]
        if not left or (id(made), "") in self.done:
            return
        if len(left) == len(made.args or {}) and role != "trainer":
            reason = "it does not reach GRPOTrainer"
            if trainer is None:
                reason = "no GRPOTrainer is made here"
            elif any(each is made for each in reachable(trainer)):
                reason = "whether GRPOTrainer gets it depends on a condition"
            reason = read_keys("script-unreached").get(role, reason)
            self.drop(code_of(made.node, 240), made.node, reason)
            return
        for name in left:
            node = self.node_of(made, name)
            self.drop(
                f"{made.last_name}.{name}", node, f"`{code_of(node)}` has no place in a recipe"
            )

    def _sweep_call(self, made: Object, role: str) -> None:
        if (id(made), "") in self.done:
            return
        name, code = made.last_name, self.code_of_method(made)
        if role == "trainer" and name == "train" and not made.args:
            self.put(code, None, made.node)
            self.report.settle((code,), "training", "what `grpo train` does")
            return
        reasons = by_key(read_keys(f"script-{role}-calls"))
        self.drop(code, made.node, reasons.get(name, "recipes have no such step"))

    @staticmethod
    def code_of_method(made: Object) -> str:
        """Return the code of a method call; what it is called on is left out if it is a call itself."""
        call = made.node
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return code_of(call, 120)
        if isinstance(call.func.value, ast.Name | ast.Attribute):
            return code_of(call, 120)
        return ScriptAccount.code_of_change(made, 120)

    @staticmethod
    def code_of_change(made: Object, longest: int = 60) -> str:
        """Return the code of a method call without what it is called on."""
        call = made.node
        if made.owner is None or not isinstance(call, ast.Call):
            return code_of(call, longest)
        alone = ast.Call(ast.Name(f"….{made.last_name}"), call.args, call.keywords)
        return code_of(alone, longest)

    def _sweep_passed(self, made: Object, roles: dict[int, str]) -> None:
        """Name calls that get one of the training's objects and may change it."""
        name = made.name
        if name.partition(".")[0] in read_keys("script-harmless") or made.last_name in read_keys(
            "script-harmless"
        ):
            return
        for value in (made.args or {}).values():
            root = root_of(value)
            is_itself = isinstance(value, Object) and (value.is_call or value.name.startswith("["))
            role = _role_in(value, roles.get(id(root), "")) if is_itself else ""
            if role in ("config", "model", "tokenizer", "trainer") and value not in self.reached:
                reason = f"gets the {role}, and may change it; it is not read"
                self.drop(self.code_of_method(made), made.node, reason)
                return

    def _sweep_assignment(self, change: Assignment, role: str) -> None:
        reasons = by_key(read_keys("script-assignments"))
        reason = reasons.get(change.name, f"recipes do not set this on the {role}")
        target = change.node.targets[0] if isinstance(change.node, ast.Assign) else change.node
        where = f" (if `{change.condition}`)" if change.condition else ""
        self.drop(f"{code_of(target)} = {code_of(change.value.node)}{where}", change.node, reason)


def _name_of(function: Function) -> str:
    return str(getattr(function.node, "name", ""))


def _merge_mappings(node: ast.AST, options: list[tuple[str, dict[Any, Value]]]) -> dict[Any, Value]:
    names = dict.fromkeys(name for _, mapping in options for name in mapping)
    return {
        name: choose(node, [(test, mapping.get(name) or unset(node)) for test, mapping in options])
        for name in names
    }


def _role_in(value: Value, role: str) -> str:
    """Return the role of what a chain begins with; unsloth returns the tokenizer with the model."""
    while isinstance(value, Object) and isinstance(value.owner, Object):
        if role == "model" and value.name == "[1]":
            return "tokenizer"
        value = value.owner
    return role


def _are_exclusive(first: Object, second: Object) -> bool:
    """Return whether at most one of two calls happens, or both stand in one place."""
    arms = dict(first.branches)
    return first.node is second.node or any(
        arms.get(fork, arm) != arm for fork, arm in second.branches
    )
