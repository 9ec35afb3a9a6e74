"""A Python script that trains with TRL, as the config that `trl grpo` would read.

The script is parsed, never run: literals, and names bound to one once, are read; the rest is left to a person.
Source: trl 1.16 (`GRPOTrainer.__init__`, `GRPOConfig`), peft 0.21 (`LoraConfig`), datasets 5 (`load_dataset`).
"""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.datasets import BUILDERS, NO_DATASET, PROMPT_EXAMPLE
from grpo_cli.convert.key_report import KeyReport, read_keys
from grpo_cli.convert.rewards import TRL_REWARDS, Reward, name_file
from grpo_cli.convert.script_images import find_images
from grpo_cli.convert.script_names import Names, callee, code_of, is_main, line_of
from grpo_cli.convert.trl import LORA_NAMES, LORA_ONLY, find_home
from grpo_cli.errors import RecipeError, recipe_error
from grpo_cli.issues import Location
from grpo_cli.recipe.grpo_fields import LORA_REFUSED
from grpo_cli.recipe.yaml_tree import Node, as_node

_CALLS = ("GRPOConfig", "LoraConfig", "GRPOTrainer", "load_dataset")
_TRAINER = (
    "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes "
    "callbacks optimizers quantization_config peft_config tools rollout_func environment_factory"
).split()
"""Parameters of `GRPOTrainer`, in their order."""
_EPISODES = {"tools": ("tools", "function"), "environment_factory": ("environment", "python")}
"""Parameters of `GRPOTrainer` that are entries of a recipe's list, and their kind there."""
_NOT_TAKEN = {*_TRAINER[5:9], "rollout_func"}
_LORA = {**LORA_NAMES, **{name: name for name in LORA_ONLY}, "task_type": "lora_task_type"}
"""Arguments of `LoraConfig` → the keys by which they are read here."""
_LORA_DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of `LoraConfig`; those of `trl grpo` and of recipes are others."""
_LOAD_DATASET = ("path", "name", "data_dir", "data_files", "split")
_DATASET = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
_CHANGES = ("map", "filter", "select", "rename_column", "rename_columns", "train_test_split")
"""Methods of datasets that change rows, or which rows there are."""
_LOADING = (
    "use_fast padding_side truncation_side model_max_length trust_remote_code revision token cache_dir "
    "local_files_only force_download subfolder"
).split()
"""Arguments of `AutoProcessor.from_pretrained` that are no settings of images."""
_OVERLONG = ("max_completion_len", "soft_punish_cache")
_BITS = ("load_in_4bit", "load_in_8bit")


def read_script(text: str, source: FilePath, folder: FilePath) -> "Script":
    """Read a script's calls of `GRPOConfig`, `LoraConfig`, `GRPOTrainer` and `load_dataset`.

    Paths of rewards will be relative to `folder`, the recipe's.
    """
    try:
        return Script(ast.parse(text), source, folder)
    except SyntaxError as error:
        where = Location(str(source), error.lineno or 1, 1)
        message = f"is not Python that can be read: {error.msg}"
        raise recipe_error(message, "correct that line", location=where) from None


class Script:
    """A script's calls as a config of `trl grpo`, with what is dropped and what is left to a person."""

    def __init__(self, module: ast.Module, source: FilePath, folder: FilePath) -> None:
        self._file = source
        self._path = name_file(source.resolve(), folder)
        self._body = module.body
        self._names = Names(module)
        signs = [f"{name}(…)" for name in _CALLS if self._names.calls(name)]
        self.report = KeyReport(Node({}, Location(str(source), 1, 1)), "trl", signs)
        self.rewards: dict[str, Reward] = {}
        """Rewards that a config cannot name."""
        self.processor: dict[str, Any] = {}
        """Settings of the processor for images."""
        self._read()

    def _read(self) -> None:
        trainers = self._names.calls("GRPOTrainer")
        arguments = self._names.bind(trainers[0], _TRAINER) if trainers else {}
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
        adapters = [*filter(None, [arguments.get("peft_config")])]
        adapters += self._names.calls("get_peft_model")
        lora = self._choose(
            "LoraConfig", arguments.get("peft_config"), alone=bool(adapters) or not trainers
        )
        if lora is not None:
            self._take_lora(lora)
        elif adapters:
            self._leave("model.lora", adapters[0])
        if "model" in arguments:
            self._take_model(arguments["model"])
        if "reward_funcs" in arguments:
            self._take_rewards(arguments["reward_funcs"])
        if "train_dataset" in arguments:
            self._take_rows(arguments["train_dataset"], arguments.get("eval_dataset"))
        self._take_processor()
        if images := find_images(self._names.nodes):
            at, column = images
            fix = f"name the column with images, as in `prompt: {{images: {column or 'image'}}}`"
            self._leave("dataset.prompt.images", at, fix)
        self._drop_objects(arguments)

    def _refuse(self, message: str) -> RecipeError:
        fix = "name a script that makes one GRPOTrainer, or the YAML that it reads"
        return recipe_error(message, fix, location=self.report.tree.location)

    def _choose(self, name: str, argument: ast.expr | None, *, alone: bool) -> ast.Call | None:
        """Return the call that an argument stands for, or else the script's only one."""
        calls = self._names.calls(name)
        meant = self._names.follow(argument) if argument is not None else None
        calls = [call for call in calls if call is meant] or calls
        return calls[0] if len(calls) == 1 and (argument is not None or alone) else None

    def _put(self, key: str, value: Any, at: ast.AST) -> None:
        where = Location(
            str(self._file), getattr(at, "lineno", 1), getattr(at, "col_offset", 0) + 1
        )
        self.report.tree.value[key] = as_node(value, where)
        self.report.tree.key_locations[key] = where

    def _drop(self, key: str, at: ast.AST, reason: str) -> None:
        self._put(key, None, at)
        self.report.drop((key,), reason)

    def _leave(self, target: str, value: ast.AST, fix: str = "write its value") -> None:
        """Leave a key of the recipe to a person, with the code that computes it."""
        self._add_to_do(target, f"{self._file.name}:{line_of(value)} has `{code_of(value)}`; {fix}")

    def _add_to_do(self, target: str, text: str) -> None:
        before = self.report.to_do.get(target)
        self.report.to_do[target] = f"{before}. {text}" if before else text

    def _read_literals(self, arguments: Mapping[str, ast.expr], target: str) -> dict[str, Any]:
        """Return the arguments that are literals; leave the others to a person."""
        literals = {}
        for name, value in arguments.items():
            literal = self._names.literal(value)
            if isinstance(literal, ast.expr):
                self._leave(f"{target}.{name}".removesuffix(".**"), value)
            else:
                literals[name] = literal
        return literals

    def _take_arguments(
        self, arguments: Mapping[str, ast.expr], keys: Mapping[str, str], target: str
    ) -> None:
        """Take literals by their names in TRL's config, and leave other arguments to a person."""
        for name, literal in self._read_literals(arguments, target).items():
            if name in keys:
                self._put(keys[name], literal, arguments[name])
            else:
                self._leave(f"{target}.{name}".removesuffix(".**"), arguments[name])

    def _take_config(self, call: ast.Call) -> None:
        for name, value in self._names.bind(call, ("output_dir",)).items():
            literal, target = self._names.literal(value), _find_target(name)
            if target is None or not isinstance(literal, ast.expr):
                self._put(name, None if isinstance(literal, ast.expr) else literal, value)
            else:
                self._leave(target, value)
        for node in self._names.nodes:
            match node:
                case ast.Assign(targets=[ast.Attribute(value=made, attr=name)]):
                    if self._names.follow(made) is call and (target := _find_target(name)):
                        self.report.tree.value.pop(name, None)
                        text = f"{self._file.name}:{node.lineno} sets it later: `{code_of(node)}`"
                        self._add_to_do(target, text)

    def _take_lora(self, call: ast.Call) -> None:
        arguments = self._names.bind(call)
        self._put("use_peft", True, call)
        for name in _LORA_DEFAULTS.keys() - arguments.keys():
            self._put(_LORA[name], _LORA_DEFAULTS[name], call)
        for name in arguments.keys() - {*_LORA, "**"}:
            reason = LORA_REFUSED.get(name, "unknown to peft").removeprefix("remove it: ")
            self._drop(f"LoraConfig.{name}", arguments.pop(name), reason)
        self._take_arguments(arguments, _LORA, "model.lora")

    def _drop_objects(self, arguments: dict[str, ast.expr]) -> None:
        """Drop, or leave to a person, what `GRPOTrainer` gets as objects."""
        for name, value in arguments.items():
            if ast.unparse(value) == "None":
                continue
            if name in _EPISODES:
                key, kind = _EPISODES[name]
                names = map(code_of, self._list(value))
                path = self._path
                entries = ", ".join(f'{{kind: {kind}, path: "{path}:{each}"}}' for each in names)
                self._leave(key, value, f"write [{entries}], each with its own file")
            elif name == "quantization_config":
                self._take_quantization(value)
            elif name in _NOT_TAKEN:
                reason = "a recipe takes no objects; it names models, rewards and optimizers"
                self._drop(f"GRPOTrainer.{name}", value, reason)

    def _list(self, value: ast.expr) -> list[ast.expr]:
        """Return the elements of a list, or an expression alone."""
        listed = self._names.follow(value)
        return listed.elts if isinstance(listed, ast.List | ast.Tuple) else [value]

    def _take_model(self, value: ast.expr) -> None:
        literal, made = self._names.literal(value), self._names.follow(value)
        match made:
            case ast.Call(func=ast.Attribute(value=inner, attr="to" | "cuda")):
                made = self._names.follow(inner)
            case ast.Call(args=[inner, *_]) if callee(made) == "get_peft_model":
                made = self._names.follow(inner)
        if isinstance(literal, str):
            self._put("model_name_or_path", literal, value)
        elif isinstance(made, ast.Call) and callee(made) == "from_pretrained" and made.args:
            self._take_pretrained(made)
        else:
            self._leave("model.path", value, "name the model")

    def _take_pretrained(self, call: ast.Call) -> None:
        """Take `AutoModelForCausalLM.from_pretrained(…)`; its default precision is the checkpoint's."""
        name, arguments = ast.unparse(call.func), self._names.bind(call)
        if "Peft" in name:
            if "Auto" not in name:
                self._take_model(call.args[0])
            self._leave("model.adapter", call, "name the adapter's folder")
            return
        self._take_model(call.args[0])
        if "device_map" in arguments:
            place = arguments.pop("device_map")
            self._drop("from_pretrained.device_map", place, "the launcher places the model")
        if "quantization_config" in arguments:
            self._take_quantization(arguments.pop("quantization_config"))
        literals = {"dtype": "auto", **self._read_literals(arguments, "model")}
        literals["dtype"] = literals.pop("torch_dtype", literals["dtype"])
        self._put("model_init_kwargs", literals, call)

    def _take_quantization(self, value: ast.expr) -> None:
        """Take the bits of `BitsAndBytesConfig(…)`."""
        made, keys = self._names.follow(value), []
        if isinstance(made, ast.Call) and callee(made) == "BitsAndBytesConfig":
            arguments = self._names.bind(made)
            keys = [key for key in _BITS if self._names.literal(arguments.get(key)) is True]
        if keys:
            self._put(keys[0], True, value)
        elif ast.unparse(made) != "None":
            self._leave("model.quantization", value, "write `4bit` or `8bit`")

    def _take_processor(self) -> None:
        """Take the settings of `AutoProcessor.from_pretrained(…)`."""
        for call in self._names.calls("from_pretrained"):
            if not code_of(call.func).endswith("AutoProcessor.from_pretrained"):
                continue
            arguments = self._names.bind(call)
            for name in [each for each in _LOADING if each in arguments]:
                reason = "`model.processor` has the settings of images alone"
                self._drop(f"AutoProcessor.{name}", arguments.pop(name), reason)
            self.processor |= self._read_literals(arguments, "model.processor")

    def _take_rewards(self, value: ast.expr) -> None:
        names = [self._name_reward(item) for item in self._list(value)]
        self._put("reward_funcs", names, value)
        is_own = any((each.entry or {}).get("kind") == "python" for each in self.rewards.values())
        if is_own and not any(is_main(each) for each in self._body):
            self._add_to_do(
                "rewards",
                f"importing {self._file.name} for its rewards would train; put that under "
                '`if __name__ == "__main__":`, or the rewards into another file',
            )

    def _name_reward(self, item: ast.expr) -> str:
        """Return the name that a config gives a reward, or its code and an entry in the table."""
        literal, path = self._names.literal(item), self._names.imported(item)
        package, _, name = path.rpartition(".")
        if isinstance(literal, str):
            return literal
        if package.partition(".")[0] == "trl" and name in TRL_REWARDS:
            return name
        if package and package.partition(".")[0] != "trl":
            return path
        self.rewards[code_of(item)] = self._define_reward(item)
        return code_of(item)

    def _define_reward(self, item: ast.expr) -> Reward:
        made = self._names.follow(item)
        if code_of(item) in [each.name for each in self._body if isinstance(each, ast.FunctionDef)]:
            return Reward({"kind": "python", "path": f"{self._path}:{code_of(item)}"})
        if isinstance(made, ast.Call) and callee(made) == "get_soft_overlong_punishment":
            arguments = self._names.bind(made, _OVERLONG)
            longest, cache = (self._names.literal(arguments.get(name)) for name in _OVERLONG)
            if isinstance(longest, int) and isinstance(cache, int):
                return Reward({"kind": "soft_overlong", "max_length": longest, "cache": cache})
        fix = "write it as a function at the top level, `{kind: python, path: FILE.py:NAME}`"
        self._leave("rewards", item, fix)
        return Reward(None, "is no function at the top level of the script")

    def _take_rows(self, train: ast.expr, held_out: ast.expr | None) -> None:
        call, split, changes = self._trace_rows(train)
        calls = self._names.calls("load_dataset")
        if call is None and len(calls) == 1:
            # By way of a function of the script, or bound several times, as in `rows = rows.map(…)`.
            call, changes = calls[0], self._find_changes() or [train]
            chosen = [each for each in self._names.nodes if isinstance(each, ast.Subscript)]
            split = next((each.slice for each in chosen if each.value is call), None)
        arguments = self._names.bind(call, _LOAD_DATASET) if call is not None else {}
        if split is not None:
            # Rows of a split have no splits but those of `train_test_split`.
            arguments.setdefault("split", split)
        literals = {name: self._names.literal(value) for name, value in arguments.items()}
        if call is None or not isinstance(literals.get("path"), str):
            self._leave("dataset", call or train, NO_DATASET)
            return
        held_split = self._find_split(held_out, call) if held_out is not None else None
        if literals["path"] in BUILDERS and "data_files" in literals:
            files = self._choose_files(literals["data_files"], literals.get("split"), held_split)
            self._put("datasets", [{"path": literals["path"], "data_files": files}], call)
        else:
            self._take_arguments(arguments, _DATASET, "dataset")
        self._leave_changes(changes)
        if held_out is not None:
            self._take_held_out(held_out, held_split)

    def _choose_files(self, files: Any, split: Any, held_out: str | None) -> Any:
        """Return the files of the splits that are trained on and, if the trainer has such rows, held out."""
        if not isinstance(files, dict) or split not in (None, *files):
            return files
        chosen = {"train": files[split]} if split else files
        return {**chosen, "test": files[held_out]} if held_out in files else chosen

    def _find_changes(self) -> list[ast.expr]:
        """Return the calls of methods that change rows, by their lines."""
        calls = [call for name in _CHANGES for call in self._names.calls(name)]
        methods = [call for call in calls if isinstance(call.func, ast.Attribute)]
        return [*sorted(methods, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))]

    def _leave_changes(self, changes: Sequence[ast.expr]) -> None:
        """Leave to a person what changes the rows, leaves some out, or holds some out."""
        made = []
        for change in changes:
            match callee(change):
                case "filter":
                    key = "train" if "datasets" in self.report.tree.value else "path"
                    fix = "name data without the rows that it leaves out; a recipe reads all rows"
                    self._leave(f"dataset.{key}", change, fix)
                case "select":
                    fix = "write how many rows it takes; a recipe takes the first ones"
                    self._leave("dataset.limit", change, fix)
                case "train_test_split":
                    fix = "write the share of the rows that is held out, such as 0.05"
                    self._leave("dataset.eval_fraction", change, fix)
                case "shuffle":
                    pass  # a training shuffles too
                case _:
                    made.append(f"line {line_of(change)}: `{code_of(change)}`")
        if made:
            self.report.to_do["dataset.prompt"] = (
                f"{self._file.name} changes the rows ({', '.join(made)}); write what it makes of a "
                f"row, as Jinja over its columns\n{PROMPT_EXAMPLE}"
            )

    def _trace_rows(
        self, value: ast.expr
    ) -> tuple[ast.Call | None, ast.expr | None, list[ast.expr]]:
        """Follow rows back to `load_dataset`: return the call, the split, and what changes the rows."""
        value = self._names.follow(value)
        match value:
            case ast.Call() if callee(value) == "load_dataset":
                return value, None, []
            case ast.Subscript(value=inner, slice=key):
                call, _, changes = self._trace_rows(inner)
                return call, key, changes
            case ast.Call(func=ast.Attribute(value=inner)):
                call, split, changes = self._trace_rows(inner)
                # Alone: before it stand the others.
                own = ast.copy_location(ast.Attribute(ast.Name("…"), callee(value)), value.func)
                alone = ast.Call(own, value.args, value.keywords)
                return call, split, [*changes, ast.copy_location(alone, value)]
        return None, None, []

    def _take_held_out(self, value: ast.expr, split: str | None) -> None:
        """Take a split of the dataset that is trained on; leave anything else to a person."""
        if "dataset.eval_fraction" in self.report.to_do or ast.unparse(value) == "None":
            return
        files = self.report.get("datasets", 0, "data_files")
        if split is not None and files is None:
            self._put("dataset_test_split", split, value)
        elif split is None or not (isinstance(files, dict) and "test" in files):
            self._leave("dataset.eval_split", value, "say which rows are held out")

    def _find_split(self, value: ast.expr, train: ast.Call) -> str | None:
        """Return the split that held-out rows are; None unless they are of the dataset that is trained on."""
        call, split, _ = self._trace_rows(value)
        if call is None and split is not None and len(self._names.calls("load_dataset")) == 1:
            call = train
        if call is None:
            return None
        own, other = (
            {
                name: ast.unparse(value)
                for name, value in self._names.bind(each, _LOAD_DATASET).items()
            }
            for each in (train, call)
        )
        own.pop("split", None)
        other.pop("split", None)
        named = self._names.bind(call, _LOAD_DATASET).get("split")
        literal = self._names.literal(split or named)
        return literal if own == other and isinstance(literal, str) else None


def _find_target(name: str) -> str | None:
    """Return the recipe's key for a field of `GRPOConfig`, or None."""
    return read_keys("script-targets").get(name, find_home(name))
