"""The account of a Python script: what is taken, what is left to the user and what is dropped, with lines."""

import ast
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.convert.key_report import OFF, KeyReport, by_key, read_keys, write_value
from grpo_cli.convert.rewards import Reward, name_file
from grpo_cli.convert.script_environment import Assignment, TooLongError
from grpo_cli.convert.script_evaluator import Evaluator
from grpo_cli.convert.script_parts import (
    code_of_call,
    describe,
    find_target,
    is_item,
    kind_of,
    list_settings,
    role_of,
    rows_of,
)
from grpo_cli.convert.script_values import (
    MISSING,
    NAMES,
    Choice,
    Function,
    Literal,
    Object,
    Value,
    code_of,
    default_of,
    describe_test,
    line_of,
    parts_of,
    plain,
    reachable,
    root_of,
)
from grpo_cli.issues import Location
from grpo_cli.recipe.yaml_tree import Node, as_node

OF_CONFIG = ("training", "generation", "logging")
ALL_SECTIONS = ("model", "dataset", "rewards", "training", "generation", "logging")
_SIGNS = ("GRPOConfig", "LoraConfig", "GRPOTrainer", "load_dataset")
NOT_REACHED = "not known to reach the GRPOTrainer that is converted"
Bound = dict[str, tuple[Value, ast.AST]]
"""Arguments of a call by name, with the code of each."""


class ScriptAccount:
    """A script that was read, and the report on it."""

    def __init__(
        self,
        module: ast.Module,
        cells: Sequence[int],
        source: Path,
        folder: Path,
        flags: Mapping[str, Any] | None,
        places: Mapping[str, Location] | None = None,
    ) -> None:
        self.file, self._cells = source, cells
        module_file = source.with_suffix(".py") if source.suffix == ".ipynb" else source
        self.path = name_file(module_file.resolve(), folder)
        self.nodes = list(ast.walk(module))
        self.body = module.body
        self.evaluator = Evaluator(flags, places, self.line_of)
        self.report = KeyReport(Node({}, Location(str(source), 1, 1)), "trl")
        self.rewards: dict[str, Reward] = {}
        """Rewards that a config cannot name."""
        self.extra: dict[str, tuple[str, Any, ast.AST]] = {}
        """Keys of the recipe that no config of TRL has: key of the report, value and code."""
        self.condition = ""
        """That under which the script makes the trainer."""
        self._accounted: set[ast.AST] = set()
        """Code that is in the report."""
        self._parts: dict[int, str] = {}
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
            text = f"{self.file.name} {stopped}; write what is missing"
            self.report.add_to_do("training", text, ALL_SECTIONS)
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
        inside = rows_of(value) if meant == "rows" else reachable(value)
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
    def node_of(made: Value, name: Any) -> ast.AST:
        """Return the code of an argument of a call, or of an item of a mapping."""
        call = made.node
        nodes: list[ast.expr] = []
        if isinstance(call, ast.Call):
            nodes = [
                each.value for each in call.keywords if each.arg == (name if name != "**" else None)
            ]
            nodes += call.args[int(name) : int(name) + 1] if str(name).isdigit() else []
        elif isinstance(call, ast.Dict):
            pairs = zip(call.keys, call.values, strict=True)
            nodes = [value for key, value in pairs if getattr(key, "value", call) == name]
        items: Any = made.data if isinstance(made, Literal) else getattr(made, "args", None)
        return nodes[0] if len(nodes) == 1 else items[name].node

    def changes_of(self, owners: Collection[Value]) -> Bound:
        """Return what is set on objects after they were made, all of which the caller takes."""
        bound: Bound = {}
        for change in self.evaluator.assignments:
            owner, key = change.owner, change.key
            # Items are those of `vars(config)`.
            name = key[1] if isinstance(key, tuple) else key
            if owner in owners and isinstance(owner, Object) and isinstance(name, str):
                self.account(change.node)
                is_lost = change.condition and key not in owner.attrs
                after = Object(change.node) if is_lost else owner.attrs[key]
                at_call = isinstance(change.node, ast.Call)
                bound[name] = (after, after.node if at_call else change.node)
        return bound

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

    def place(self, node: ast.AST) -> Location:
        """Return where code is written."""
        if isinstance(place := getattr(node, "place", None), Location):
            return place
        line, name = line_of(node), str(self.file)
        if starts := [start for start in self._cells if start <= line]:
            line, name = line - starts[-1] + 1, f"{name}, code cell {len(starts)}"
        return Location(name, line, getattr(node, "col_offset", 0) + 1)

    def locate(self, node: ast.AST) -> str:
        """Return the file and line of code, such as `train.py:12`."""
        place = self.place(node)
        return f"{Path(place.source).name}:{place.line}"

    def line_of(self, node: ast.AST) -> str:
        """Return the line of code, such as `line 12`, or `code cell 3:12` in a notebook."""
        text = self.locate(node)
        return text.rpartition(", ")[2] if self._cells else f"line {text.rpartition(':')[2]}"

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

    def drop_all(self, prefix: str, bound: Bound, reason: str) -> None:
        """Record arguments of a call without a counterpart in a recipe."""
        for name, (_, node) in bound.items():
            self.drop(f"{prefix}.{name}", node, reason)

    def take_all(
        self,
        prefix: str,
        bound: Bound,
        table: str,
        other: str = "",
        keep: Mapping[str, str] | None = None,
        home: str = "",
    ) -> None:
        """Take arguments of a call by a part of `keys.yaml`: a key of the config or the recipe, or a reason.

        Those that the table does not have go to the section `home`, are dropped for the reason `other`, or stay
        in `bound`.
        """
        reasons, keep = by_key(read_keys(table)["drop"]), keep or read_keys(table).get("keep", {})
        for name, reason in by_key(read_keys(table).get("if-on", {})).items():
            reasons[name] = OFF if name in bound and plain(bound[name][0]) is False else reason
        for name, (value, node) in [*bound.items()]:
            data, key = plain(value), keep.get(name)
            if key is None and home and name not in reasons:
                key = f"{home}.{name}"
            if key is None and not (reasons.get(name) or other):
                continue
            del bound[name]
            if data is None and key is not None:
                self.drop(f"{prefix}.{name}", node, "`None`, so the default applies")
            elif key is None:
                self.drop(f"{prefix}.{name}", node, reasons.get(name, other))
            elif data is MISSING:
                self.leave(find_target(key) or key, value, node)
            elif "." in key:
                self.write(key, f"{prefix}.{name}", data, node)
            else:
                self.put(key, data, node)

    def write(self, target: str, key: str, data: Any, node: ast.AST) -> None:
        """Write a key of the recipe that no config of TRL has."""
        self.account(node)
        self.extra[target] = (key, data, node)

    def leave(
        self,
        target: str,
        value: Value | None,
        node: ast.AST,
        fix: str = "write its value",
        *,
        unread: Collection[str] = (),
    ) -> None:
        """Leave a key of the recipe to the user, with the code that computes it and its default."""
        self.account(node, inside=value is None)
        default = default_of(value)
        if (
            isinstance(value, Choice)
            and isinstance(node, ast.stmt)
            and not isinstance(node, ast.Assign)
        ):
            node = next(each.node for each in value.parts if not Choice.is_unset(each))
        if isinstance(value, Choice):
            self._accounted.update(each.node for each in value.parts)
        target = target.removesuffix(".**").removesuffix(".*")
        example = ""
        about = describe(value, node) if plain(value) is MISSING else ""
        if default is not MISSING and default is not None and ("." in target or target == "seed"):
            if target == "generation.backend":
                default = "vllm" if default else "transformers"
            example = f"\n{write_value(target.rpartition('.')[2], default)}"
            self.report.defaults[target] = default
        text = f"{self.locate(node)} has `{code_of(node)}`{about}; {fix}{example}"
        self.report.add_to_do(target, text, unread)

    # What is left.

    def sweep(self, bound: Bound) -> None:
        """Name every argument, assignment and method call that is not in the report.

        These are the ones on the training's objects, and those that have the name of a setting.
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
                root = root_of(made)
                is_other = isinstance(root, Object) and kind_of(root) == "model" and bool(bound)
                is_other = is_other and not {id(each) for each in reachable(root)} & reached
                self._sweep_method(made, role, NOT_REACHED * is_other)
            elif not {made.name.partition(".")[0], made.last_name} & harmless:
                self._sweep_call(made, id(made) in reached)
        left = [each for each in self.evaluator.assignments if each.node not in self._accounted]
        for change in {(each.node, each.name): each for each in left}.values():
            is_variable = getattr(change.owner, "name", "") == "os.environ"
            role = "environment" if is_variable else self._find_role(change.owner)
            if role:
                self._sweep_assignment(change, role)
        for made, role in parts:
            self._sweep_arguments(made, role, id(made) in reached)
        self._sweep_unread()

    def name_part(self, value: Value, role: str) -> None:
        """Record the role of what a function that is not read returns, and of the tokenizer beside a model."""
        if not role_of(value):
            self._parts[id(value)] = role
        if role == "model" and is_item(value) and isinstance(owner := root_of(value), Object):
            self._parts.setdefault(id(owner.attrs.get(("item", 1))), "tokenizer")

    def _find_role(self, value: Value | None) -> str:
        """Return the role of a value, which the trainer may get from a function that is not read."""
        role = role_of(value)
        while not role and isinstance(value, Object):
            role, value = self._parts.get(id(value), ""), value.owner
        return role

    def when(self, made: Object) -> str:
        """Return the condition under which a call happens if the trainer is made; empty if it always does."""
        condition, outer = made.condition, self.condition
        if f"{outer} and ".startswith(f"{condition} and "):
            return ""
        return condition.removeprefix(f"{outer} and ")

    def leave_change(self, made: Object) -> None:
        """Leave what a function does to the config to the user."""
        fix = "it may change the config; write what it changes"
        self.leave("training", None, made.node, fix, unread=OF_CONFIG)

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
        reason = NOT_REACHED
        if is_reached:
            when = self.when(made)
            reason = "part of a value that is left to write"
            reason = f"{reason}, {describe_test(when)}" if when else reason
        if role in ("trainer", "config"):
            reason = f"of another {role}, or of one that GRPOTrainer is not known to get"
        if made.cls is not None and is_reached:
            reason = f"an argument of the script's own {role}; what that sets is taken"
        if role == "tokenizer":
            reason = "the tokenizer is that of `model.path`"
        code = code_of(made.node, 10**6)
        is_unnamed = role == "model" and not is_reached and made.node not in self._accounted
        if (left and len(left) == len(bound) and len(code) <= 100) or (is_unnamed and not left):
            self.drop(code_of(made.node, 100), made.node, reason)
        else:
            for name, (_, node) in left.items():
                name = f"({code_of(node)})" if name.isdigit() else f".{name}"
                self.drop(f"{made.cls.name if made.cls else made.last_name}{name}", node, reason)

    def _sweep_method(self, made: Object, role: str, other: str) -> None:
        name, code = made.last_name, code_of_call(made)
        if made.name in (
            *NAMES["methods"],
            "items",
            "keys",
            "values",
            "item",
            "tolist",
            "copy",
            "append",
        ):
            return  # of a result
        if role == "trainer" and name == "train" and not made.args:
            self.put(code, None, made.node)
            self.report.settle((code,), "training", "what `grpo train` does")
            return
        reasons = by_key(read_keys(f"script-{role}-calls"))
        if role == "config" and name not in reasons:
            self.leave_change(made)
        else:
            reason = other or reasons.get(name, "recipes have no such step")
            self.drop(code, made.node, reason)

    def _sweep_call(self, made: Object, is_reached: bool) -> None:
        """Name a call that gets a part of the training, and may change it."""
        objects = [each for each in (made.args or {}).values() if isinstance(each, Object)]
        roles = [(self._find_role(each), each) for each in objects]
        # What a tokenizer makes of a text is not the tokenizer.
        touched = [
            role
            for role, each in roles
            if role == "model"
            or (role == "tokenizer" and (is_item(each) or each is root_of(each)))
            or (role == "trainer" and each is root_of(each))
        ]
        if is_reached:
            return
        if any(kind_of(each) == "config" for each in objects):
            self.leave_change(made)
        elif not touched:
            return
        else:
            reason = f"gets the {touched[0]}, and may change it; its code is not read"
            reason = by_key(read_keys("script-calls")).get(made.last_name, reason)
            self.drop(code_of_call(made), made.node, reason)

    def _sweep_assignment(self, change: Assignment, role: str) -> None:
        reasons = by_key(read_keys("script-assignments"))
        reason = reasons.get(change.name, f"recipes do not set this on the {role}")
        reason = read_keys("script-role-assignments").get(role, reason)
        target = change.node.targets[0] if isinstance(change.node, ast.Assign) else change.node
        if isinstance(target, ast.Tuple | ast.List):
            named = [each for each in target.elts if getattr(each, "attr", "") == change.name]
            target = named[0] if named else target
        where = f" ({describe_test(change.condition)})" if change.condition else ""
        value = change.value.node
        value = getattr(change.node, "value", value) if isinstance(value, ast.stmt) else value
        self.drop(f"{code_of(target)} = {code_of(value)}{where}", change.node, reason)

    def _sweep_unread(self) -> None:
        """Name parts of a training in code that was not read, and settings that reach nothing that was."""
        values = self.evaluator.values
        for node in self.nodes:
            name = code_of(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if node not in values and kind_of(Object(node, name, args={name: Object(node)})):
                self.drop(code_of(node, 240), node, "not read: no way to this code was followed")
            if any(isinstance(each, Object) and each.is_call for each in values.get(node, ())):
                continue  # of another part, which is named
            for setting, value in list_settings(node):
                # What is computed may be a record of the training.
                data = [default_of(each) for each in values.get(value, ())]
                is_known = isinstance(value, ast.Constant) or {*map(id, data)} - {id(MISSING)}
                if is_known and not self.is_accounted(value):
                    self.drop(f"{setting} = {code_of(value)}", value, NOT_REACHED)
