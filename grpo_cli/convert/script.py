"""A Python script that trains with TRL, as the config that `trl grpo` would read.

The script is read, never run. Each argument, assignment and method call on the objects that make up a training is
taken, or named with its line and the reason.
Source: trl 1.16 (`GRPOTrainer.__init__`, `GRPOConfig`), peft 0.21 (`LoraConfig`), unsloth.
"""

import ast
from typing import Any

from grpo_cli.convert.key_report import read_keys
from grpo_cli.convert.rewards import TRL_REWARDS, Reward
from grpo_cli.convert.script_images import find_images
from grpo_cli.convert.script_model import ScriptModel
from grpo_cli.convert.script_values import (
    MISSING,
    Choice,
    Class,
    Function,
    Known,
    Object,
    Value,
    code_of,
    plain,
)
from grpo_cli.convert.trl import find_home
from grpo_cli.errors import nearest
from grpo_cli.recipe.grpo_fields import MOVED, read_grpo_fields, refusal_of

_TRAINER = (
    "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes "
    "callbacks optimizers quantization_config peft_config tools rollout_func environment_factory"
).split()
"""Parameters of `GRPOTrainer`, in their order."""
_NEAR = {
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "config": "args",
    "rewards": "reward_funcs",
}
"""Names that scripts give parameters of `GRPOTrainer`, and which they mean."""
_EPISODES = {"tools": ("tools", "function"), "environment_factory": ("environment", "python")}
"""Parameters of `GRPOTrainer` that are entries of a recipe's list, and their kind there."""
_OVERLONG = ("max_completion_len", "soft_punish_cache")
_SAMPLING = {
    **{name: name for name in "temperature top_p top_k min_p repetition_penalty".split()},
    "stop": "stop_strings",
    "skip_special_tokens": "skip_special_tokens",
    "max_tokens": "max_completion_length",
}
"""Arguments of vLLM's `SamplingParams` → keys of `generation`."""


class Script(ScriptModel):
    """A script's objects as a config of `trl grpo`, with what is dropped and what is left to a person."""

    def read(self) -> None:
        """Take what reaches `GRPOTrainer`, and name everything else that is done to its objects."""
        trainer = self.find_trainer()
        arguments = self._bind_trainer(trainer) if trainer is not None else {}
        self._take_config(trainer, arguments.get("args"))
        self.take_adapter(arguments.get("peft_config"))
        if "model" in arguments:
            self.take_model(arguments["model"])
        if "processing_class" in arguments:
            self.take_tokenizer(arguments["processing_class"])
        if "reward_funcs" in arguments:
            self._take_rewards(arguments["reward_funcs"])
        self.take_tokenizers()
        self._take_objects(trainer, arguments)
        if trainer is not None:
            self.take_rows(trainer, arguments.get("train_dataset"), arguments.get("eval_dataset"))
        if images := find_images(self.nodes):
            at, column = images
            fix = f"name the column with images, as in `prompt: {{images: {column or 'image'}}}`"
            self.leave("dataset.prompt.images", None, at, fix)
        self.sweep(trainer)

    # The trainer and its config.

    def _bind_trainer(self, trainer: Object) -> dict[str, Value]:
        arguments: dict[str, Value] = {}
        for key, value in (trainer.args or {}).items():
            name = _TRAINER[int(key)] if key.isdigit() and int(key) < len(_TRAINER) else key
            node = self.node_of(trainer, key)
            self.done.add((id(trainer), key))
            if name in ("*", "**"):
                self.leave(
                    "model",
                    value,
                    node,
                    "these arguments of GRPOTrainer are not read; write what they say",
                )
                self.report.unread |= {
                    "model",
                    "dataset",
                    "rewards",
                    "training",
                    "generation",
                    "logging",
                }
            elif name in _TRAINER:
                arguments[name] = value
                self.nodes_of[name] = node
            else:
                self.drop(f"GRPOTrainer.{name}", node, self._explain_unknown(trainer, name))
                self._name_unless_lost(trainer, name, value, node)
        if trainer.cls is not None:
            self._name_own_methods(trainer.cls)
        elif not trainer.name.startswith(("trl.", "unsloth", "GRPOTrainer")):
            reason = "its own code is not read, and recipes train with TRL's GRPOTrainer"
            self.drop(code_of(getattr(trainer.node, "func", trainer.node)), trainer.node, reason)
        return arguments

    def _explain_unknown(self, trainer: Object, name: str) -> str:
        is_own = trainer.cls is not None or not trainer.name.startswith(("trl.", "unsloth"))
        close = _NEAR.get(name) or nearest(name, _TRAINER)
        if name in read_grpo_fields():
            home = _find_target(name)
            return f"GRPOTrainer has no such argument; GRPOConfig has, and recipes have `{home}`"
        if close:
            return f"GRPOTrainer has no such argument; did you mean `{close}`?"
        return (
            "an argument of the script's own trainer"
            if is_own
            else "GRPOTrainer has no such argument"
        )

    def _name_unless_lost(self, trainer: Object, name: str, value: Value, node: ast.AST) -> None:
        """Take a tokenizer that is passed by another name, so that what is set on it is not lost."""
        if _NEAR.get(name) == "processing_class" and plain(value) is MISSING:
            self.take_tokenizer(value)

    def _name_own_methods(self, cls: Class) -> None:
        for each in cls.ancestry():
            for name, value in each.attrs.items() if isinstance(each, Class) else ():
                if isinstance(value, Function) and name != "__init__":
                    reason = (
                        "code of the script's own trainer; recipes train with TRL's GRPOTrainer"
                    )
                    self.drop(
                        f"{each.name}.{name}" if isinstance(each, Class) else name,
                        value.node,
                        reason,
                    )

    def _take_config(self, trainer: Object | None, value: Value | None) -> None:
        configs = [made for made in self.evaluator.made if self.is_config(made)]
        is_alone = trainer is None
        config = self.combine(configs, "GRPOConfig") if is_alone else self._find_config(value)
        if config is None:
            if value is not None and plain(value) is not None:
                fix = "write its values: " + self.advice_for(value)
                self.leave("training", value, self.nodes_of["args"], fix)
                self.report.unread |= {"training", "generation", "logging"}
            return
        final: dict[str, tuple[Value, ast.AST]] = {}
        for key, given in (config.args or {}).items():
            self.done.add((id(config), key))
            final["output_dir" if key == "0" else key] = (given, self.node_of(config, key))
        for change in self.evaluator.assignments:
            owners = self.merged.get(id(config), [config])
            if change.owner in owners and not change.name.startswith("["):
                self.done.add((id(change), ""))
                final[change.name] = (config.attrs.get(change.name, change.value), change.node)
        for name, (given, node) in final.items():
            self._take_setting(name, given, node)

    def _find_config(self, value: Value | None) -> Object | None:
        """Return the config that the trainer gets, or those of branches as one."""
        if isinstance(value, Choice):
            pairs = [(test, self.find_in(each, self.is_config)) for test, each in value.options]
            configs = [(test, config) for test, config in pairs if config is not None]
            return self.merge(configs) if len(configs) == len(pairs) else None
        return self.find_in(value, self.is_config)

    def _take_setting(self, name: str, value: Value, node: ast.AST) -> None:
        if name in ("*", "**"):
            fix = "write what it holds: " + self.advice_for(value)
            self.leave("training", value, node, fix)
            self.report.unread |= {"training", "generation", "logging"}
            return
        if name == "vllm_sampling_params" and isinstance(value, Object) and value.is_call:
            self._take_sampling(value)
            return
        literal, target = plain(value), _find_target(name)
        if literal is not MISSING:
            self.put(name, literal, node)
        elif name in ("bf16", "fp16") and "supported" in code_of(node):
            reason = "depends on the GPU; recipes train in bf16 unless `training.fp16: true`"
            self.drop(name, node, reason)
        elif target is not None:
            self.leave(target, value, node, "write its value")
        else:
            reason = refusal_of(name) or MOVED.get(name) or "recipes have no such setting"
            self.drop(name, node, reason.removeprefix("remove it: "))

    def _take_sampling(self, made: Object) -> None:
        """Take vLLM's `SamplingParams`, which unsloth samples with."""
        for name, value in (made.args or {}).items():
            self.done.add((id(made), name))
            node, literal = self.node_of(made, name), plain(value)
            if name in _SAMPLING and literal is not MISSING:
                literal = [literal] if name == "stop" and isinstance(literal, str) else literal
                self.extra[f"generation.{_SAMPLING[name]}"] = (
                    f"SamplingParams.{name}",
                    literal,
                    node,
                )
            elif name in _SAMPLING:
                self.leave(f"generation.{_SAMPLING[name]}", value, node)
            elif name == "include_stop_str_in_output":
                self.drop(
                    f"SamplingParams.{name}",
                    node,
                    "completions always keep the string that ends them",
                )
            else:
                reason = read_keys("script-sampling").get(
                    name, "write it in `generation.generation_kwargs`"
                )
                self.drop(f"SamplingParams.{name}", node, reason)

    # Rewards, tools and callbacks.

    def _take_rewards(self, value: Value) -> None:
        node = self.nodes_of["reward_funcs"]
        literal = plain(value)
        items = self.evaluator.items_of(value) if isinstance(value, Known) else [value]
        if isinstance(literal, str):
            items = [value]
        if items is None or isinstance(value, Choice):
            self.leave("rewards", value, node, "write them as entries of `rewards`")
            self.report.unread.add("rewards")
            return
        self.put("reward_funcs", [self._name_reward(item) for item in items], node)
        is_own = any((each.entry or {}).get("kind") == "python" for each in self.rewards.values())
        if is_own and not self._is_guarded():
            self.add_to_do(
                "rewards",
                f"importing {self.file.name} for its rewards would train; put that under "
                '`if __name__ == "__main__":`, or the rewards into another file',
            )

    def _is_guarded(self) -> bool:
        """Return whether importing the script leaves the trainer alone."""
        return any(
            isinstance(each, ast.If) and "__name__" in code_of(each.test) for each in self.body
        ) or not any(
            made.last_name.endswith("Trainer") for made in self.evaluator.made if not made.condition
        )

    def _name_reward(self, item: Value) -> str:
        """Return the name that a config gives a reward, or its code and an entry in the table."""
        literal = plain(item)
        if isinstance(literal, str):
            return literal
        path = item.name if isinstance(item, Object) and item.is_import else ""
        package, _, name = path.rpartition(".")
        if package.partition(".")[0] == "trl" and name in TRL_REWARDS:
            return name
        if package.strip(".") and package.partition(".")[0] != "trl":
            return path.lstrip(".")
        text = getattr(item.node, "name", None) or code_of(item.node)
        self.rewards[text] = self._define_reward(item, text)
        return str(text)

    def _define_reward(self, item: Value, name: str) -> Reward:
        kwargs: dict[str, Any] = {}
        made = item
        if isinstance(item, Function) and isinstance(item.target, Function) and not item.positional:
            kwargs = {key: plain(value) for key, value in item.keywords.items()}
            made = item.target
            name = str(getattr(made.node, "name", name))
        is_top = any(
            each is made.node
            for each in self.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        if is_top and MISSING not in kwargs.values():
            entry = {"kind": "python", "path": f"{self.path}:{name}"}
            return Reward({**entry, "kwargs": kwargs} if kwargs else entry)
        if isinstance(made, Object) and made.last_name == "get_soft_overlong_punishment":
            arguments = {
                _OVERLONG[int(key)] if key.isdigit() else key: value
                for key, value in (made.args or {}).items()
            }
            longest, cache = (plain(arguments.get(each)) for each in _OVERLONG)
            if isinstance(longest, int) and isinstance(cache, int):
                return Reward({"kind": "soft_overlong", "max_length": longest, "cache": cache})
        fix = "write it as a function at the top level, `{kind: python, path: FILE.py:NAME}`"
        self.leave("rewards", None, item.node, fix)
        return Reward(None, "is no function at the top level of the script")

    def _take_objects(self, trainer: Object | None, arguments: dict[str, Value]) -> None:
        """Take, drop, or leave to a person what `GRPOTrainer` gets as objects."""
        for name, value in arguments.items():
            node = self.nodes_of[name]
            if plain(value) is None:
                continue
            if name in _EPISODES:
                key, kind = _EPISODES[name]
                items = self.evaluator.items_of(value) or [value]
                names = [
                    str(getattr(each.node, "name", None) or code_of(each.node)) for each in items
                ]
                entries = ", ".join(
                    f'{{kind: {kind}, path: "{self.path}:{each}"}}' for each in names
                )
                self.leave(key, None, node, f"write [{entries}], each with its own file")
            elif name == "quantization_config":
                self.take_quantization(value, node)
            elif name == "callbacks":
                for each in self.evaluator.items_of(value) or [value]:
                    self._take_callback(each, each.node)
            elif name in ("reward_processing_classes", "optimizers", "rollout_func"):
                self.drop(f"GRPOTrainer.{name}", node, read_keys("script-trainer")[name])
        calls = [
            made for made in self.evaluator.made if trainer is not None and made.owner is trainer
        ]
        for made in calls:
            if made.last_name == "add_callback":
                self.done.add((id(made), ""))
                for value in (made.args or {}).values():
                    self._take_callback(value, made.node)

    def _take_callback(self, value: Value, node: ast.AST) -> None:
        args = (value.args or {}) if isinstance(value, Object) and value.is_call else {}
        names = {"early_stopping_patience": "patience", "early_stopping_threshold": "min_delta"}
        if isinstance(value, Object) and value.last_name == "EarlyStoppingCallback":
            for index, name in enumerate(names):
                given = args.get(name) or args.get(str(index))
                literal = plain(given) if given is not None else MISSING
                if literal is not MISSING:
                    key = f"training.early_stopping.{names[name]}"
                    self.extra[key] = (f"EarlyStoppingCallback.{name}", literal, node)
                elif given is not None:
                    self.leave(f"training.early_stopping.{names[name]}", given, node)
            return
        reason = "recipes have no callbacks; see `grpo diagnose`, `training.stop_when` and `log_metric` in rewards"
        self.drop(code_of(node, 120), node, reason)


def _find_target(name: str) -> str | None:
    """Return the recipe's key for a field of `GRPOConfig`, or None."""
    return read_keys("script-targets").get(name, find_home(name))
