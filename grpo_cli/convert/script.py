"""A Python script that trains with TRL, as the config that `trl grpo` would read.

The script is read, never run. Each argument, assignment and method call on the objects that make up a training is
taken, or named with its line and the reason.
Source: trl 1.16 (`GRPOTrainer.__init__`, `GRPOConfig`).
"""

import ast
from typing import Any

from grpo_cli.convert.key_report import by_key, read_keys
from grpo_cli.convert.rewards import TRL_REWARDS, Reward
from grpo_cli.convert.script_account import ALL_SECTIONS, OF_CONFIG, Bound
from grpo_cli.convert.script_model import ScriptModel
from grpo_cli.convert.script_parts import advice_for, find_other_package, find_target, kind_of
from grpo_cli.convert.script_values import (
    MISSING,
    NAMES,
    Choice,
    Class,
    Function,
    Literal,
    Object,
    Value,
    code_of,
    plain,
    rest_of,
)
from grpo_cli.convert.trl import INIT_KWARGS
from grpo_cli.errors import nearest, recipe_error
from grpo_cli.recipe.grpo_fields import MOVED, read_grpo_fields, refusal_of


class Script(ScriptModel):
    """A script's objects as a config of `trl grpo`, with what is dropped and what is left to the user."""

    is_asked = False
    """Set if `--from trl` says that the script is one of TRL."""

    def read(self) -> None:
        """Take what reaches `GRPOTrainer`, and name everything else that is done to its objects."""
        trainer = self._find_trainer()
        bound = self._bind_trainer(trainer) if trainer is not None else {}
        self.condition = trainer.condition if trainer is not None else ""
        self._take_config(trainer, bound.get("args"))
        takers = {
            "peft_config": self.take_adapter,
            "model": self.take_model,
            "processing_class": self.take_tokenizer,
            "reward_funcs": self._take_rewards,
        }
        for name, take in takers.items():
            if name in bound:
                take(*bound[name])
        self.take_tokenizers(bound.get("processing_class", (None,))[0])
        self._take_objects(bound)
        if trainer is not None:
            at = bound.get("train_dataset", (None, trainer.node))
            self.take_rows(at, bound.get("eval_dataset"))
        self.sweep(bound)

    def list_read_flags(self) -> set[str]:
        """Return the flags of the command line that what is in the report is computed from, or depends on."""
        tests = [each.test for each in self.nodes if isinstance(each, ast.If | ast.IfExp)]
        queue: list[ast.AST] = [*self._accounted, *tests]
        seen = {*queue}
        for node in queue:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            values = [value.node for value in self.evaluator.values.get(node, ())]
            for each in (*ast.iter_child_nodes(node), *values):
                if each not in seen:
                    seen.add(each)
                    queue.append(each)
        return {each.id[2:] for each in seen if isinstance(each, ast.Name) and each.id[:2] == "--"}

    # The trainer and its config.

    def _find_trainer(self) -> Object | None:
        """Return the trainer that the script makes; None if it makes a config only."""
        trainers = [made for made in self.made if kind_of(made) == "trainer"]
        configs = [made for made in self.made if kind_of(made) == "config"]
        for made in () if self.is_asked else [*trainers, *configs]:
            # A trainer of another name is noted as one whose code is not read.
            if made in trainers and made.last_name != "GRPOTrainer":
                continue
            if package := find_other_package(made, self.file.parent):
                cause = f"has {made.last_name} from `{package}`, which is not TRL"
                fix = "if it takes what TRL's takes, read it as TRL's with `--from trl`"
                raise recipe_error(cause, fix, location=self.place(made.node))
        if not trainers and not configs:
            raise self._refuse("makes neither a GRPOTrainer nor a GRPOConfig of TRL")
        return self._pick(trainers, "GRPOTrainer")

    def _pick(self, made: list[Object], what: str) -> Object | None:
        """Return the only call, or the first one, with a line to do for the others."""
        made = list(dict.fromkeys(made))
        certain = {id(each.node) for each in made if not each.condition}
        lines = ", ".join(dict.fromkeys(self.line_of(each.node) for each in made))
        if len(certain) > 1:
            raise self._refuse(f"calls {what} {len(made)} times ({lines})")
        if len(made) > 1:
            place = f"{self.file.name} makes {what} {len(made)} times ({lines})"
            text = f"{place}; this recipe is converted from the first; compare the others with it"
            self.report.add_to_do("training", text, ALL_SECTIONS)
        return made[0] if made else None

    def _refuse(self, message: str) -> Exception:
        fix = "name a script that makes one GRPOTrainer, or the YAML that it reads"
        return recipe_error(message, fix, location=self.report.tree.location)

    def _bind_trainer(self, trainer: Object) -> Bound:
        bound = self.bind(trainer, NAMES["trainer-parameters"])
        is_known = trainer.name.startswith(("trl.", "unsloth")) or trainer.name == "GRPOTrainer"
        is_own = trainer.cls is not None or not is_known or trainer.last_name != "GRPOTrainer"
        for name in [each for each in bound if each not in NAMES["trainer-parameters"]]:
            value, node = bound.pop(name)
            if name in ("*", "**"):
                fix, rest = "write the arguments that it gives GRPOTrainer", rest_of(value)
                for each in rest:
                    at = each.node if len(rest) > 1 else node
                    self.leave("model", each, at, fix, unread=ALL_SECTIONS)
                continue
            close = nearest(name, NAMES["trainer-parameters"])
            close = by_key(read_keys("script-trainer-names")).get(name, close)
            reason = "GRPOTrainer has no such argument"
            if name in read_grpo_fields():
                reason += f"; GRPOConfig has, and recipes have `{find_target(name)}`"
            elif close:
                reason += f"; did you mean `{close}`?"
            elif is_own:
                reason = "an argument of the script's own trainer"
            self.drop(f"GRPOTrainer.{name}", node, reason)
            if close == "processing_class":
                self.take_tokenizer(value, node)
        bases = trainer.cls.ancestry() if trainer.cls is not None else []
        for cls in [each for each in bases if isinstance(each, Class)]:
            for name, value in cls.attrs.items():
                if isinstance(value, Function) and name != "__init__":
                    reason = "code of the script's own trainer; recipes train with TRL's"
                    self.drop(f"{cls.name}.{name}", value.node, reason)
        outside = trainer.cls.outside_base if trainer.cls is not None else None
        if "args" not in bound and outside and not outside.name.startswith(("trl.", "unsloth")):
            text = f"{outside.last_name} comes from `{outside.name}`, in another file, which may set more"
            self.report.add_to_do("training", f"{text}; write what it sets", ALL_SECTIONS)
        if trainer.cls is None and is_own:
            reason = "its code is not read, and recipes train with TRL's GRPOTrainer"
            self.drop(code_of(getattr(trainer.node, "func", trainer.node)), trainer.node, reason)
        return bound

    def _take_config(self, trainer: Object | None, at: tuple[Value, ast.AST] | None) -> None:
        value, node = at or (None, ast.Constant(None))
        configs, passes = self.find(value, "config")
        if trainer is None:
            configs = [made for made in self.made if kind_of(made) == "config"]
        config = self._pick(configs, "GRPOConfig") if trainer is None else None
        if config is None and configs:
            config = configs[0]
            if len(configs) > 1:
                fix = "this recipe has the first; write the values that are used"
                self.leave("training", value, node, fix, unread=OF_CONFIG)
        if config is None and value is not None and plain(value) is not None:
            self.leave("training", value, node, advice_for(value), unread=OF_CONFIG)
        for made in passes if config is not None else ():
            self.leave_change(made)
        settings = self.bind(config, ["output_dir"]) if config is not None else {}
        owners = [each for each in (value, config, *passes) if each is not None]
        changes = self.changes_of(owners)
        for name, (setting, where) in (settings | changes).items():
            self._take_setting(name, setting, where)
        for name in settings.keys() & changes.keys():
            if not self.is_accounted(settings[name][1]):
                reason = f"{self.line_of(changes[name][1])} sets it to another value"
                self.drop(f"GRPOConfig.{name}", settings[name][1], reason)

    def _take_setting(self, name: str, value: Value, node: ast.AST) -> None:
        data, target = plain(value), find_target(name)
        if name in ("*", "**"):
            rest = rest_of(value)
            for each in rest:
                is_own = isinstance(each.node, ast.stmt | ast.Call) or len(rest) > 1
                at = each.node if is_own else node
                self.leave("training", each, at, advice_for(each), unread=OF_CONFIG)
        elif name == "vllm_sampling_params" and isinstance(value, Object) and value.is_call:
            self.account(node)
            bound = self.bind(value)
            if isinstance(stop := plain(bound.get("stop", (None,))[0]), str):
                bound["stop"] = (Literal.of(value.node, [stop]), bound["stop"][1])
            other = "write it in `generation.generation_kwargs`"
            self.take_all("SamplingParams", bound, "script-sampling", other)
        elif data is not MISSING:
            self.put(name, data, node)
        elif isinstance(value, Literal) and isinstance(value.data, dict):
            self._take_mapping(name, target or name, value, node)
        elif name in ("bf16", "fp16") and "supported" in code_of(node):
            reason = "depends on the GPU; recipes train in bf16 unless `training.fp16: true`"
            self.drop(name, node, reason)
        elif target is not None:
            self.leave(target, value, node)
        else:
            reason = refusal_of(name) or MOVED.get(name) or "recipes have no such setting"
            self.drop(name, node, reason.removeprefix("remove it: "))

    def _take_mapping(self, name: str, target: str, value: Literal, node: ast.AST) -> None:
        """Take what is known of a mapping, and leave the rest to the user."""
        homes = INIT_KWARGS if name == "model_init_kwargs" else {}
        for key, item in value.data.items():
            at = self.node_of(value, key)
            if name == "model_init_kwargs" and key == "quantization_config":
                self.take_quantization(item, at)
            elif plain(item) is MISSING:
                self.leave(homes.get(key, f"{target}.{key}"), item, at)
        for each in value.rest:
            self.leave(target, each, each.node, advice_for(each))
        known = {key: plain(item) for key, item in value.data.items()}
        known = {key: data for key, data in known.items() if data is not MISSING}
        if known:
            self.put(name, known, node)

    # Rewards, tools and callbacks.

    def _take_rewards(self, value: Value, node: ast.AST) -> None:
        is_list = isinstance(value, Literal | Choice) and not isinstance(plain(value), str)
        items = self.evaluator.items_of(value) if is_list else [value]
        if items is None:
            fix = "write them as entries of `rewards`"
            self.leave("rewards", value, node, fix, unread=("rewards",))
            return
        names = [self._name_reward(item) for item in items]
        self.put("reward_funcs", names, node)
        codes = map(code_of, node.elts) if isinstance(node, ast.List) else names
        inner = [
            f"{self.locate(item.node)} has `{code}`"
            for item, name, code in zip(items, names, codes, strict=False)
            if getattr(self.rewards.get(name), "entry", name) is None
        ]
        if inner:
            what = "each" if len(inner) > 1 else "it"
            fix = f"make {what} a function at the top level of a file: `{{kind: python, path: FILE.py:NAME}}`"
            self.report.add_to_do("rewards", f"{', '.join(inner)}; {fix}")
        is_own = any((each.entry or {}).get("kind") == "python" for each in self.rewards.values())
        trains = any(kind_of(made) == "trainer" and not made.condition for made in self.made)
        tests = [code_of(each.test) for each in self.body if isinstance(each, ast.If)]
        if is_own and self.file.suffix == ".ipynb":
            text = f"copy the reward functions of {self.file.name} into {self.path}"
            self.report.add_to_do("rewards", text, ("rewards",))
        elif is_own and trains and not any("__name__" in test for test in tests):
            self.report.add_to_do(
                "rewards",
                f"importing {self.file.name} for its rewards would train; put that under "
                '`if __name__ == "__main__":`, or the rewards into another file',
            )

    def _name_reward(self, item: Value) -> str:
        """Return the name that a config gives a reward, or its code and an entry in the table."""
        if isinstance(plain(item), str):
            return str(plain(item))
        path = item.name if isinstance(item, Object) and item.is_import else ""
        package, _, name = path.rpartition(".")
        is_trls = package.partition(".")[0] == "trl"
        if is_trls and name in TRL_REWARDS:
            return name
        if package.strip(".") and not is_trls:
            return path.lstrip(".")
        text = str(getattr(item.node, "name", None) or code_of(item.node))
        self.rewards[text] = self._define_reward(item, text)
        return text

    def _define_reward(self, item: Value, name: str) -> Reward:
        kwargs: dict[str, Any] = {}
        if isinstance(item, Function) and isinstance(item.target, Function) and not item.positional:
            kwargs = {key: plain(value) for key, value in item.keywords.items()}
            item = item.target
            name = item.name or name
        is_function = isinstance(item.node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and item.node in self.body and MISSING not in kwargs.values():
            entry = {"kind": "python", "path": f"{self.path}:{name}"}
            return Reward({**entry, "kwargs": kwargs} if kwargs else entry)
        if isinstance(item, Object) and item.last_name == "get_soft_overlong_punishment":
            bound = self.bind(item, NAMES["overlong"])
            longest, cache = (plain(bound.get(each, (None,))[0]) for each in NAMES["overlong"])
            if isinstance(longest, int) and isinstance(cache, int):
                return Reward({"kind": "soft_overlong", "max_length": longest, "cache": cache})
        self.account(item.node, inside=True)
        return Reward(None, "is not a function at the top level of the script")

    def _name_path(self, item: Value) -> str:
        """Return how a recipe names a function or class of the script, or one that it imports."""
        if isinstance(item, Object) and item.is_import:
            return ":".join(item.name.lstrip(".").rpartition(".")[::2]).lstrip(":")
        return f"{self.path}:{getattr(item.node, 'name', None) or code_of(item.node)}"

    def _take_objects(self, bound: Bound) -> None:
        """Take, drop, or leave to the user the objects that `GRPOTrainer` gets."""
        episodes, reasons = read_keys("script-episodes"), read_keys("script-trainer")
        for name, (value, node) in bound.items():
            listed = value.data if isinstance(value, Literal) else None
            items = [*listed] if isinstance(listed, list | tuple) else [value]
            if plain(value) in (None, []):
                self.account(node)
                continue
            if name in episodes:
                key, kind = episodes[name]
                entries = [f'{{kind: {kind}, path: "{self._name_path(each)}"}}' for each in items]
                fix = f"write [{', '.join(entries)}], each with its own file"
                self.leave(key, None, node, fix)
            elif name == "quantization_config":
                self.take_quantization(value, node)
            elif name == "callbacks":
                for each in items:
                    self.drop(code_of(each.node, 120), each.node, reasons["callbacks"])
            elif name in reasons:
                self.drop(f"GRPOTrainer.{name}", node, reasons[name])
