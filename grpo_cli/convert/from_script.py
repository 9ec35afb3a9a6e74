"""A Python script that trains with TRL as the config that `trl grpo` would read, and what is left to a person.

The script is parsed, never run. Literals are read; what the script computes becomes a line to do.
Source: `GRPOTrainer.__init__` and `GRPOConfig` of trl 1.16, `LoraConfig` of peft 0.21, `load_dataset` of
datasets 5.
"""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath

from grpo_cli.convert.from_trl import BUILDERS, PROMPT_EXAMPLE
from grpo_cli.convert.rewards import Table, Translated, name_file, trl_rewards
from grpo_cli.convert.script_names import ScriptNames
from grpo_cli.convert.weights import INIT_KWARGS, LORA_NAMES
from grpo_cli.errors import Location, Problem, RecipeError
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.yaml_tree import Node

_TRAINER = (
    "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes "
    "callbacks optimizers quantization_config peft_config tools rollout_func environment_factory"
).split()
"""Parameters of `GRPOTrainer`, in their order."""
_NOT_TAKEN = {
    "processing_class": "a recipe loads the model's own tokenizer; `model.chat_template` changes its template",
    "reward_processing_classes": "a reward model is loaded with its own tokenizer",
    "callbacks": "a recipe takes no callbacks",
    "optimizers": "set `training.optim` and `training.lr_scheduler_type`",
    "tools": "recipes train without tools",
    "rollout_func": "recipes sample completions themselves",
    "environment_factory": "recipes train without environments",
}
_LORA_DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of `LoraConfig`; those of `trl grpo` and of recipes are others."""
_LOAD_DATASET = ("path", "name", "data_dir", "data_files", "split")
_TARGETS = {
    "seed": "seed",
    "model_init_kwargs": "model.init_kwargs",
    "trust_remote_code": "model.trust_remote_code",
    "reward_weights": "rewards",
    "use_vllm": "generation.backend",
    "use_transformers_continuous_batching": "generation.backend",
    "use_cpu": "launch.use_cpu",
    "deepspeed": "launch.strategy",
    "fsdp": "launch.strategy",
    "fsdp_config": "launch.strategy",
    "max_prompt_length": "dataset.max_prompt_length",
    "warmup_ratio": "training.warmup_steps",
}
"""Where a recipe says what `GRPOConfig` says with a field that has no home of its own."""


@dataclass
class Script:
    """What was read of a script."""

    tree: Node
    """As a config of `trl grpo`."""
    signs: list[str] = field(default_factory=list)
    """The calls that tell what it is."""
    rewards: Table = field(default_factory=dict)
    """Rewards that a config cannot name."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Key of the tree → why a recipe has no place for it."""
    to_do: dict[str, str] = field(default_factory=dict)
    """Dotted key of the recipe → what the script computes there."""


def read_script(text: str, source: FilePath, folder: FilePath) -> Script:
    """Read a script's calls of `GRPOConfig`, `LoraConfig`, `GRPOTrainer` and `load_dataset`.

    Args:
        text: The script.
        source: Its file.
        folder: The recipe's folder, which paths of rewards are relative to.

    Raises:
        RecipeError: It is not Python, or none of these calls, or several trainers, are in it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
        return _Reader(module, source, folder).read()
    except (SyntaxError, RecursionError, ValueError) as error:
        where = Location(str(source), getattr(error, "lineno", None) or 1, 1)
        message = f"is not Python that can be read: {getattr(error, 'msg', None) or error}"
        raise RecipeError([Problem(message, "correct that line", location=where)]) from None


class _Reader:
    """Takes a script apart, call by call."""

    def __init__(self, module: ast.Module, source: FilePath, folder: FilePath) -> None:
        self._file = source
        self._path = name_file(source.resolve(), folder)
        self._names = ScriptNames(module, str(source))
        self._module = module
        self._script = Script(Node({}, Location(str(source), 1, 1)))

    def read(self) -> Script:
        """Read the trainer, what it is given, and the rest."""
        trainer = self._find_trainer()
        given = {} if trainer is None else dict(self._arguments(trainer, _TRAINER, "GRPOTrainer"))
        config = self._choose("GRPOConfig", given.get("args"), alone=True)
        if trainer is None and config is None:
            raise self._refuse("calls neither GRPOTrainer nor GRPOConfig")
        if config is not None:
            self._take_config(config)
        elif "args" in given:
            self._leave("training", given["args"], "make it in the script, or write its values")
        lora = self._choose("LoraConfig", given.get("peft_config"), alone=trainer is None)
        if lora is not None:
            self._take_lora(lora)
        elif "peft_config" in given:
            self._leave("model.lora", given["peft_config"])
        if trainer is not None:
            self._take_trainer(trainer, given)
        return self._script

    def _find_trainer(self) -> ast.Call | None:
        calls = self._calls("GRPOTrainer")
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            raise self._refuse(f"calls GRPOTrainer {len(calls)} times (lines {lines})")
        return calls[0] if calls else None

    def _refuse(self, message: str) -> RecipeError:
        fix = "name a script that makes one GRPOTrainer, or the YAML that it reads"
        return RecipeError([Problem(message, fix, location=self._script.tree.location)])

    def _calls(self, name: str) -> list[ast.Call]:
        nodes = ast.walk(self._module)
        return [node for node in nodes if isinstance(node, ast.Call) and _callee(node) == name]

    def _choose(self, name: str, given: ast.expr | None, *, alone: bool) -> ast.Call | None:
        """Return the call that an argument stands for; or else the only one, if there is an argument.

        Args:
            name: What is called.
            given: The argument, or None.
            alone: Whether the only call counts without an argument too.
        """
        meant = self._names.follow(given) if given is not None else None
        calls = self._calls(name)
        chosen = meant if meant in calls else calls[0] if len(calls) == 1 else None
        if not isinstance(chosen, ast.Call) or (given is None and not alone):
            return None
        self._script.signs.append(name)
        return chosen

    def _arguments(
        self, call: ast.Call, parameters: tuple[str, ...] | list[str], callee: str
    ) -> Iterator[tuple[str, ast.expr]]:
        for name, value in zip(parameters, call.args, strict=False):
            yield name, value
        for keyword in call.keywords:
            inner = self._names.follow(keyword.value) if keyword.arg is None else None
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
            elif isinstance(inner, ast.Dict) and self._names.read_literal(inner) is not None:
                for key, value in zip(inner.keys, inner.values, strict=True):
                    yield key.value, value  # type: ignore[union-attr]
            else:
                target = {"LoraConfig": "model.lora", "load_dataset": "dataset"}.get(callee)
                self._leave(target or "training", keyword.value, f"write what it gives {callee}")

    def _put(self, key: str, value: Node | None, at: ast.AST) -> None:
        """Put a key into the tree, with where it was written."""
        where = self._names.locate(at)
        self._script.tree.value[key] = value or Node(None, where)
        self._script.tree.key_locations[key] = where

    def _drop(self, key: str, at: ast.AST, reason: str) -> None:
        self._put(key, None, at)
        self._script.dropped[key] = reason

    def _leave(self, target: str, at: ast.expr, fix: str = "write its value") -> None:
        """Leave a key of the recipe to a person, saying which code stands for it."""
        code = " ".join(ast.unparse(at).split())
        code = code if len(code) <= 60 else f"{code[:57]}…"
        self._add_to_do(target, f"{self._file.name}:{at.lineno} has `{code}`; {fix}")

    def _add_to_do(self, target: str, text: str) -> None:
        before = self._script.to_do.get(target)
        self._script.to_do[target] = f"{before}. {text}" if before else text

    def _take_config(self, call: ast.Call) -> None:
        changed = dict(self._find_changes(call))
        for name, value in self._arguments(call, ("output_dir",), "GRPOConfig"):
            if name not in changed:
                self._take_field(name, value)
        for name, statement in changed.items():
            target = _find_target(name)
            if target is None:
                self._put(name, None, statement)
            else:
                code = ast.unparse(statement)
                self._add_to_do(
                    target, f"{self._file.name}:{statement.lineno} sets it later: `{code}`"
                )

    def _find_changes(self, call: ast.Call) -> Iterator[tuple[str, ast.Assign | ast.AugAssign]]:
        """The attributes of a config that the script sets after the call."""
        for node in ast.walk(self._module):
            match node:
                case (
                    ast.Assign(targets=[ast.Attribute() as target])
                    | ast.AugAssign(target=ast.Attribute() as target)
                ) if self._names.follow(target.value) is call:
                    yield target.attr, node

    def _take_field(self, name: str, value: ast.expr) -> None:
        literal = self._names.read_literal(value)
        target = _find_target(name)
        if literal is None and target is not None:
            self._leave(target, value)
        else:
            self._put(name, literal, value)

    def _take_lora(self, call: ast.Call) -> None:
        self._put("use_peft", Node(True, self._names.locate(call)), call)
        given = dict(self._arguments(call, (), "LoraConfig"))
        for name, default in _LORA_DEFAULTS.items():
            if name not in given:
                self._put(LORA_NAMES[name], Node(default, self._names.locate(call)), call)
        for name, value in given.items():
            literal = self._names.read_literal(value)
            if name == "task_type":
                self._put("lora_task_type", literal, value)
            elif name not in LORA_NAMES:
                off = literal is not None and literal.value in (None, False, "none")
                reason = "off, as in recipes" if off else f"recipes take {', '.join(LORA_NAMES)}"
                self._drop(f"LoraConfig.{name}", value, reason)
            elif literal is None:
                self._leave(f"model.lora.{name}", value)
            else:
                self._put(LORA_NAMES[name], literal, value)

    def _take_trainer(self, call: ast.Call, given: dict[str, ast.expr]) -> None:
        self._script.signs.append("GRPOTrainer")
        if "model" in given:
            self._take_model(given["model"])
        if "reward_funcs" in given:
            self._take_rewards(call, given["reward_funcs"])
        if "quantization_config" in given:
            self._leave("model.quantization", given["quantization_config"], "write 4bit or 8bit")
        self._take_rows(given.get("train_dataset"), given.get("eval_dataset"))
        for name, value in given.items():
            literal = self._names.read_literal(value)
            if name in _NOT_TAKEN and not (literal is not None and literal.value is None):
                self._drop(f"GRPOTrainer.{name}", value, _NOT_TAKEN[name])

    def _take_model(self, value: ast.expr) -> None:
        literal = self._names.read_literal(value)
        made = self._names.follow(value)
        if isinstance(made, ast.Call) and _callee(made) in ("to", "cuda"):
            made = self._names.follow(getattr(made.func, "value", made))
        if literal is not None:
            self._put("model_name_or_path", literal, value)
        elif not isinstance(made, ast.Call) or _callee(made) != "from_pretrained":
            self._leave("model.path", value, "name the model")
        else:
            self._take_pretrained(made)

    def _take_pretrained(self, call: ast.Call) -> None:
        """Take `AutoModelForCausalLM.from_pretrained(...)`; its precision is the checkpoint's by default."""
        kept = Node({}, self._names.locate(call))
        parameters = ("pretrained_model_name_or_path",)
        given = dict(self._arguments(call, parameters, "from_pretrained"))
        path = given.pop("pretrained_model_name_or_path", None)
        if path is None or self._names.read_literal(path) is None:
            self._leave("model.path", path or call, "name the model")
        else:
            self._put("model_name_or_path", self._names.read_literal(path), path)
        if not {"dtype", "torch_dtype"} & given.keys():
            self._put("dtype", Node("auto", kept.location), call)
        for name, value in given.items():
            literal = self._names.read_literal(value)
            if name == "device_map":
                self._drop("from_pretrained.device_map", value, "the launcher places the model")
            elif name == "quantization_config":
                self._leave("model.quantization", value, "write 4bit or 8bit")
            elif literal is None:
                self._leave(INIT_KWARGS.get(name, f"model.init_kwargs.{name}"), value)
            else:
                kept.value[name] = literal
                kept.key_locations[name] = self._names.locate(value)
        if kept.value:
            self._put("model_init_kwargs", kept, call)

    def _take_rewards(self, trainer: ast.Call, value: ast.expr) -> None:
        listed = self._names.follow(value)
        items = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [value]
        entries = [Node(self._name_reward(item), self._names.locate(item)) for item in items]
        self._put("reward_funcs", Node(entries, self._names.locate(value)), value)
        kinds = [(reward().entry or {}).get("kind") for reward in self._script.rewards.values()]
        if "python" in kinds and self._names.runs_on_import(trainer):
            self._add_to_do(
                "rewards",
                f"importing {self._file.name} for its rewards would train (line {trainer.lineno}); put that "
                'under `if __name__ == "__main__":`, or the rewards into a file of their own',
            )

    def _name_reward(self, item: ast.expr) -> str:
        """Return the name that a config gives a reward, with an entry in the table if it would not do there."""
        literal = self._names.read_literal(item)
        path = self._names.dotted_name(item)
        name = path.rpartition(".")[2] if path else ""
        if literal is not None and isinstance(literal.value, str):
            return literal.value
        if path and path.partition(".")[0] == "trl" and name in trl_rewards():
            return name
        if path and path.partition(".")[0] != "trl" and "." in path:
            return path
        return self._define_reward(item)

    def _define_reward(self, item: ast.expr) -> str:
        bound = self._names.binding(item) if isinstance(item, ast.Name) else None
        code = " ".join(ast.unparse(item).split())
        overlong = self._read_overlong(self._names.follow(item))
        if isinstance(item, ast.Name) and self._names.is_top_level(bound):
            note = (
                f"importing {self._file.name} must not start a training: keep that under "
                '`if __name__ == "__main__":`'
            )
            first = not self._script.rewards
            entry = {"kind": "python", "path": f"{self._path}:{item.id}"}
            translated = Translated(entry, note if first else "")
        elif overlong is not None:
            translated = Translated(overlong)
        else:
            fix = "write it as a function at the top level, `{kind: python, path: FILE.py:NAME}`"
            self._leave("rewards", item, fix)
            translated = Translated(None, "is no function at the top level of the script")
        self._script.rewards[code] = lambda: translated
        return code

    def _read_overlong(self, made: ast.expr) -> dict[str, object] | None:
        """Read TRL's one reward that a script makes by a call."""
        if not isinstance(made, ast.Call) or _callee(made) != "get_soft_overlong_punishment":
            return None
        parameters = ("max_completion_len", "soft_punish_cache")
        given = dict(self._arguments(made, parameters, "get_soft_overlong_punishment"))
        values = [self._names.read_literal(given[name]) for name in parameters if name in given]
        numbers = [node.value for node in values if node is not None]
        if len(numbers) != len(parameters):
            return None
        return {"kind": "soft_overlong", "max_length": numbers[0], "cache": numbers[1]}

    def _take_rows(self, train: ast.expr | None, held_out: ast.expr | None) -> None:
        if train is None:
            return
        call, split, changes = self._trace_rows(train, set())
        calls = self._calls("load_dataset")
        if call is None and len(calls) == 1:
            # Made by a function of the script, which may do anything with the rows.
            call, changes = calls[0], [train]
        if call is None:
            self._leave(
                "dataset", train, "say where the rows come from: `kind`, and `path` or `train`"
            )
            return
        self._script.signs.append("load_dataset")
        self._take_source(call, split)
        if changes:
            places = ", ".join(dict.fromkeys(str(change.lineno) for change in changes))
            code = " ".join(ast.unparse(changes[0]).split())
            self._script.to_do["dataset.prompt"] = (
                f"{self._file.name} changes the rows (line {places}: `{code[:60]}`); write what it makes of a "
                f"row, as Jinja over its columns\n{PROMPT_EXAMPLE}"
            )
        if held_out is not None:
            self._take_held_out(held_out, call)

    def _trace_rows(
        self, value: ast.expr, seen: set[str]
    ) -> tuple[ast.Call | None, ast.expr | None, list[ast.expr]]:
        """Follow rows back to `load_dataset`: the call, the split that is picked, and what changes rows."""
        value = self._names.follow(value)
        if isinstance(value, ast.Call) and _callee(value) == "load_dataset":
            return value, None, []
        if isinstance(value, ast.Subscript):
            call, _, changes = self._trace_rows(value.value, seen)
            return call, value.slice, changes
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            call, split, changes = self._trace_rows(value.func.value, seen)
            return call, split, [*changes, value]
        if not isinstance(value, ast.Name) or value.id in seen:
            return None, None, []
        # Bound again and again, as in `rows = rows.map(…)`.
        traces = [
            self._trace_rows(bound, {*seen, value.id})
            for bound in self._names.bindings(value)
            if isinstance(bound, ast.expr)
        ]
        changes = [change for *_, own in traces for change in own]
        call, split = next((trace[:2] for trace in traces if trace[0] is not None), (None, None))
        return call, split, changes

    def _take_source(self, call: ast.Call, split: ast.expr | None) -> None:
        given = dict(self._arguments(call, _LOAD_DATASET, "load_dataset"))
        if split is not None:
            given["split"] = split
        literals = {name: self._names.read_literal(value) for name, value in given.items()}
        path = literals.get("path")
        if path is None:
            self._leave(
                "dataset", call, "say where the rows come from: `kind`, and `path` or `train`"
            )
            return
        if path.value in BUILDERS and literals.get("data_files") is not None:
            known = {name: node for name, node in literals.items() if node and name != "data_dir"}
            places = {name: self._names.locate(given[name]) for name in known}
            first = Node(known, self._names.locate(call), places)
            self._put("datasets", Node([first], first.location), call)
            return
        keys = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        for name, value in given.items():
            literal = literals[name]
            if literal is not None and literal.value is None:
                continue
            if name in keys and literal is not None and isinstance(literal.value, str):
                self._put(keys[name], literal, value)
            elif name in ("name", "split", "revision", "data_dir", "data_files"):
                target = name if name in ("name", "split", "revision") else "path"
                self._leave(f"dataset.{target}", value)
            else:
                self._drop(f"load_dataset.{name}", value, "a recipe loads all rows in its own way")

    def _take_held_out(self, value: ast.expr, train: ast.Call) -> None:
        call, split, _ = self._trace_rows(value, set())
        source = [_read_path(each) for each in (call, train)]
        if call is not None and split is None:
            split = dict(self._arguments(call, _LOAD_DATASET, "load_dataset")).get("split")
        literal = None if split is None else self._names.read_literal(split)
        if literal is None or source[0] != source[1] or "datasets" in self._script.tree.value:
            self._leave("dataset.eval_split", value, "say which rows are held out")
        else:
            self._put("dataset_test_split", literal, value)


def _callee(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _read_path(call: ast.Call | None) -> str | None:
    return ast.unparse(call.args[0]) if call is not None and call.args else None


def _find_target(name: str) -> str | None:
    """Return the recipe's key for a field of `GRPOConfig`; None if it has none."""
    today = grpo_fields.RENAMED.get(name, name)
    if today in _TARGETS:
        return _TARGETS[today]
    known = today in grpo_fields.read_grpo_fields() and grpo_fields.home_of(today) is not None
    return grpo_fields.key_in_home(today) if known else None
