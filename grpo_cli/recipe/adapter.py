"""An adapter that training goes on from: what it says itself is filled into the recipe."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_cli.issues import Issue
from grpo_cli.recipe.model import LoraConfig
from grpo_cli.recipe.yaml_tree import Node

_PATH = "model.adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def fill_from_adapter(tree: Node) -> list[Issue]:
    """Fill `model.path` and `model.lora` from what `model.adapter` names; return what is wrong with it.

    Afterwards `model.adapter` is the folder that holds the adapter's files.
    """
    model, named = tree.child("model"), tree.find(("model", "adapter"))
    if model is None or named is None or not isinstance(named.value, str):
        return []
    folder, base = _find(named.value)
    config = _read(folder / CONFIG) if folder else None
    if folder is None or config is None:
        return [_leave_out(model, _missing(named.value))]
    if config.get("peft_type") != "LORA" or config.get("task_type") not in ("CAUSAL_LM", None):
        kind = f"{config.get('peft_type')} for {config.get('task_type')}"
        fix = "name a LoRA adapter for CAUSAL_LM"
        seen = f"{named.value} is an adapter of another kind: {kind}"
        return [_leave_out(model, Issue(seen, fix, _PATH))]
    named.value = str(folder)
    base = base or {"path": config.get("base_model_name_or_path")}
    if model.child("path") is None:
        for key in ("path", "revision", "chat_template", "trust_remote_code"):
            if base.get(key) and key not in model.value:
                model.value[key] = Node(base[key], named.location)
    return list(_fill_lora(model, named, config))


def _leave_out(model: Node, problem: Issue) -> Issue:
    """Return the problem with its line, and take the adapter out of what is checked further."""
    return replace(problem, location=model.value.pop("adapter").location)


def _find(text: str) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the adapter's folder, and the `model` section of the run that it comes from, if it is one's."""
    path = Path(text)
    if not path.is_dir():
        return _find_in_cache(text), None
    run = path if (path / "resolved.json").is_file() else path.parent
    resolved = _read(run / "resolved.json") or {}
    model = resolved.get("recipe", {}).get("model")
    return (path / "model" if run == path else path).absolute(), model


def _find_in_cache(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(repository, CONFIG)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _missing(text: str) -> Issue:
    message = f"there is no adapter at {text}: no readable {CONFIG}"
    # A hub id has one `/` at most.
    if Path(text).exists() or text.startswith(("/", ".", "~")) or text.count("/") > 1:
        fix = f"name a finished run with `model.lora`, or a folder with {CONFIG} and {WEIGHTS}"
    else:
        fix = f"fetch it first: hf download {text}"
    return Issue(message, fix, _PATH)


def _fill_lora(model: Node, named: Node, config: dict[str, Any]) -> Iterator[Issue]:
    """Take the adapter's own settings; `model.lora` may repeat them, and may not differ."""
    lora = model.child("lora")
    if lora is None or not isinstance(lora.value, dict):
        model.value["lora"] = lora = Node({}, named.location)
    for key in LoraConfig.model_fields:
        if (own := config.get(key)) is None:
            continue
        written = lora.child(key)
        if written is None:
            items = [Node(each, named.location) for each in own] if isinstance(own, list) else own
            lora.value[key] = Node(items, named.location)
        elif key != "target_modules" and written.plain() != own:
            said, has = json.dumps(written.plain()), json.dumps(own)
            fix = f"write `{key}: {has}`, or leave out `lora`: the adapter is trained on as it is"
            seen = f"is {said}, and the adapter has {has}"
            yield Issue(seen, fix, f"model.lora.{key}", written.location)
