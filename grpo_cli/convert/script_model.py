"""The model, adapter and tokenizer of a Python script.

Source: peft 0.21 (`LoraConfig`), transformers 5 (`from_pretrained`), unsloth 2025.
"""

import ast
from typing import Any

from grpo_cli.convert.key_report import read_keys
from grpo_cli.convert.script_account import NOT_REACHED, Bound
from grpo_cli.convert.script_parts import advice_for, code_of_call, describe, find_target, kind_of
from grpo_cli.convert.script_rows import ScriptRows
from grpo_cli.convert.script_values import (
    MISSING,
    NAMES,
    Choice,
    Object,
    Value,
    code_of,
    default_of,
    describe_test,
    plain,
    reachable,
)
from grpo_cli.convert.trl import LORA, LORA_NAMES, LORA_ONLY
from grpo_cli.recipe.grpo_fields import LORA_REFUSED

_LORA = {**LORA_NAMES, **{name: name for name in LORA_ONLY}, "task_type": "lora_task_type"}
"""Arguments of `LoraConfig` → the keys by which they are read here."""
_ONLY_VLLM = "only vLLM reads it here; see `dataset.max_prompt_length` and `generation.max_completion_length`"


class ScriptModel(ScriptRows):
    """Takes the model, adapter and tokenizer that a script gives `GRPOTrainer`."""

    _path = ""
    """The code of the model's name."""

    def take_adapter(self, value: Value, node: ast.AST) -> None:
        """Take the `LoraConfig` that the trainer gets."""
        if plain(value) is None:
            return
        if self._take_flags("get_peft_config", value, node, {"use_peft", *LORA}):
            return
        loras, _ = self.find(value, "LoraConfig")
        if len(loras) != 1:
            self.leave("model.lora", value, node, unread=("model",))
            if isinstance(value, Object):
                self._take_lora(value, {}, {})
            return
        self._take_lora(loras[0], self.bind(loras[0]), read_keys("peft-lora-defaults"))
        options = getattr(value, "options", ())
        tests = [test for test, each in options if loras[0] in reachable(each)]
        if tests:
            self._leave_adapter(loras[0].node, tests[0])

    def _take_lora(self, made: Object, bound: Bound, defaults: dict[str, Any]) -> None:
        self.put("use_peft", True, made.node)
        stars = {name: bound.pop(name) for name in ("*", "**") if name in bound}
        for value, node in stars.values():
            self.leave("model.lora", value, node, advice_for(value), unread=("model",))
        for name in () if stars else defaults.keys() - bound.keys():
            self.put(_LORA[name], defaults[name], made.node)
        bound |= self.changes_of((made,))
        checkpointing = bound.pop("use_gradient_checkpointing", None)
        if checkpointing and "gradient_checkpointing" in self.report.tree.value:
            reason = "`gradient_checkpointing` of the config is taken"
            self.drop(f"{made.last_name}.use_gradient_checkpointing", checkpointing[1], reason)
        elif checkpointing:
            is_on = plain(checkpointing[0]) is not False
            self.put("gradient_checkpointing", is_on, checkpointing[1])
        for name in bound.keys() & LORA_REFUSED.keys() - _LORA.keys():
            reason = LORA_REFUSED[name].removeprefix("remove it: ")
            self.drop(f"LoraConfig.{name}", bound.pop(name)[1], reason)
        self.take_all("LoraConfig", bound, "script-lora", "unknown to peft", _LORA)

    def _take_flags(self, function: str, value: Value, node: ast.AST, names: set[str]) -> bool:
        """Take what a function of TRL's makes of a known command line; return whether it is that."""
        if not isinstance(value, Object) or value.last_name != function:
            return False
        configs, _ = self.find(value, "ModelConfig")
        bound = self.bind(configs[0]) if configs else {"**": (value, node)}
        for name in bound.keys() & names if "**" not in bound else ():
            setting, at = bound[name]
            if plain(setting) is MISSING:
                self.leave(find_target(name) or "model.lora", setting, at)
            else:
                self.put(name, plain(setting), at)
        self.account(node)
        return "**" not in bound

    def _leave_adapter(self, node: ast.AST, test: str) -> None:
        """Leave an adapter that is made under a condition to the user, with what that is by default."""
        value = self.evaluator.tests.get(test)
        about = describe(value, value.node) if value and default_of(value) is not MISSING else ""
        text = f"makes it only {describe_test(test)}{about}; remove it otherwise"
        self.report.add_to_do("model.lora", f"{self.locate(node)} {text}")

    def take_model(self, value: Value, node: ast.AST) -> None:
        """Take the model that the trainer gets: its name, or how it is loaded and changed."""
        if isinstance(plain(value), str):
            self._take_path(value, node)
            return
        self._path = code_of(value.node)
        self.name_part(value, "model")
        bases, passes = self.find(value, "model")
        for made in passes if bases else ():
            self._take_wrapper(made, bases)
        kinds = {("Peft" in made.name, "Fast" in made.name) for made in bases}
        if len(kinds) != 1 or sum(not self.when(made) for made in bases) > 1:
            self.leave("model.path", value, node, "name the model", unread=("model",))
        elif "AutoPeft" in bases[0].name and len(bases) == 1:
            self._take_adapter_folder(bases[0], ["model_id"])
        else:
            self._take_pretrained(self._join_branches(bases))

    def _take_path(self, path: Value | None, node: ast.AST) -> None:
        """Take the name of the model; an empty one is left to the user."""
        self._path = code_of(path.node) if path is not None else ""
        if plain(path) and isinstance(plain(path), str):
            self.put("model_name_or_path", plain(path), node)
        else:
            self.leave("model.path", path, node, "name the model")

    def _join_branches(self, bases: list[Object]) -> Object:
        """Return the calls of several branches as one, with a choice of each argument that differs."""
        if len(bases) == 1:
            return bases[0]
        options = []
        for made in bases:
            args = {name: value for name, (value, _) in self.bind(made, NAMES["paths"][:1]).items()}
            path = next(
                (args.pop(name) for name in NAMES["paths"] if name in args), Object(made.node)
            )
            options.append((self.when(made), {NAMES["paths"][0]: path, **args}))
            self.account(made.node, inside=True)
        return Object(bases[0].node, bases[0].name, args=Choice.merge(bases[0].node, options))

    def _take_wrapper(self, made: Object, bases: list[Object]) -> None:
        """Take a call that a model passes through on its way to the trainer."""
        test = self.when(made)
        when = f"only {describe_test(test)}: " if test else ""
        name = made.last_name
        self.account(made.node)
        if name == "get_peft_model":
            self._take_peft(made, bases)
            if when:
                self._leave_adapter(made.node, test)
        elif name == "from_pretrained" and when:
            self.leave(
                "model.lora", None, made.node, f"{when}write it, or leave it out", unread=("model",)
            )
        elif name == "from_pretrained":
            self._take_adapter_folder(made, ["model", "model_id"])
        elif name == "merge_and_unload":
            self.leave("model.path", None, made.node, "save the merged model, and name its folder")
        else:
            reasons = read_keys("script-model")
            reason = reasons.get(name, "what it does to the model is not read")
            self.drop(code_of_call(made), made.node, f"{when}{reason}")

    def _take_peft(self, made: Object, bases: list[Object]) -> None:
        bound = self.bind(made, ["model", "peft_config"])
        bound = {name: each for name, each in bound.items() if not {*bases} & {*reachable(each[0])}}
        config = bound.pop("peft_config", None)
        if config is not None:
            self.take_adapter(*config)
            self.drop_all("get_peft_model", bound, "not an argument of peft's `get_peft_model`")
        elif bound:
            self._take_lora(made, bound, read_keys("unsloth-lora-defaults"))
        else:
            self.leave("model.lora", None, made.node)

    def _take_adapter_folder(self, made: Object, parameters: list[str]) -> None:
        """Take `PeftModel.from_pretrained(model, folder)`."""
        bound = self.bind(made, parameters)
        bound.pop("model", None)
        folder, node = bound.get("model_id", (None, made.node))
        if isinstance(plain(folder), str):
            self.write("model.adapter", "PeftModel.from_pretrained", plain(folder), node)
        else:
            self.leave("model.adapter", folder, node, "name the adapter's folder")
        bound.pop("model_id", None)
        self.take_all("PeftModel", bound, "script-peft", "`model.adapter` takes a folder")

    def _take_pretrained(self, made: Object) -> None:
        """Take `from_pretrained(…)`; its default precision is the checkpoint's."""
        bound = self.bind(made, NAMES["paths"][:1])
        path, node = next(
            (bound.pop(name) for name in NAMES["paths"] if name in bound), (None, made.node)
        )
        self._take_path(path, node)
        if "Fast" in made.name:
            self._take_unsloth(bound, made)
        if made.name.split(".")[-2] in NAMES["vision"]:
            fix = "name the column with images, as in `prompt: {images: image}`"
            self.leave("dataset.prompt.images", None, made.node, fix)
        for name in bound.keys() & {"*", "**"}:
            value, at = bound.pop(name)
            self.leave("model.init_kwargs", value, at, advice_for(value), unread=("model",))
        if "quantization_config" in bound:
            self.take_quantization(*bound.pop("quantization_config"))
        self.take_all("from_pretrained", bound, "script-from-pretrained")
        init: dict[str, Any] = {"dtype": "auto"}
        for name, (value, at) in bound.items():
            data, key = plain(value), name.replace("torch_dtype", "dtype")
            if data is MISSING:
                self.leave(f"model.{key}", value, at)
                init.pop(key, None)
            elif data is not None:
                self.account(at)
                init[key] = data
        if init:
            self.put("model_init_kwargs", init, made.node)
            self.report.show_as("model_init_kwargs", "from_pretrained")

    def _take_unsloth(self, bound: Bound, made: Object) -> None:
        """Take what unsloth's `from_pretrained` has besides transformers'."""
        fast = plain(bound["fast_inference"][0]) if "fast_inference" in bound else None
        full = plain(bound.get("full_finetuning", (None,))[0])
        if "load_in_4bit" not in bound and full is not True:
            self.put("load_in_4bit", True, made.node)
        if fast is True:
            at = bound.pop("fast_inference")[1]
            self.put("use_vllm", True, at)
            self.put("vllm_mode", self.report.get("vllm_mode") or "colocate", at)
        elif fast is MISSING:
            self.leave("generation.backend", *bound.pop("fast_inference"), unread=("generation",))
        for name, target in read_keys("script-unsloth")["keep"].items():
            key = target.removeprefix("generation.").replace("vllm.", "vllm_")
            if name in bound and (
                key in self.report.tree.value or not (fast or self.report.is_on("use_vllm"))
            ):
                self.drop(f"from_pretrained.{name}", bound.pop(name)[1], _ONLY_VLLM)
        self.take_all("from_pretrained", bound, "script-unsloth")

    def take_quantization(self, value: Value, node: ast.AST) -> None:
        """Take the bits of `BitsAndBytesConfig(…)`."""
        if plain(value) is None or self._take_flags(
            "get_quantization_config", value, node, {*NAMES["bits"]}
        ):
            return
        made, _ = self.find(value, "BitsAndBytesConfig")
        bits = [
            name for name in NAMES["bits"] if made and plain((made[0].args or {}).get(name)) is True
        ]
        # One that depends on a condition is left to the user.
        if len(made) != 1 or isinstance(value, Choice) or not bits:
            self.leave("model.quantization", value, node, "write `4bit` or `8bit`")
            return
        bound = self.bind(made[0])
        self.put(bits[0], True, bound.pop(bits[0])[1])
        reason = "4bit is always NF4 with double quantization, computed in the training's precision"
        self.drop_all("BitsAndBytesConfig", bound, reason)

    # The tokenizer.

    def take_tokenizer(self, value: Value, node: ast.AST) -> None:
        """Take what is done to the tokenizer that the trainer gets."""
        self.name_part(value, "tokenizer")
        loaded, passes = self.find(value, "from_pretrained")
        if not loaded and plain(value) is not None:
            reason = f"the tokenizer is that of `model.path`; the settings of `{code_of(node)}` are not read"
            self.drop("GRPOTrainer.processing_class", node, reason)
        for made in self.made:
            if made.last_name == "get_chat_template" and made in reachable(value):
                name = self.bind(made, ["tokenizer", "chat_template"]).get("chat_template", (None,))
                about = name[0] if plain(name[0]) is MISSING else None
                fix = "write unsloth's template as Jinja"
                self.account(made.node, inside=True)
                self.leave("model.chat_template", about, made.node, fix)
            elif made in passes and not kind_of(made):
                reason = "what it does to the tokenizer is not read"
                self.drop(code_of_call(made), made.node, reason)

    def take_tokenizers(self, used: Value | None) -> None:
        """Take the settings of all tokenizers and processors that the script loads."""
        model = self.report.get("model_name_or_path")
        reason = "the tokenizer is that of `model.path`"
        loaded = {each.node: each for each in self.made if kind_of(each) == "tokenizer"}
        for made in loaded.values():
            bound = self.bind(made, ["pretrained_model_name_or_path"])
            path, node = bound.pop("pretrained_model_name_or_path", (None, made.node))
            self.account(node)
            is_models = path is not None and code_of(path.node) == self._path
            if model is None or model != plain(path):
                is_used = is_models or made in reachable(used)
                self.drop(code_of(made.node), made.node, reason if is_used else NOT_REACHED)
            home = "model.processor" if "Processor" in made.name else ""
            prefix = made.name.split(".")[-2]
            self.take_all(
                prefix, bound, "script-tokenizer", f"{reason}, as it was saved", home=home
            )
        for change in self.evaluator.assignments:
            owner = change.owner
            if change.name != "chat_template" or not isinstance(owner, Object):
                continue
            template = plain(owner.attrs.get("chat_template"))
            if isinstance(template, str):
                key = code_of(getattr(change.node, "targets", [change.node])[0])
                self.write("model.chat_template", key, template, change.node)
            else:
                fix = "write it as Jinja, or name its file"
                self.leave("model.chat_template", change.value, change.node, fix)
