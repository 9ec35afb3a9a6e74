"""The model, the adapter and the tokenizer that a Python script gives `GRPOTrainer`.

Source: peft 0.21 (`LoraConfig`), transformers 5 (`from_pretrained`), unsloth 2025 (`FastLanguageModel`).
"""

import ast
from typing import Any

from grpo_cli.convert.key_report import read_keys
from grpo_cli.convert.script_rows import ScriptRows
from grpo_cli.convert.script_values import (
    MISSING,
    Choice,
    Known,
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
_BITS = ("load_in_4bit", "load_in_8bit")


class ScriptModel(ScriptRows):
    """What a script gives `GRPOTrainer` as model, adapter and tokenizer."""

    def take_adapter(self, value: Value | None) -> None:
        """Take the `LoraConfig` that the trainer gets."""
        if value is None or plain(value) is None:
            return
        lora = self.find_in(value, lambda made: made.last_name == "LoraConfig")
        if lora is None:
            self.leave("model.lora", value, self.nodes_of["peft_config"])
            self.report.unread.add("model")
        else:
            self._take_lora(lora, lora.args or {}, _LORA_DEFAULTS)
            tests = [
                test for test, each in getattr(value, "options", ()) if lora in reachable(each)
            ]
            if tests:
                text = f"{self.place(lora.node)} makes it only if `{tests[0]}`; remove it otherwise"
                self.add_to_do("model.lora", text)

    def _take_lora(self, made: Object, args: dict[str, Value], defaults: dict[str, Any]) -> None:
        self.put("use_peft", True, made.node)
        for name in defaults.keys() - args.keys():
            self.put(_LORA[name], defaults[name], made.node)
        dropped = read_keys("script-lora")
        for name, value in args.items():
            self.done.add((id(made), name))
            node, literal = self.node_of(made, name), plain(value)
            if name == "use_gradient_checkpointing":
                if (
                    literal is not MISSING
                    and "gradient_checkpointing" not in self.report.tree.value
                ):
                    self.put("gradient_checkpointing", bool(literal), node)
            elif name in ("*", "**"):
                self.leave("model.lora", value, node, "write what it holds")
            elif name not in _LORA or literal is None:
                reason = dropped.get(name) or LORA_REFUSED.get(name, "unknown to peft")
                reason = "None, so the default holds" if literal is None else reason
                self.drop(f"LoraConfig.{name}", node, reason.removeprefix("remove it: "))
            elif literal is MISSING:
                self.leave(f"model.lora.{name}", value, node)
            else:
                self.put(_LORA[name], literal, node)
        for change in self.evaluator.assignments:
            if change.owner is made:
                self.done.add((id(change), ""))
                self.leave(
                    f"model.lora.{change.name}", change.value, change.node, "it is set later"
                )

    def take_model(self, value: Value) -> None:
        """Take the model that the trainer gets: its name, or how it is loaded and changed."""
        node = self.nodes_of["model"]
        literal = plain(value)
        if isinstance(literal, str):
            self.put("model_name_or_path", literal, node)
            return
        if isinstance(value, Choice) and self._take_model_if(value):
            return
        while (
            isinstance(value, Object)
            and value.last_name.startswith("[")
            and isinstance(value.owner, Object)
        ):
            value = value.owner  # as in `model, tokenizer = FastLanguageModel.from_pretrained(…)`
        if isinstance(value, Object) and value.is_call:
            self.reached.append(value)
            name = value.last_name
            args = value.args or {}
            inner = value.owner or args.get("model") or args.get("0")
            if name == "from_pretrained" and "Peft" in value.name:
                self._take_peft_model(value, inner)
                return
            if name == "from_pretrained":
                self._take_pretrained(value)
                return
            if inner is not None and not isinstance(inner, Known):
                self._take_wrapped_model(value, inner)
                return
        self.leave("model.path", value, node, "name the model")
        self.report.unread.add("model")

    def _take_model_if(self, value: Choice) -> bool:
        """Take a model of which a condition decides what is done to it; False if it decides on the model."""
        loads = [
            [
                each
                for each in reachable(option)
                if isinstance(each, Object) and self.loads_model(each)
            ]
            for _, option in value.options
        ]
        if any(len(load) != 1 or load[0] is not loads[0][0] for load in loads):
            return False
        base = loads[0][0]
        made = [each for each in reachable(value) if isinstance(each, Object) and each.is_call]
        for each in made:
            if each.last_name == "get_peft_model" or "Peft" in each.name:
                when = f"only if `{each.condition}`; " if each.condition else ""
                self.leave("model.lora", None, each.node, f"{when}write it, or leave it out")
                self.report.unread.add("model")
                self.done |= {(id(each), name) for name in ("", *(each.args or {}))}
        self.take_model(base)
        return True

    def _take_wrapped_model(self, made: Object, inner: Value) -> None:
        """Take what is done to a model before the trainer gets it, and the model inside."""
        is_first = next(iter(made.args or {}), None) if made.owner is not inner else None
        if is_first:
            self.done.add((id(made), is_first))
        args = {name: value for name, value in (made.args or {}).items() if value is not inner}
        if made.last_name == "get_peft_model":
            config = args.get("peft_config") or args.get("1")
            lora = self.find_in(config, lambda each: each.last_name == "LoraConfig")
            if lora is not None:
                self.done |= {(id(made), name) for name, each in args.items() if each is config}
                self._take_lora(lora, lora.args or {}, _LORA_DEFAULTS)
            elif config is None and args:
                self._take_lora(made, args, _UNSLOTH_LORA)
            else:
                self.leave("model.lora", config, made.node)
        elif made.last_name == "merge_and_unload":
            self.leave("model.path", made, made.node, "save the merged model, and name its folder")
        else:
            reason = read_keys("script-model").get(
                made.last_name, "what it does to the model is not read"
            )
            self.drop(code_of(made.node), made.node, reason)
            self.done |= {(id(made), name) for name in made.args or {}}
        self.done.add((id(made), ""))
        self.take_model(inner)

    def _take_peft_model(self, made: Object, inner: Value | None) -> None:
        args = made.args or {}
        folder = args.get("model_id") or args.get("1")
        is_auto = "Auto" in made.name
        folder = inner if is_auto else folder
        for name, value in args.items():
            self.done.add((id(made), name))
            if value is folder and isinstance(plain(folder), str):
                self.extra["model.adapter"] = (
                    "PeftModel.from_pretrained",
                    plain(folder),
                    self.node_of(made, name),
                )
            elif value is folder:
                self.leave(
                    "model.adapter", value, self.node_of(made, name), "name the adapter's folder"
                )
            elif value is not inner:
                reason = (
                    "an adapter of a recipe is always trained" if name == "is_trainable" else ""
                )
                self.drop(
                    f"PeftModel.{name}",
                    self.node_of(made, name),
                    reason or "`model.adapter` takes a folder",
                )
        if not is_auto and inner is not None:
            self.take_model(inner)

    def _take_pretrained(self, made: Object) -> None:
        """Take `from_pretrained(…)`; its default precision is the checkpoint's."""
        args, is_unsloth = dict(made.args or {}), "Fast" in made.name
        self.done |= {(id(made), name) for name in args}
        nodes = {name: self.node_of(made, name) for name in args}
        key = next(
            (each for each in ("0", "model_name", "pretrained_model_name_or_path") if each in args),
            None,
        )
        if key is None:
            self.leave("model.path", made, made.node, "name the model")
        else:
            path, literal = args.pop(key), plain(made.args[key] if made.args else None)
            if isinstance(literal, str):
                self.put("model_name_or_path", literal, nodes[key])
            else:
                self.leave("model.path", path, nodes[key], "name the model")
        if is_unsloth:
            self._take_unsloth(args, nodes, made)
        reasons = read_keys("script-from-pretrained")
        init: dict[str, Any] = (
            {} if is_unsloth and plain(args.get("dtype")) is None else {"dtype": "auto"}
        )
        for name, value in args.items():
            literal = plain(value)
            if name in ("*", "**"):
                self.leave("model.init_kwargs", value, nodes[name], "write what it holds")
                self.report.unread.add("model")
            elif name in reasons:
                self.drop(f"from_pretrained.{name}", nodes[name], reasons[name])
            elif name == "quantization_config":
                self.take_quantization(value, nodes[name])
            elif name in _BITS:
                self.put(name, literal if literal is not MISSING else None, nodes[name])
            elif literal is MISSING:
                self.leave(f"model.{name}".replace("torch_dtype", "dtype"), value, nodes[name])
            elif literal is not None:
                init[name.replace("torch_dtype", "dtype")] = literal
        init.setdefault("dtype", "auto")
        self.put("model_init_kwargs", init, made.node)

    def _take_unsloth(
        self, args: dict[str, Value], nodes: dict[str, ast.AST], made: Object
    ) -> None:
        """Take what unsloth's `from_pretrained` has besides transformers'."""
        config = self.report.tree.value
        is_fast = plain(args.get("fast_inference")) is True
        renamed = {
            "gpu_memory_utilization": "vllm_gpu_memory_utilization",
            "max_seq_length": "vllm_max_model_length",
        }
        if "load_in_4bit" not in args and plain(args.get("full_finetuning")) is not True:
            self.put("load_in_4bit", True, made.node)
        if "fast_inference" in args and is_fast:
            self.put("use_vllm", True, nodes["fast_inference"])
        for name, key in renamed.items():
            value = args.pop(name, None)
            literal = plain(value)
            if value is None:
                continue
            if literal is MISSING:
                self.leave(f"generation.{key.replace('vllm_', 'vllm.')}", value, nodes[name])
            elif key not in config and (is_fast or self.report.is_on("use_vllm")):
                self.put(key, literal, nodes[name])
            else:
                reason = (
                    "only vLLM reads it"
                    if "gpu" in name
                    else ("set `dataset.max_prompt_length` and `generation.max_completion_length`")
                )
                self.drop(f"from_pretrained.{name}", nodes[name], reason)
        for name in [each for each in args if each in read_keys("script-unsloth")]:
            args.pop(name)
            if f"{name}" not in ("fast_inference",) or not is_fast:
                self.drop(f"from_pretrained.{name}", nodes[name], read_keys("script-unsloth")[name])

    def take_quantization(self, value: Value, node: ast.AST) -> None:
        """Take the bits of `BitsAndBytesConfig(…)`."""
        if plain(value) is None:
            return
        made = self.find_in(value, lambda each: each.last_name == "BitsAndBytesConfig")
        # One that depends on a condition is left to a person.
        args = (made.args or {}) if made is not None and not isinstance(value, Choice) else {}
        keys = [key for key in _BITS if plain(args.get(key)) is True]
        if made is None or not keys:
            self.leave("model.quantization", value, node, "write `4bit` or `8bit`")
            return
        for name in args:
            self.done.add((id(made), name))
            if name in keys:
                self.put(name, True, self.node_of(made, name))
            else:
                reason = "4bit is always NF4 with double quantization here, computed in the training's precision"
                self.drop(f"BitsAndBytesConfig.{name}", self.node_of(made, name), reason)

    def take_tokenizer(self, value: Value) -> None:
        """Take what the script sets on its tokenizer or processor."""
        while isinstance(value, Object) and not value.is_call and isinstance(value.owner, Object):
            value = value.owner
        if isinstance(value, Object) and value.is_call and value.last_name != "from_pretrained":
            args = value.args or {}
            inner = value.owner or args.get("tokenizer") or args.get("0")
            if value.last_name == "get_chat_template":
                self.leave(
                    "model.chat_template", value, value.node, "write unsloth's template as Jinja"
                )
                self.done |= {(id(value), name) for name in ("", *args)}
            if isinstance(inner, Object):
                self.take_tokenizer(inner)

    def take_tokenizers(self) -> None:
        """Take the settings of all tokenizers and processors that the script loads."""
        reasons = read_keys("script-tokenizer")
        for made in self.evaluator.made:
            if made.last_name != "from_pretrained" or not self.is_tokenizer(made):
                continue
            is_processor = "Processor" in made.name
            for name, value in (made.args or {}).items():
                if (id(made), name) in self.done:
                    continue
                self.done.add((id(made), name))
                node, literal = self.node_of(made, name), plain(value)
                if name in ("0", "pretrained_model_name_or_path"):
                    model = self.report.tree.value.get("model_name_or_path")
                    if model is None or model.plain() != literal:
                        reason = "the tokenizer is that of `model.path`"
                        self.drop(code_of(made.node), made.node, reason)
                elif name in reasons or not is_processor:
                    reason = reasons.get(
                        name, "the tokenizer is that of `model.path`, as it was saved"
                    )
                    self.drop(f"{made.name.split('.')[-2]}.{name}", node, reason)
                elif literal is MISSING:
                    self.leave(f"model.processor.{name}", value, node)
                else:
                    self.processor[name] = literal
        for change in self.evaluator.assignments:
            if change.name == "chat_template":
                self.done.add((id(change), ""))
                literal = plain(change.owner.attrs.get("chat_template", change.value))
                if isinstance(literal, str):
                    self.extra["model.chat_template"] = (
                        code_of(_target_of(change.node)),
                        literal,
                        change.node,
                    )
                else:
                    self.leave(
                        "model.chat_template",
                        change.value,
                        change.node,
                        "write it as Jinja, or name its file",
                    )


def _target_of(node: ast.AST) -> ast.AST:
    """Return what an assignment sets."""
    return node.targets[0] if isinstance(node, ast.Assign) else node
