"""A Python script that trains with TRL, as the config that `trl grpo` would read.

The script is parsed, never run: literals, and names bound to one once, are read; the rest is left to a person.
Source: trl 1.16 (`GRPOTrainer.__init__`, `GRPOConfig`), peft 0.21 (`LoraConfig`), datasets 5 (`load_dataset`).
"""

import ast
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath

from grpo_cli.convert.key_report import KeyReport, read_keys
from grpo_cli.convert.shared_keys import INIT_KWARGS, LORA_ARGUMENTS, TRL_REWARDS, Reward, name_file
from grpo_cli.convert.trl import BUILDERS, NO_DATASET, PROMPT_EXAMPLE
from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue, Location
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.lora_fields import REFUSED
from grpo_cli.recipe.yaml_tree import Node

_CALLS = ("GRPOConfig", "LoraConfig", "GRPOTrainer", "load_dataset")
_TRAINER = (
    "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes "
    "callbacks optimizers quantization_config peft_config tools rollout_func environment_factory"
).split()
"""Parameters of `GRPOTrainer`, in their order."""
_EPISODES = {"tools": ("tools", "function"), "environment_factory": ("environment", "python")}
"""Parameters of `GRPOTrainer` that are entries of a recipe's list, and their kind there."""
_NOT_TAKEN = {*_TRAINER[5:9], "rollout_func"}
_LORA_DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of `LoraConfig`; those of `trl grpo` and of recipes are others."""
_LOAD_DATASET = ("path", "name", "data_dir", "data_files", "split")
_DATASET = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
_OVERLONG = ("max_completion_len", "soft_punish_cache")
_CONTAINERS = (ast.List, ast.Dict, ast.Set)
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)
_SYMBOLS = ("torch.float32", "torch.bfloat16", "torch.float16", "TaskType.CAUSAL_LM")
"""Attributes that a config names by a text."""
_Binding = ast.expr | ast.stmt | str
"""What a name is bound to: an expression, a function, or the dotted name of an import."""


class _Names:
    """What the names of a script stand for; a name that is bound twice, anywhere, is not followed."""

    def __init__(self, module: ast.Module, source: str) -> None:
        self._source = source
        self.nodes = list(ast.walk(module))
        self.bindings: dict[str, list[_Binding]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._changed: set[str] = set()
        branches = [each for each in self.nodes if isinstance(each, _BRANCHES)]
        uncertain = {node for each in branches if not _is_main(each) for node in ast.walk(each)}
        for node in self.nodes:
            self._counts.update(_list_bound(node))
            if node not in uncertain:
                for name, value in _read_bindings(node):
                    self.bindings[name].append(value)
            match node:
                case (
                    ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                    | ast.Call(func=ast.Attribute(value=ast.Name(id=name)))
                ):
                    self._changed.add(name)

    def calls(self, name: str) -> list[ast.Call]:
        """Return the calls of a function, by its own name."""
        return [each for each in self.nodes if isinstance(each, ast.Call) and _callee(each) == name]

    def binding(self, node: ast.expr) -> _Binding | None:
        """Return what a name is bound to; None if that is not certain."""
        if not isinstance(node, ast.Name) or self._counts[node.id] != 1:
            return None
        return next(iter(self.bindings[node.id]), None)

    def follow(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name stands for, or the last one that is certain."""
        for _ in range(20):
            bound = self.binding(node)
            is_changed = isinstance(node, ast.Name) and node.id in self._changed
            if not isinstance(bound, ast.expr) or (is_changed and isinstance(bound, _CONTAINERS)):
                break
            node = bound
        return node

    def imported(self, node: ast.expr) -> str:
        """Return the dotted name of an import, or empty text: `trl.rewards.accuracy_reward`."""
        if isinstance(node, ast.Attribute):
            parent = self.imported(node.value)
            return f"{parent}.{node.attr}" if parent else ""
        bound = self.binding(node)
        return bound if isinstance(bound, str) else ""

    def locate(self, node: ast.AST) -> Location:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        return Location(self._source, line, column + 1)

    def literal(self, node: ast.expr | None) -> Node | None:
        """Return the value of a literal, or of a name that stands for one, with its place; or None."""
        if node is None:
            return None
        node = self.follow(node)
        where = self.locate(node)
        match node:
            case ast.Constant(value=None | str() | int() | float()):
                return Node(node.value, where)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return Node(-number, where)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                values = [self.literal(item) for item in items]
                return None if None in values else Node(values, where)
            case ast.Dict():
                names = [getattr(key, "value", None) for key in node.keys]
                values = [self.literal(item) for item in node.values]
                known = None not in values and all(isinstance(name, str) for name in names)
                return Node(dict(zip(names, values, strict=True)), where) if known else None
            case ast.Attribute() if ast.unparse(node) in _SYMBOLS:
                return Node(node.attr, where)
        return None


def _list_bound(node: ast.AST) -> list[str]:
    """Return the names that a node binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return names
    is_import = isinstance(node, ast.Import | ast.ImportFrom)
    return [name for name, _ in _read_bindings(node)] if is_import else []


def _read_bindings(node: ast.AST) -> Iterator[tuple[str, _Binding]]:
    """Yield the names that a node binds to something that is known, and to what."""
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
        ):
            yield name, value
        case ast.Import(names=aliases):
            for alias in aliases:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or whole, whole
        case ast.ImportFrom(names=aliases):
            for alias in aliases:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name, node


def _is_main(node: ast.AST) -> bool:
    """Return whether a statement is `if __name__ == "__main__":`."""
    test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
    return test in ("__name__ == '__main__'", "'__main__' == __name__")


def _callee(node: ast.AST | None) -> str:
    """Return the name of what is called, without its module or object; empty if nothing is."""
    function = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", None) or getattr(function, "id", ""))


def _code(node: ast.AST, longest: int = 60) -> str:
    code = " ".join(ast.unparse(node).split())
    return code if len(code) <= longest else f"{code[: longest - 3]}…"


def read_script(text: str, source: FilePath, folder: FilePath) -> "Script":
    """Read a script's calls of `GRPOConfig`, `LoraConfig`, `GRPOTrainer` and `load_dataset`.

    Paths of rewards will be relative to `folder`, the recipe's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
        return Script(module, source, folder)
    except (SyntaxError, RecursionError, ValueError) as error:
        where = Location(str(source), getattr(error, "lineno", None) or 1, 1)
        message = f"is not Python that can be read: {getattr(error, 'msg', None) or error}"
        raise RecipeError([Issue(message, "correct that line", location=where)]) from None


class Script:
    """A script's calls as a config of `trl grpo`, with what is dropped and what is left to a person."""

    def __init__(self, module: ast.Module, source: FilePath, folder: FilePath) -> None:
        self._file = source
        self._path = name_file(source.resolve(), folder)
        self._module = module
        self._names = _Names(module, str(source))
        self.report = KeyReport(Node({}, Location(str(source), 1, 1)), "TRL")
        self.rewards: dict[str, Reward] = {}
        """Rewards that a config cannot name."""
        self.signs = tuple(f"{name}(…)" for name in _CALLS if self._names.calls(name))
        self._read()

    def _read(self) -> None:
        trainers = self._names.calls("GRPOTrainer")
        arguments = self._bind(trainers[0], _TRAINER) if trainers else {}
        config = self._choose("GRPOConfig", arguments.get("args"), alone=True)
        if len(trainers) > 1:
            lines = ", ".join(str(call.lineno) for call in trainers)
            raise self._refuse(f"calls GRPOTrainer {len(trainers)} times (lines {lines})")
        if not trainers and config is None:
            raise self._refuse("calls neither GRPOTrainer nor GRPOConfig")
        if config is not None:
            self._take_config(config)
        elif "args" in arguments:
            self._leave("training", arguments["args"], "make it in the script, or write its values")
        lora = self._choose("LoraConfig", arguments.get("peft_config"), alone=not trainers)
        if lora is not None:
            self._take_lora(lora)
        elif "peft_config" in arguments:
            self._leave("model.lora", arguments["peft_config"])
        if trainers:
            self._take_trainer(trainers[0], arguments)

    def _refuse(self, message: str) -> RecipeError:
        fix = "name a script that makes one GRPOTrainer, or the YAML that it reads"
        return RecipeError([Issue(message, fix, location=self.report.tree.location)])

    def _choose(self, name: str, argument: ast.expr | None, *, alone: bool) -> ast.Call | None:
        """Return the call that an argument stands for, or else the script's only one."""
        calls = self._names.calls(name)
        meant = self._names.follow(argument) if argument is not None else None
        calls = [call for call in calls if call is meant] or calls
        return calls[0] if len(calls) == 1 and (argument is not None or alone) else None

    def _bind(self, call: ast.Call, parameters: Sequence[str]) -> dict[str, ast.expr]:
        """Return the arguments of a call by name; `**` holds those that are not known."""
        arguments = dict(zip(parameters, call.args, strict=False))
        for keyword in call.keywords:
            inner = self._names.follow(keyword.value)
            if keyword.arg is None and isinstance(inner, ast.Dict) and self._names.literal(inner):
                names = [getattr(key, "value", "") for key in inner.keys]
                arguments |= dict(zip(names, inner.values, strict=True))
            else:
                arguments[keyword.arg or "**"] = keyword.value
        return arguments

    def _put(self, key: str, literal: Node | None, at: ast.AST) -> None:
        where = self._names.locate(at)
        self.report.tree.value[key] = literal or Node(None, where)
        self.report.tree.key_locations[key] = where

    def _drop(self, key: str, at: ast.AST, reason: str) -> None:
        self._put(key, None, at)
        self.report.drop((key,), reason)

    def _leave(self, target: str, value: ast.expr, fix: str = "write its value") -> None:
        """Leave a key of the recipe to a person, with the code that computes it."""
        self._add_to_do(target, f"{self._file.name}:{value.lineno} has `{_code(value)}`; {fix}")

    def _add_to_do(self, target: str, text: str) -> None:
        before = self.report.to_do.get(target)
        self.report.to_do[target] = f"{before}. {text}" if before else text

    def _take_arguments(
        self, arguments: dict[str, ast.expr], keys: Mapping[str, str], target: str
    ) -> None:
        """Take literals by their names in TRL's config, and leave other values to a person."""
        for name, value in arguments.items():
            literal = self._names.literal(value)
            if literal is None or name not in keys:
                self._leave(f"{target}.{name}".removesuffix(".**"), value)
            else:
                self._put(keys[name], literal, value)

    def _take_config(self, call: ast.Call) -> None:
        changes = dict(self._find_changes(call))
        bound = self._bind(call, ("output_dir",))
        arguments: dict[str, ast.expr | ast.stmt] = {**bound, **changes}
        for name, value in arguments.items():
            literal = self._names.literal(value) if isinstance(value, ast.expr) else None
            target = _find_target(name)
            if literal is not None or target is None:
                self._put(name, literal, value)
            elif isinstance(value, ast.expr):
                self._leave(target, value)
            else:
                text = f"{value.lineno} sets it later: `{ast.unparse(value)}`"
                self._add_to_do(target, f"{self._file.name}:{text}")

    def _find_changes(self, call: ast.Call) -> Iterator[tuple[str, ast.stmt]]:
        """Yield the attributes of an object that the script sets after making it."""
        for node in self._names.nodes:
            match node:
                case (
                    ast.Assign(targets=[ast.Attribute() as target])
                    | ast.AugAssign(target=ast.Attribute() as target)
                ) if self._names.follow(target.value) is call:
                    yield target.attr, node

    def _take_lora(self, call: ast.Call) -> None:
        arguments, where = self._bind(call, ()), self._names.locate(call)
        self._put("use_peft", Node(True, where), call)
        for name in _LORA_DEFAULTS.keys() - arguments.keys():
            self._put(LORA_ARGUMENTS[name], Node(_LORA_DEFAULTS[name], where), call)
        for name in arguments.keys() - {*LORA_ARGUMENTS, "**"}:
            reason = REFUSED.get(name, "unknown to peft").removeprefix("remove it: ")
            self._drop(f"LoraConfig.{name}", arguments.pop(name), reason)
        self._take_arguments(arguments, LORA_ARGUMENTS, "model.lora")

    def _take_trainer(self, trainer: ast.Call, arguments: dict[str, ast.expr]) -> None:
        if "model" in arguments:
            self._take_model(arguments["model"])
        if "reward_funcs" in arguments:
            self._take_rewards(trainer, arguments["reward_funcs"])
        if (value := arguments.get("quantization_config")) is not None:
            self._leave("model.quantization", value, "write 4bit or 8bit")
        if "train_dataset" in arguments:
            self._take_rows(arguments["train_dataset"], arguments.get("eval_dataset"))
        for name, value in arguments.items():
            if ast.unparse(value) == "None":
                continue
            if name in _EPISODES:
                self._leave_episodes(*_EPISODES[name], value)
            elif name in _NOT_TAKEN:
                reason = "a recipe takes no objects; it names models, rewards and optimizers"
                self._drop(f"GRPOTrainer.{name}", value, reason)

    def _leave_episodes(self, key: str, kind: str, value: ast.expr) -> None:
        listed = self._names.follow(value)
        names = map(_code, listed.elts if isinstance(listed, ast.List | ast.Tuple) else [value])
        entries = ", ".join(f'{{kind: {kind}, path: "{self._path}:{each}"}}' for each in names)
        self._leave(key, value, f"write [{entries}], each with its own file")

    def _take_model(self, value: ast.expr) -> None:
        made = self._names.follow(value)
        if isinstance(made, ast.Call) and _callee(made) in ("to", "cuda"):
            made = self._names.follow(getattr(made.func, "value", made))
        if self._names.literal(value) is not None:
            self._put("model_name_or_path", self._names.literal(value), value)
        elif isinstance(made, ast.Call) and _code(made.func).endswith("PeftModel.from_pretrained"):
            arguments = self._bind(made, ("model", "model_id"))
            self._put("lora_model_dir", self._names.literal(arguments["model_id"]), made)
            self._take_model(arguments["model"])
        elif isinstance(made, ast.Call) and _callee(made) == "from_pretrained":
            self._take_pretrained(made)
        else:
            self._leave("model.path", value, "name the model")

    def _take_pretrained(self, call: ast.Call) -> None:
        """Take `AutoModelForCausalLM.from_pretrained(…)`; its default precision is the checkpoint's."""
        literals = Node({}, self._names.locate(call))
        arguments = self._bind(call, ("pretrained_model_name_or_path",))
        self._take_model(arguments.pop("pretrained_model_name_or_path", call.func))
        if not {"dtype", "torch_dtype"} & arguments.keys():
            self._put("dtype", Node("auto", literals.location), call)
        for name, value in arguments.items():
            literal = self._names.literal(value)
            if name == "device_map":
                self._drop("from_pretrained.device_map", value, "the launcher places the model")
            elif name == "quantization_config":
                self._leave("model.quantization", value, "write 4bit or 8bit")
            elif literal is None:
                self._leave(INIT_KWARGS.get(name, f"model.init_kwargs.{name}"), value)
            else:
                literals.value[name] = literal
        if literals.value:
            self._put("model_init_kwargs", literals, call)

    def _take_rewards(self, trainer: ast.Call, value: ast.expr) -> None:
        listed = self._names.follow(value)
        items = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [value]
        entries = [Node(self._name_reward(item), self._names.locate(item)) for item in items]
        self._put("reward_funcs", Node(entries, self._names.locate(value)), value)
        is_own = any(self._names.binding(item) in self._module.body for item in items)
        if is_own and self._runs_on_import(trainer):
            self._add_to_do(
                "rewards",
                f"importing {self._file.name} for its rewards would train (line {trainer.lineno}); put "
                'that under `if __name__ == "__main__":`, or the rewards into another file',
            )

    def _runs_on_import(self, call: ast.Call) -> bool:
        """Return whether importing the script reaches a call, or calls the function that holds it."""
        body = [each for each in self._module.body if not _is_main(each)]
        holders = [each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        reached = [node for each in body if each not in holders for node in ast.walk(each)]
        called = {_callee(node) for node in reached}
        holders = [each for each in holders if each.name in called]
        return call in reached or any(call in ast.walk(each) for each in holders)

    def _name_reward(self, item: ast.expr) -> str:
        """Return the name that a config gives a reward, or its code and an entry in the table."""
        literal, path = self._names.literal(item), self._names.imported(item)
        package, _, name = path.rpartition(".")
        if literal is not None and isinstance(literal.value, str):
            return literal.value
        if package.partition(".")[0] == "trl" and name in TRL_REWARDS:
            return name
        if package and package.partition(".")[0] != "trl":
            return path
        self.rewards[_code(item)] = self._define_reward(item)
        return _code(item)

    def _define_reward(self, item: ast.expr) -> Reward:
        function, made = self._names.binding(item), self._names.follow(item)
        if isinstance(function, ast.stmt) and function in self._module.body:
            note = (
                'importing the script must not train: keep that under `if __name__ == "__main__":`'
            )
            entry = {"kind": "python", "path": f"{self._path}:{_code(item)}"}
            return Reward(entry, "" if self.rewards else note)
        if isinstance(made, ast.Call) and _callee(made) == "get_soft_overlong_punishment":
            arguments = self._bind(made, _OVERLONG)
            longest, cache = (self._names.literal(arguments.get(name)) for name in _OVERLONG)
            if longest is not None and cache is not None:
                lengths = {"max_length": longest.value, "cache": cache.value}
                return Reward({"kind": "soft_overlong", **lengths})
        fix = "write it as a function at the top level, `{kind: python, path: FILE.py:NAME}`"
        self._leave("rewards", item, fix)
        return Reward(None, "is no function at the top level of the script")

    def _take_rows(self, train: ast.expr, held_out: ast.expr | None) -> None:
        call, split, changes = self._trace_rows(train)
        calls = self._names.calls("load_dataset")
        if call is None and len(calls) == 1:
            # Made by a function of the script, which may do anything with the rows.
            call, changes = calls[0], [train]
        if call is None:
            self._leave("dataset", train, NO_DATASET)
            return
        self._take_source(call, split)
        if changes:
            lines = ", ".join(dict.fromkeys(str(change.lineno) for change in changes))
            self.report.to_do["dataset.prompt"] = (
                f"{self._file.name} changes the rows (line {lines}: `{_code(changes[0])}`); write "
                f"what it makes of a row, as Jinja over its columns\n{PROMPT_EXAMPLE}"
            )
        if held_out is not None:
            self._take_held_out(held_out, call)

    def _trace_rows(
        self, value: ast.expr, seen: tuple[str, ...] = ()
    ) -> tuple[ast.Call | None, ast.expr | None, list[ast.expr]]:
        """Follow rows back to `load_dataset`: return the call, the split, and what changes the rows."""
        value = self._names.follow(value)
        if isinstance(value, ast.Subscript):
            call, _, changes = self._trace_rows(value.value, seen)
            return call, value.slice, changes
        if isinstance(value, ast.Call) and _callee(value) == "load_dataset":
            return value, None, []
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            call, split, changes = self._trace_rows(value.func.value, seen)
            return call, split, [*changes, value]
        if not isinstance(value, ast.Name) or value.id in seen:
            return None, None, []
        # Bound several times, as in `rows = rows.map(…)`.
        bound = [each for each in self._names.bindings[value.id] if isinstance(each, ast.expr)]
        traces = [self._trace_rows(each, (*seen, value.id)) for each in bound]
        call, split = next((trace[:2] for trace in traces if trace[0] is not None), (None, None))
        return call, split, [change for trace in traces for change in trace[2]]

    def _take_source(self, call: ast.Call, split: ast.expr | None) -> None:
        arguments = self._bind(call, _LOAD_DATASET) | ({"split": split} if split else {})
        literals = {name: self._names.literal(value) for name, value in arguments.items()}
        path, files = literals.get("path"), literals.get("data_files")
        if path is None:
            self._leave("dataset", call, NO_DATASET)
        elif path.value in BUILDERS and files is not None:
            first = Node({"path": path, "data_files": files}, path.location)
            self._put("datasets", Node([first], first.location), call)
        else:
            values = {name: node.value for name, node in literals.items() if node is not None}
            written = {
                name: arguments[name] for name in arguments if values.get(name, "") is not None
            }
            keys = {
                name: key for name, key in _DATASET.items() if isinstance(values.get(name), str)
            }
            self._take_arguments(written, keys, "dataset")

    def _take_held_out(self, value: ast.expr, train: ast.Call) -> None:
        call, split, _ = self._trace_rows(value)
        if call is not None and split is None:
            split = self._bind(call, _LOAD_DATASET).get("split")
        literal = self._names.literal(split)
        is_same = call is not None and [*map(ast.dump, call.args[:1])] == [
            *map(ast.dump, train.args[:1])
        ]
        if literal is None or not is_same or "datasets" in self.report.tree.value:
            self._leave("dataset.eval_split", value, "say which rows are held out")
        else:
            self._put("dataset_test_split", literal, value)


def _find_target(name: str) -> str | None:
    """Return the recipe's key for a field of `GRPOConfig`, or None."""
    today = grpo_fields.RENAMED.get(name, name)
    is_field = today in grpo_fields.read_grpo_fields() and grpo_fields.home_of(today) is not None
    return read_keys("script-targets").get(today) or (
        grpo_fields.key_in_home(today) if is_field else None
    )
