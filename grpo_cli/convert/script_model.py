"""The model, adapter and tokenizer of a Python script.

Source: peft 0.21 (`LoraConfig`), transformers 5 (`from_pretrained`), unsloth 2025.
"""

import ast
from typing import Any

from grpo_cli.convert.key_report import read_keys
from grpo_cli.convert.script_account import Bound, code_of_call, kind_of
from grpo_cli.convert.script_rows import ScriptRows
from grpo_cli.convert.script_values import (
    MISSING,
    Choice,
    Object,
    Value,
    code_of,
    plain,
    reachable,
)
from grpo_cli.convert.trl import LORA_NAMES, LORA_ONLY
from grpo_cli.recipe.grpo_fields import LORA_REFUSED

_LORA = {**LORA_NAMES, **{name: name for name in LORA_ONLY}, "task_type": "lora_task_type"}
"""Arguments of `LoraConfig` → the keys by which they are read here."""
_LORA_DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of `LoraConfig`; those of `trl grpo` and of recipes are others."""
_UNSLOTH_LORA = {
    "r": 16,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split(),
}
"""Defaults of unsloth's `get_peft_model`."""
_VISION = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "FastVisionModel")
_BITS = ("load_in_4bit", "load_in_8bit")
_UNSLOTH_VLLM = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_seq_length": "vllm_max_model_length",
}


class ScriptModel(ScriptRows):
    """Takes the model, adapter and tokenizer that a script gives `GRPOTrainer`."""

    def take_adapter(self, value: Value, node: ast.AST) -> None:
        """Take the `LoraConfig` that the trainer gets."""
        if plain(value) is None:
            return
        loras, _ = self.find(value, "LoraConfig")
        if len(loras) != 1:
            self.leave("model.lora", value, node)
            self.report.unread.add("model")
            if isinstance(value, Object):
                self._take_lora(value, {}, {})
            return
        self._take_lora(loras[0], self.bind(loras[0]), _LORA_DEFAULTS)
        options = getattr(value, "options", ())
        tests = [test for test, each in options if loras[0] in reachable(each)]
        if tests:
            when = f"makes it only if `{tests[0]}`; remove it otherwise"
            self.report.add_to_do("model.lora", f"{self.locate(loras[0].node)} {when}")

    def _take_lora(self, made: Object, bound: Bound, defaults: dict[str, Any]) -> None:
        self.put("use_peft", True, made.node)
        is_open = bool({"*", "**"} & bound.keys())
        for name in () if is_open else defaults.keys() - bound.keys():
            self.put(_LORA[name], defaults[name], made.node)
        reasons = read_keys("script-lora")
        for change in self.evaluator.assignments:
            if change.owner is made and not isinstance(change.key, tuple):
                self.account(change.node)
                bound[change.name] = (made.attrs.get(change.name, change.value), change.node)
        for name, (value, node) in bound.items():
            data = plain(value)
            if name in ("*", "**"):
                self.leave("model.lora", value, node, "write what it holds")
                self.report.unread.add("model")
            elif name == "use_gradient_checkpointing" and data is not MISSING:
                if "gradient_checkpointing" not in self.report.tree.value:
                    self.put("gradient_checkpointing", bool(data), node)
            elif data is None and name in _LORA:
                self.drop(f"LoraConfig.{name}", node, "None, so the default holds")
            elif name not in _LORA:
                reason = reasons.get(name) or LORA_REFUSED.get(name, "unknown to peft")
                self.drop(f"LoraConfig.{name}", node, reason.removeprefix("remove it: "))
            elif data is MISSING:
                self.leave(f"model.lora.{name}", value, node)
            else:
                self.put(_LORA[name], data, node)

    def take_model(self, value: Value, node: ast.AST) -> None:
        """Take the model that the trainer gets: its name, or how it is loaded and changed."""
        if isinstance(plain(value), str):
            self.put("model_name_or_path", plain(value), node)
            return
        self.parts[id(value)] = "model"
        bases, passes = self.find(value, "model")
        if len(bases) != 1:
            self.leave("model.path", value, node, "name the model")
            self.report.unread.add("model")
            return
        for made in passes:
            self._take_wrapper(made, bases[0])
        if "AutoPeft" in bases[0].name:
            self._take_adapter_folder(bases[0], ["model_id"])
        else:
            self._take_pretrained(bases[0])

    def _take_wrapper(self, made: Object, base: Object) -> None:
        """Take a call that a model passes through on its way to the trainer."""
        test = self.when(made)
        when = f"only if `{test}`: " if test else ""
        name = made.last_name
        self.account(made.node)
        if name == "get_peft_model":
            self._take_peft(made, base)
            if when:
                text = f"makes it only if `{test}`; remove it otherwise"
                self.report.add_to_do("model.lora", f"{self.locate(made.node)} {text}")
        elif name == "from_pretrained" and when:
            self.leave("model.lora", None, made.node, f"{when}write it, or leave it out")
            self.report.unread.add("model")
        elif name == "from_pretrained":
            self._take_adapter_folder(made, ["model", "model_id"])
        elif name == "merge_and_unload":
            self.leave("model.path", None, made.node, "save the merged model, and name its folder")
        else:
            reasons = read_keys("script-model")
            reason = reasons.get(name, "what it does to the model is not read")
            self.drop(code_of_call(made), made.node, f"{when}{reason}")

    def _take_peft(self, made: Object, base: Object) -> None:
        bound = self.bind(made, ["model", "peft_config"])
        bound = {name: each for name, each in bound.items() if base not in reachable(each[0])}
        config = bound.pop("peft_config", None)
        if config is not None:
            self.take_adapter(*config)
            self.drop_all("get_peft_model", bound, {})
        elif bound:
            self._take_lora(made, bound, _UNSLOTH_LORA)
        else:
            self.leave("model.lora", None, made.node)

    def _take_adapter_folder(self, made: Object, parameters: list[str]) -> None:
        """Take `PeftModel.from_pretrained(model, folder)`."""
        bound = self.bind(made, parameters)
        bound.pop("model", None)
        folder, node = bound.get("model_id", (None, made.node))
        if isinstance(plain(folder), str):
            self.extra["model.adapter"] = ("PeftModel.from_pretrained", plain(folder), node)
        else:
            self.leave("model.adapter", folder, node, "name the adapter's folder")
        bound.pop("model_id", None)
        reasons = {"is_trainable": "an adapter of a recipe is always trained"}
        self.drop_all("PeftModel", bound, reasons, "`model.adapter` takes a folder")

    def _take_pretrained(self, made: Object) -> None:
        """Take `from_pretrained(…)`; its default precision is the checkpoint's."""
        bound = self.bind(made, ["path"])
        for name in ("model_name", "pretrained_model_name_or_path"):
            if name in bound:
                bound["path"] = bound.pop(name)
        path, node = bound.get("path", (None, made.node))
        bound.pop("path", None)
        if isinstance(plain(path), str):
            self.put("model_name_or_path", plain(path), node)
        else:
            self.leave("model.path", path, node, "name the model")
        if "Fast" in made.name:
            self._take_unsloth(bound, made)
        if made.name.split(".")[-2] in _VISION:
            fix = "name the column with images, as in `prompt: {images: image}`"
            self.leave("dataset.prompt.images", None, made.node, fix)
        init: dict[str, Any] = {"dtype": "auto"}
        reasons = read_keys("script-from-pretrained")
        for name, (value, at) in bound.items():
            data, key = plain(value), name.replace("torch_dtype", "dtype")
            if name in ("*", "**"):
                self.leave("model.init_kwargs", value, at, "write what it holds")
                self.report.unread.add("model")
            elif name in reasons:
                self.drop(f"from_pretrained.{name}", at, reasons[name])
            elif name == "quantization_config":
                self.take_quantization(value, at)
            elif name in _BITS and data is not MISSING:
                self.put(name, data, at)
            elif data is MISSING:
                self.leave(f"model.{'quantization' if name in _BITS else key}", value, at)
                init.pop(key, None)
            elif data is not None:
                self.account(at)
                init[key] = data
        if init:
            self.put("model_init_kwargs", init, made.node)

    def _take_unsloth(self, bound: Bound, made: Object) -> None:
        """Take what unsloth's `from_pretrained` has besides transformers'."""
        reasons = read_keys("script-unsloth")
        is_fast, is_full = (
            name in bound and plain(bound[name][0]) is True
            for name in ("fast_inference", "full_finetuning")
        )
        if "load_in_4bit" not in bound and not is_full:
            self.put("load_in_4bit", True, made.node)
        if is_fast:
            self.put("use_vllm", True, bound.pop("fast_inference")[1])
        elif "fast_inference" in bound and plain(bound["fast_inference"][0]) is MISSING:
            self.leave("generation.backend", *bound.pop("fast_inference"))
            self.report.unread.add("generation")
        for name in [each for each in _UNSLOTH_VLLM if each in bound]:
            (value, node), key = bound.pop(name), _UNSLOTH_VLLM[name]
            if plain(value) is MISSING:
                self.leave(f"generation.{key.replace('vllm_', 'vllm.')}", value, node)
            elif key not in self.report.tree.value and (is_fast or self.report.is_on("use_vllm")):
                target = f"generation.{key.replace('vllm_', 'vllm.')}"
                self.extra[target] = (f"from_pretrained.{name}", plain(value), node)
            else:
                self.drop(f"from_pretrained.{name}", node, reasons[name])
        unsloths = {name: bound.pop(name) for name in [*bound] if name in reasons}
        self.drop_all("from_pretrained", unsloths, reasons)

    def take_quantization(self, value: Value, node: ast.AST) -> None:
        """Take the bits of `BitsAndBytesConfig(…)`."""
        if plain(value) is None:
            return
        made, _ = self.find(value, "BitsAndBytesConfig")
        bits = [name for name in _BITS if made and plain((made[0].args or {}).get(name)) is True]
        # One that depends on a condition is left to the user.
        if len(made) != 1 or isinstance(value, Choice) or not bits:
            self.leave("model.quantization", value, node, "write `4bit` or `8bit`")
            return
        bound = self.bind(made[0])
        self.put(bits[0], True, bound.pop(bits[0])[1])
        reason = "4bit is always NF4 with double quantization, computed in the training's precision"
        self.drop_all("BitsAndBytesConfig", bound, {}, reason)

    # The tokenizer.

    def take_tokenizer(self, value: Value, node: ast.AST) -> None:
        """Take what is done to the tokenizer that the trainer gets."""
        self.parts[id(value)] = "tokenizer"
        loaded, _ = self.find(value, "from_pretrained")
        if not loaded and plain(value) is not None:
            reason = f"the tokenizer is that of `model.path`; what `{code_of(node)}` has besides is not read"
            self.drop("GRPOTrainer.processing_class", node, reason)
        for made in self.made:
            if made.last_name == "get_chat_template" and made in reachable(value):
                fix = "write unsloth's template as Jinja"
                self.leave("model.chat_template", None, made.node, fix)

    def take_tokenizers(self) -> None:
        """Take the settings of all tokenizers and processors that the script loads."""
        reasons, model = read_keys("script-tokenizer"), self.report.get("model_name_or_path")
        loaded = {id(each.node): each for each in self.made if kind_of(each) == "tokenizer"}
        for made in loaded.values():
            bound = self.bind(made, ["pretrained_model_name_or_path"])
            for name, (value, node) in bound.items():
                key = f"{made.name.split('.')[-2]}.{name}"
                if name == "pretrained_model_name_or_path":
                    if model is None or model != plain(value):
                        reason = "the tokenizer is that of `model.path`"
                        self.drop(code_of(made.node), made.node, reason)
                elif name in reasons or "Processor" not in made.name:
                    reason = "the tokenizer is that of `model.path`, as it was saved"
                    self.drop(key, node, reasons.get(name, reason))
                elif plain(value) is MISSING:
                    self.leave(f"model.processor.{name}", value, node)
                else:
                    self.extra[f"model.processor.{name}"] = (key, plain(value), node)
        for change in self.evaluator.assignments:
            if change.name != "chat_template":
                continue
            owner = change.owner
            template = owner.attrs.get("chat_template") if isinstance(owner, Object) else None
            if isinstance(plain(template), str):
                key = code_of(getattr(change.node, "targets", [change.node])[0])
                self.extra["model.chat_template"] = (key, plain(template), change.node)
            else:
                fix = "write it as Jinja, or name its file"
                self.leave("model.chat_template", change.value, change.node, fix)
