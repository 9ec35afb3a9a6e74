"""Checks of `model.adapter` and `model.lora`."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from grpo_cli.checks.context import CheckContext
from grpo_cli.issues import Issue
from grpo_cli.models.source import (
    Fault,
    find_damage,
    find_folder,
    fingerprint_model,
    read_adapter_base,
    read_config,
    resolve_source,
)
from grpo_cli.recipe.model import ADAPTER_WEIGHTS, ModelConfig
from grpo_cli.runs.files import read_object, read_tensors_header

_PATH = "model.adapter"

_PREFIX = "base_model.model."
"""Begins the name of each of an adapter's tensors (peft 0.21)."""


def check_adapter(context: CheckContext) -> Iterator[Issue]:
    """Check that the adapter's weights are whole and belong to `model.path`."""
    recipe = context.recipe
    if recipe.model.adapter is None:
        return
    folder = Path(recipe.model.adapter.path)
    if fault := _find_weights_fault(folder):
        yield Issue(*fault, _PATH)
    elif (other := _find_other_base(folder, recipe.model)) is not None:
        fix = "leave out `model.path`, which then is the adapter's own base"
        seen = f"the adapter was trained on {other}, and `model.path` is another model"
        yield Issue(f"{seen}: {recipe.model.path}", fix, _PATH)
    elif fault := _find_misfit(folder / ADAPTER_WEIGHTS, recipe.model):
        yield Issue(*fault, _PATH)
    if recipe.model.adapter.reference == "base" and not recipe.setting("beta"):
        seen, fix = "has no effect without `training.beta`", "set `training.beta`, or remove it"
        yield Issue(seen, fix, f"{_PATH}.reference", level="warning")


def check_lora(context: CheckContext) -> Iterator[Issue]:
    """Check the adapters' settings against each other and the model."""
    recipe = context.recipe
    if recipe.model.lora is None:
        return
    path, lora = "model.lora", recipe.model.lora.model_dump()
    if isinstance(lora["target_modules"], str):
        for key in ("layers_to_transform", "layers_pattern"):
            if lora.get(key) is not None:
                seen = f"peft picks layers only from a list, not with target_modules: {lora['target_modules']}"
                fix = "write `target_modules: [q_proj, …]`"
                yield Issue(seen, fix, f"{path}.{key}")
    if lora.get("layers_pattern") and lora.get("layers_to_transform") is None:
        seen = "names the list of layers for `layers_to_transform`, which is missing"
        fix = "add `layers_to_transform: [0, 1]`, or remove it"
        yield Issue(seen, fix, f"{path}.layers_pattern")
    layers = lora.get("layers_to_transform") or []
    layers = [layers] if isinstance(layers, int) else layers
    if fault := _find_missing_layer(recipe.model, layers):
        yield Issue(*fault, f"{path}.layers_to_transform")


def _find_missing_layer(model: ModelConfig, layers: Sequence[int]) -> Fault | None:
    """Find a layer that the model does not have, by its config.json; peft passes over it in silence."""
    config = read_config(model) if layers else {}
    count = config.get("num_hidden_layers") or config.get("n_layer")
    if not isinstance(count, int) or all(0 <= each < count for each in layers):
        return None
    seen = f"the model has no layer {next(each for each in layers if not 0 <= each < count)}"
    return seen, f"its layers are numbered from 0 to {count - 1}"


def _find_weights_fault(folder: Path) -> Fault | None:
    if (folder / ADAPTER_WEIGHTS).is_file():
        return find_damage(folder / ADAPTER_WEIGHTS)
    if not (folder / "adapter_model.bin").is_file():
        return f"{folder} holds no {ADAPTER_WEIGHTS}", "download the adapter again"
    load = f"PeftModel.from_pretrained(base, '{folder}').save_pretrained('{folder}')"
    fix = f"if you trust it, write it as safetensors once, with peft: {load}"
    return f"{folder} holds adapter_model.bin, a pickle, and no {ADAPTER_WEIGHTS}", fix


def _find_misfit(file: Path, model: ModelConfig) -> Fault | None:
    """Find names that peft does not know, and shapes that are not the model's, by the headers of both."""
    adapter = read_tensors_header(file)[1]
    if not any(name.startswith(_PREFIX) for name in adapter):
        seen = f"none of the names in {file} begins with `{_PREFIX}`, such as {min(adapter, default='none')}"
        return seen, "add it to their names, as peft writes them"
    base = find_folder(resolve_source(model))
    own: dict[str, tuple[int, ...]] = {}
    with suppress(ValueError):  # a file that is damaged is reported by itself
        for weights in sorted(base.glob("model*.safetensors")) if base and base.is_dir() else ():
            own |= read_tensors_header(weights)[1]
    for name, shape in sorted(adapter.items()):
        layer, _, factor = name.removeprefix(_PREFIX).partition(".lora_")
        weight = own.get(f"{layer}.weight", ())
        # Factor A reads what the layer reads, B writes what it writes; GPT-2's layers are transposed, and weights
        # that are packed have one column.
        end = {"A.weight": -1, "B.weight": 0}.get(factor)
        matrices = len(shape) == len(weight) == 2 and 1 not in weight
        if end is not None and matrices and shape[end] not in weight:
            shapes = [" × ".join(map(str, each)) for each in (shape, weight)]
            seen = f"was trained on a model of another size: {name} is {shapes[0]}"
            seen += f", and {layer}.weight of {model.path} is {shapes[1]}"
            return seen, "name the model that it was trained on, or another adapter"
    return None


def _find_other_base(adapter: Path, model: ModelConfig) -> str | None:
    """Return the name of the adapter's base if it is known to be another model than `model`."""
    base = read_adapter_base(adapter)
    trained_on = read_object(adapter.parent / "manifest.json").get("model")
    if isinstance(trained_on, str):
        own = fingerprint_model(model)
        return None if own in (None, trained_on) else base or trained_on
    source = resolve_source(model)
    if base is None or source.kind == "gguf" or base == source.location:
        return None
    if Path(base).is_dir() and source.kind == "folder":
        same = fingerprint_model(model.model_copy(update={"path": base})) == fingerprint_model(
            model
        )
        return None if same else base
    both_hub = source.kind == "hub" and not base.startswith(("/", "."))
    return base if both_hub else None
