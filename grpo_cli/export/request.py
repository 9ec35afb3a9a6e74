"""What is exported, in which form, and where to: worked out and refused before anything is loaded.

Owns the defaults of the settings. Loads no weights.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from grpo_cli.errors import UsageError
from grpo_cli.models.adapters import is_adapter, read_adapter_base
from grpo_cli.models.fingerprint import fingerprint_model
from grpo_cli.models.sharded import is_sharded
from grpo_cli.models.source import resolve_source
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trained import find_trained

Format = Literal["safetensors", "adapter", "gguf"]
Precision = Literal["float32", "float16", "bfloat16"]
GgufType = Literal["f32", "f16", "bf16", "q8_0"]


@dataclass(frozen=True)
class ExportOptions:
    """What the command line asks for; None leaves it to the run."""

    format: Format = "safetensors"
    checkpoint: str | None = None
    dtype: Precision | None = None
    gguf_type: GgufType | None = None
    max_shard_size: str = "5GB"


class ExportRequest(BaseModel):
    """Everything that writing and verifying need to know; goes to the verifying process as JSON."""

    model_config = ConfigDict(frozen=True)

    run: Path
    recipe: Recipe
    name: str
    """Which of the run's models: `final`, `checkpoint-20`."""
    trained: Path
    """Folder of its weights or adapter."""
    is_adapter: bool
    format: Format
    dtype: Precision
    """Of the weights that are written; of the GGUF's source otherwise."""
    gguf_type: GgufType | None
    max_shard_size: str

    @property
    def tokenizer(self) -> ModelConfig:
        """Where the tokenizer comes from; with the chat template that lies beside the trained weights,
        since the recipe's may have been edited."""
        saved = self.trained / "chat_template.jinja"
        if not saved.is_file():
            return self.recipe.model
        template = saved.read_text(encoding="utf-8")
        return self.recipe.model.model_copy(update={"chat_template": template})

    @property
    def base(self) -> ModelConfig:
        """The model that training began with, as `model`, without adapters."""
        return self.model.model_copy(update={"lora": None})

    @property
    def model(self) -> ModelConfig:
        """The model that was trained, unquantized, with a kernel that runs anywhere."""
        plain = {"quantization": None, "attn_implementation": None}
        return self.recipe.model.model_copy(update=plain)


_SIZE = re.compile(r"[1-9]\d*(KB|MB|GB|TB)")


def make_request(run: Path, options: ExportOptions) -> ExportRequest:
    """Works out what to export.

    Args:
        run: A run folder.
        options: What the command line asks for.

    Raises:
        UsageError: This is no run, it has no such model, or the form does not suit it.
    """
    _check_choices(options)
    recipe = RunFolder(run).read_recipe()
    if options.checkpoint == "all":
        raise UsageError("one model is exported at a time. Fix: --checkpoint N or best")
    ((name, trained),) = find_trained(RunFolder(run), options.checkpoint)
    adapter = recipe.model.lora is not None if is_sharded(trained) else is_adapter(trained)
    if options.format == "adapter" and not adapter:
        raise UsageError(f"{trained} holds whole weights, no adapter. Fix: --format safetensors")
    if is_adapter(trained):
        _check_base(trained, recipe.model)
    if adapter:
        _check_unchanged(RunFolder(run), recipe.model)
    return ExportRequest(
        run=run.absolute(),
        recipe=recipe,
        name=name,
        trained=trained.absolute(),
        is_adapter=adapter,
        format=options.format,
        dtype=options.dtype or _own_dtype(recipe.model, trained),
        gguf_type=(options.gguf_type or "f16") if options.format == "gguf" else None,
        max_shard_size=options.max_shard_size,
    )


def _check_choices(options: ExportOptions) -> None:
    for flag, value, known in (
        ("--format", options.format, get_args(Format)),
        ("--dtype", options.dtype, get_args(Precision)),
        ("--gguf-type", options.gguf_type, get_args(GgufType)),
    ):
        if value is not None and value not in known:
            raise UsageError(f"there is no {flag} {value}. Fix: {' or '.join(known)}")
    if not _SIZE.fullmatch(options.max_shard_size):
        raise UsageError(
            f"--max-shard-size {options.max_shard_size} is no size. Fix: such as 5GB or 500MB"
        )
    if options.gguf_type is not None and options.format != "gguf":
        raise UsageError("--gguf-type is a GGUF file's. Fix: add --format gguf")
    if options.dtype is not None and options.format != "safetensors":
        raise UsageError(
            "--dtype is for --format safetensors. Fix: leave it out; a GGUF file has --gguf-type"
        )


def _check_base(adapter: Path, model: ModelConfig) -> None:
    """Refuses an adapter that says it was trained on another model than the run did.

    Raises:
        UsageError: It does.
    """
    recorded, source = read_adapter_base(adapter), resolve_source(model)
    # A GGUF file is trained from a converted copy, whose name holds the file's and a hash.
    converted = source.kind == "gguf" and Path(source.location).stem in Path(recorded or "").name
    if recorded in (None, source.location, model.path) or converted:
        return
    raise UsageError(
        f"{adapter} says it was trained on {recorded}, and the run on {model.path}. "
        "Fix: correct `base_model_name_or_path` in its adapter_config.json, if the two are the same model"
    )


def _check_unchanged(run: RunFolder, model: ModelConfig) -> None:
    """Refuses a base whose weights are not those that the run began with.

    Raises:
        UsageError: They are others.
    """
    then, now = run.read_manifest().get("model"), fingerprint_model(model)
    if then is not None and now is not None and then != now:
        raise UsageError(
            f"{model.path} holds other weights than when the adapter was trained on it ({now[:12]}, not "
            f"{str(then)[:12]}). Fix: put the old ones back; on the hub, `model.revision` names them"
        )


def _own_dtype(model: ModelConfig, trained: Path) -> Precision:
    """The precision the run trained in: the recipe's, or what the model's own settings say."""
    named: str | None = model.dtype
    if named == "auto":
        source = resolve_source(model)
        folders = [trained, *([Path(source.location)] if source.kind == "folder" else [])]
        named = next((found for folder in folders if (found := _read_dtype(folder))), None)
    return "bfloat16" if named not in get_args(Precision) else named  # type: ignore[return-value]


def _read_dtype(folder: Path) -> str | None:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings.get("dtype") or settings.get("torch_dtype")
