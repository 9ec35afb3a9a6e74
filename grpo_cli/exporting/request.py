"""What is exported and in which form, decided and refused before anything is loaded."""

import re
from pathlib import Path
from typing import Literal, cast, get_args

from pydantic import BaseModel, ConfigDict

from grpo_cli.errors import UsageError, check_choice
from grpo_cli.models.source import fingerprint_model, is_adapter, is_sharded
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.checkpoints import find_model
from grpo_cli.runs.folder import RunFolder

Format = Literal["safetensors", "adapter", "gguf"]
Precision = Literal["float32", "float16", "bfloat16"]
GgufType = Literal["f32", "f16", "bf16", "q8_0"]
TEMPLATE = "chat_template.jinja"


class ExportRequest(BaseModel):
    """What to write and verify; goes to the verifying process as JSON."""

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
    is_text: bool
    """Whether it was trained on plain text, even if there is a chat template."""

    @property
    def tokenizer(self) -> ModelConfig:
        """Source of the tokenizer, with the chat template that was saved with the trained weights."""
        saved = self.trained / TEMPLATE
        if not saved.is_file():
            return self.recipe.model
        template = saved.read_text(encoding="utf-8")
        return self.recipe.model.model_copy(update={"chat_template": template})

    @property
    def base(self) -> ModelConfig:
        """The model that training began with, without adapters."""
        return self.model.model_copy(update={"lora": None})

    @property
    def model(self) -> ModelConfig:
        """The model that was trained, unquantized, with attention that runs anywhere."""
        plain = {"quantization": None, "attn_implementation": None}
        return self.recipe.model.model_copy(update=plain)


_SIZE = re.compile(r"[1-9]\d*(KB|MB|GB|TB)")


def make_request(
    run: Path,
    format: str = "safetensors",
    checkpoint: str | None = None,
    dtype: str | None = None,
    gguf_type: str | None = None,
    max_shard_size: str = "5GB",
) -> ExportRequest:
    """Return what to export of a run folder; None leaves an option to the run. Raises `UsageError`."""
    check_choice("--format", format, get_args(Format))
    check_choice("--dtype", dtype, get_args(Precision))
    check_choice("--gguf-type", gguf_type, get_args(GgufType))
    if not _SIZE.fullmatch(max_shard_size):
        raise UsageError(f"--max-shard-size {max_shard_size} is not a size", "such as 5GB or 500MB")
    if gguf_type is not None and format != "gguf":
        raise UsageError("--gguf-type is a GGUF file's", "add --format gguf")
    if dtype is not None and format != "safetensors":
        raise UsageError("--dtype is for --format safetensors", "leave it out, or use --gguf-type")
    folder = RunFolder(run)
    recipe = folder.read_recipe()
    name, trained = find_model(folder, checkpoint)
    if recipe.has_images and format == "gguf":
        raise UsageError(
            f"{run} was trained on images, and its GGUF file would read none",
            "--format safetensors",
        )
    has_adapter = recipe.model.lora is not None if is_sharded(trained) else is_adapter(trained)
    if format == "adapter" and not has_adapter:
        raise UsageError(f"{trained} holds whole weights, no adapter", "--format safetensors")
    then = folder.read_manifest().get("model") if has_adapter else None
    now = fingerprint_model(recipe.model) if then is not None else None
    if now is not None and then != now:
        raise UsageError(
            f"{recipe.model.path} holds other weights than when the adapter was trained on it ({now[:12]}, not "
            f"{str(then)[:12]})",
            "put the old ones back; on the hub, `model.revision` names them",
        )
    noted = folder.read_manifest().get("dtype") or recipe.model.dtype
    return ExportRequest(
        run=run.absolute(),
        recipe=recipe,
        name=name,
        trained=trained.absolute(),
        is_adapter=has_adapter,
        format=cast(Format, format),
        dtype=cast(Precision, dtype or (noted if noted in get_args(Precision) else "bfloat16")),
        gguf_type=cast(GgufType, gguf_type or "f16") if format == "gguf" else None,
        max_shard_size=max_shard_size,
        is_text=folder.asks_in_text(),
    )
