"""An adapter that training goes on from: what it says itself is filled into the recipe."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_cli.issues import Issue
from grpo_cli.recipe.grpo_fields import LORA_VARIANTS, fields_in
from grpo_cli.recipe.model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, REWRITING_INITS, LoraConfig
from grpo_cli.recipe.yaml_tree import Node, as_node

_PATH = "model.adapter"
_RESOLVED = "resolved.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def fill_from_adapter(tree: Node) -> list[Issue]:
    """Fill `model.path` and `model.lora` from what `model.adapter` names; return what is wrong with it.

    Afterwards `model.adapter.path` is the folder that holds the adapter's files.
    """
    model, named = tree.child("model"), tree.find(("model", "adapter"))
    if model is None or named is None or named.value is None:
        return []
    try:
        folder, base = _find(named)
        config = _read_lora(folder)
        if model.child("path") is None:
            _fill_path(model, named, folder, base or {"path": config["base_model_name_or_path"]})
    except _AdapterError as error:
        where = model.value.pop("adapter").location
        # The remaining checks assume that an adapter is trained.
        model.value.setdefault("lora", Node({}, where))
        return [replace(error.issue, location=where)]
    options = named.value if isinstance(named.value, dict) else {}
    # The commit is in the path of a download.
    options.pop("revision", None)
    named.value = {**options, "path": Node(str(folder), named.location)}
    if base and (base.get("lora") or {}).get("target_modules") == "all-linear":
        config["target_modules"] = "all-linear"
    return list(_fill_lora(model, named, config))


class _AdapterError(Exception):
    def __init__(self, seen: str, fix: str) -> None:
        super().__init__(seen)
        self.issue = Issue(seen, fix, _PATH)


def _find(named: Node) -> tuple[Path, dict[str, Any] | None]:
    """Return the adapter's folder, and the `model` section of the run that it comes from, if it is one's."""
    written = named.plain()
    text = written.get("path") if isinstance(written, dict) else written
    revision = written.get("revision") if isinstance(written, dict) else None
    if not isinstance(text, str) or not text:
        fix = f"write `adapter: runs/NAME/TIME`, a folder with {ADAPTER_CONFIG}, or a hub id"
        raise _AdapterError(f"names no adapter (got {json.dumps(text)})", fix)
    path = Path(text).absolute()
    if not path.is_dir():
        return _find_in_cache(text, revision), None
    if revision is not None:
        raise _AdapterError(f"{text} is on this machine and has no revisions", "remove `revision`")
    run = find_run(path)
    folder = path / "model" if run == path else path
    if not (folder / ADAPTER_CONFIG).is_file():
        raise _explain_none(text, path, run)
    return folder, None if run is None else _read(run / _RESOLVED).get("recipe", {}).get("model")


def find_run(path: Path) -> Path | None:
    """Return the run that a folder is, or lies in; None if there is none."""
    owners = (each for each in (path, *path.parents[:2]) if (each / _RESOLVED).is_file())
    return next(owners, None)


def find_downloaded(text: str, revision: str | None) -> Path | None:
    """Return the folder of a downloaded adapter of the hub; None if the text names none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(text, ADAPTER_CONFIG, revision=revision)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _find_in_cache(text: str, revision: str | None) -> Path:
    is_id = not Path(text).exists() and _HUB_ID.fullmatch(text) is not None
    if is_id and (found := find_downloaded(text, revision)) is not None:
        return found
    what = text if revision is None else f"{text} at {revision}"
    option = "" if revision is None else f" --revision {revision}"
    fix = f"name a finished run with `model.lora`, or a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
    if is_id:
        fix = f"fetch it first: hf download {text}{option}"
    raise _AdapterError(f"there is no adapter at {what}", fix)


def _explain_none(text: str, path: Path, run: Path | None) -> _AdapterError:
    """Return what a folder without an adapter is instead."""
    runs = sorted(each.parent for each in path.glob(f"*/{_RESOLVED}"))
    if runs:
        trained = [each for each in runs if (each / "model" / ADAPTER_CONFIG).is_file()]
        return _AdapterError(
            f"{text} holds runs, and is none itself", f"name one: `{(trained or runs)[-1]}`"
        )
    whole = path / "model" if run == path else path
    if (whole / "config.json").is_file():
        fix = f"write `path: {whole}` instead of `adapter`"
        return _AdapterError(f"{text} holds a whole model, not an adapter", fix)
    if run == path:
        return _AdapterError(
            f"the run {text} has no final adapter", name_checkpoint(path, ADAPTER_CONFIG)
        )
    fix = f"name a finished run with `model.lora`, or a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
    return _AdapterError(f"{text} holds no {ADAPTER_CONFIG}", fix)


def name_checkpoint(run: Path, file: str) -> str:
    """Return what to name instead of a run that has not ended: its last checkpoint with such a file."""
    saved = sorted(run.glob(f"checkpoints/*/{file}"), key=lambda each: each.stat().st_mtime)
    return f"name a checkpoint: `{saved[-1].parent}`" if saved else "name a run that has ended"


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _AdapterError(f"{file} cannot be read as a JSON object", "download the adapter again")
    return content


def _read_lora(folder: Path) -> dict[str, Any]:
    config = {"base_model_name_or_path": None, **_read(folder / ADAPTER_CONFIG)}
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA" or task not in ("CAUSAL_LM", None):
        seen = f"{folder} is an adapter of another kind: {kind} for {task}"
        raise _AdapterError(seen, "name a LoRA adapter for CAUSAL_LM")
    for key, reason in LORA_VARIANTS.items():
        if config.get(key):
            raise _AdapterError(f"{folder} has `{key}`: {reason}", "name an adapter without")
    init = str(config.get("init_lora_weights"))
    if init.startswith(REWRITING_INITS):
        seen = f"{folder} began with `init_lora_weights: {init}`, which rewrote the weights of its base"
        fix = (
            "convert it with peft: `save_pretrained(…, path_initial_model_for_weight_conversion=…)`"
        )
        raise _AdapterError(seen, fix)
    return config


def _fill_path(model: Node, named: Node, folder: Path, base: dict[str, Any]) -> None:
    """Take the model that the adapter was trained on, with what its run needed to load it."""
    path = base["path"]
    if not path:
        raise _AdapterError(
            f"{folder / ADAPTER_CONFIG} does not name the model", "name it as `model.path`"
        )
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().exists():
        seen = f"{folder} was trained on {path}, which is not on this machine"
        raise _AdapterError(seen, "write where that model is now as `model.path`")
    for key in ("path", "revision", "chat_template", "trust_remote_code"):
        if base.get(key) and key not in model.value:
            model.value[key] = Node(base[key], named.location)


def _fill_lora(model: Node, named: Node, config: dict[str, Any]) -> Iterator[Issue]:
    """Take the adapter's own settings; `model.lora` may repeat them, and may not differ."""
    lora = model.child("lora")
    if lora is None or not isinstance(lora.value, dict):
        model.value["lora"] = lora = Node({}, named.location)
    for key in dict.fromkeys((*LoraConfig.model_fields, *fields_in("model.lora"))):
        own, written = config.get(key), lora.child(key)
        if written is None:
            # How an adapter began says nothing about how it goes on.
            if own not in (None, False, "none", {}, []) and key != "init_lora_weights":
                lora.value[key] = as_node(own, named.location)
        elif _in_any_order(written.plain()) != _in_any_order(own):
            said, has = json.dumps(written.plain()), json.dumps(own)
            fix = f"write `{key}: {has}`, or leave out `lora`: the adapter is trained on as it is"
            seen = f"is {said}, and the adapter has {has}"
            yield Issue(seen, fix, f"model.lora.{key}", written.location)


def _in_any_order(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, list) else value or None
