"""The `model` section: which weights, in which precision, trained how."""

from typing import Any, Literal

from pydantic import Field

from grpo_cli.recipe.base import Integer, Number, Section


class LoraConfig(Section):
    """Low-rank adapters through peft; the names are `peft.LoraConfig`'s."""

    r: Integer = Field(default=16, ge=1)
    """Rank of the adapters."""
    lora_alpha: Number = Field(default=32, gt=0)
    """Scale of the adapters; the update is multiplied by `lora_alpha / r`."""
    lora_dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout inside the adapters."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Module names that get an adapter, or `all-linear`."""
    modules_to_save: tuple[str, ...] | None = None
    """Modules trained in full and saved with the adapter."""
    use_rslora: bool = False
    """Scale by `lora_alpha / sqrt(r)`."""
    use_dora: bool = False
    """Weight-decomposed adapters (DoRA)."""


class ModelConfig(Section):
    """What is trained."""

    path: str = Field(min_length=1)
    """Hub id, folder, `file.gguf`, or `package://NAME/FILE` for a file inside an installed Python package."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the loaded weights. `auto` is float32 if all weights are trained (on a GPU they are computed in
    bfloat16 all the same); with `lora` it is the checkpoint's own, or float32 in the place of a bfloat16 that the
    processor would have to emulate."""
    lora: LoraConfig | None = None
    """Train low-rank adapters; leave out to train all weights."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Load the frozen weights quantized with bitsandbytes (needs `lora` and a GPU)."""
    attn_implementation: str | None = None
    """Attention kernel: `sdpa`, `eager`, `flash_attention_2`, …"""
    chat_template: str | None = None
    """A Jinja chat template, or the path of a file holding one; replaces the tokenizer's."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Read that code before you turn this on."""
    init_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for `from_pretrained`."""
