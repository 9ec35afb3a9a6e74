"""Checks of the adapter that training goes on from, without torch."""

from collections.abc import Iterator
from pathlib import Path

from grpo_cli.issues import Issue
from grpo_cli.models.folder import find_fault, read_adapter_base
from grpo_cli.models.source import fingerprint_model, resolve_source
from grpo_cli.recipe.adapter import CONFIG, WEIGHTS
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import read_object

_PATH = "model.adapter"


def check_adapter(recipe: Recipe) -> Iterator[Issue]:
    """Check that the adapter's weights are whole, belong to `model.path`, and can be trained on as asked."""
    if recipe.model.adapter is None:
        return
    folder = Path(recipe.model.adapter)
    if not (folder / WEIGHTS).is_file():
        yield Issue(f"{folder} holds no {WEIGHTS}", "fetch the adapter anew", _PATH)
    elif fault := find_fault(folder / WEIGHTS):
        yield Issue(*fault, _PATH)
    bias = read_object(folder / CONFIG).get("bias", "none")
    if recipe.training.extras.get("beta") and bias != "none":
        fix = "set `training.beta: 0`, or export the adapter as safetensors and name that as `path`"
        yield Issue(f"has `bias: {bias}`, of which peft makes no copy as a reference", fix, _PATH)
    if (other := _find_other_base(folder, recipe.model)) is not None:
        fix = "leave out `model.path`, which then is the adapter's own base"
        seen = f"the adapter was trained on {other}, and `model.path` is another model"
        yield Issue(f"{seen}: {recipe.model.path}", fix, _PATH)
    if recipe.training.mode == "async":
        fix = "remove `training.mode: async`, or export the adapter as safetensors and name that as `path`"
        yield Issue("TRL's asynchronous trainer takes no adapter", fix, _PATH)
    if recipe.launch.strategy in ("zero3", "fsdp2"):
        fix = "set `launch.strategy: ddp`, or export the adapter as safetensors and name that as `path`"
        yield Issue(
            f"cannot be loaded into weights sharded by {recipe.launch.strategy}", fix, _PATH
        )


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
