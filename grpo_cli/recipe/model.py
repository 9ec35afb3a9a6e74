"""The `model` section: which weights, in which precision, trained how."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import AS_PATH, Integer, Number, OpenSection, Section

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter's folder."""


def _refuse_listing(text: str) -> str:
    names = text.replace(",", " ").split()
    if len(names) > 1 and all(name.replace(".", "").isidentifier() for name in names):
        fix = {"fix": f"write a list: `[{', '.join(names)}]`"}
        raise PydanticCustomError("grpo_listing", "is one text, which peft reads as a pattern", fix)
    return text


def _refuse_rewriting(name: Any) -> Any:
    if isinstance(name, str) and name.startswith(REWRITING_INITS):
        seen = "rewrites the base's weights, which the saved adapter would no longer fit"
        raise PydanticCustomError("grpo_lora_init", seen, {"fix": _INITS})
    return name


REWRITING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Values of `init_lora_weights` with which peft changes the weights of the base."""
_INITS = "write true, gaussian, orthogonal or mica"


class LoraConfig(OpenSection):
    """Low-rank adapters through peft; the names are `peft.LoraConfig`'s."""

    r: Integer = Field(default=16, ge=1)
    """Rank of the adapters."""
    lora_alpha: Number = Field(default=32, gt=0)
    """Scale of the adapters; the update is multiplied by `lora_alpha / r`."""
    lora_dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout inside the adapters."""
    target_modules: Annotated[str, AfterValidator(_refuse_listing)] | tuple[str, ...] = "all-linear"
    """Names of the modules that get an adapter, or `all-linear`, which leaves the vision part of a model out."""
    modules_to_save: tuple[str, ...] | None = None
    """Modules trained in full and saved with the adapter."""
    use_rslora: bool = False
    """Scale by `lora_alpha / sqrt(r)`."""
    use_dora: bool = False
    """Weight-decomposed adapters (DoRA)."""
    init_lora_weights: Annotated[
        bool | Literal["gaussian", "orthogonal", "mica"], BeforeValidator(_refuse_rewriting)
    ] = True
    """How adapters begin. With `true` and a name they change nothing at first; `false` is random."""

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        ranks: dict[str, int] = self.extras.get("rank_pattern") or {}
        return max(self.r, *ranks.values(), 0)


class AdapterConfig(Section):
    """A LoRA adapter that training begins with; in short form its `path`."""

    path: str = Field(min_length=1)
    """A finished run, a folder, or a downloaded hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    reference: Literal["start", "base"] = "start"
    """With `beta`, what the model is kept near: the model with the adapter as it was at the start, or without."""


def _path_or_adapter(schema: dict[str, Any]) -> None:
    """Let editors accept a recipe without `path`, which loading takes from `adapter`."""
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["adapter"]}]


class ModelConfig(Section):
    """What is trained."""

    model_config = ConfigDict(json_schema_extra=_path_or_adapter)

    path: str = Field(min_length=1)
    """Hub id, folder, `file.gguf`, or `package://NAME/FILE` for a file inside an installed Python package."""
    adapter: Annotated[AdapterConfig, AS_PATH] | None = None
    """A LoRA adapter that training goes on from: `adapter: PATH`, or a mapping with `path` and more. `path` of the
    model may then be left out, and so may `lora`: both are the adapter's own. For a fresh adapter on top of it,
    merge it first (`grpo export RUN --to FOLDER`), and name that folder as `path`, with `lora`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the loaded weights. `auto` is float32 if all weights are trained (a GPU still computes in
    bfloat16); with `lora` it is the checkpoint's own, or float32 on a CPU that would have to emulate bfloat16."""
    lora: LoraConfig | None = None
    """Train low-rank adapters; leave out to train all weights."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Load the frozen weights quantized with bitsandbytes (needs `lora` and a GPU)."""
    attn_implementation: str | None = None
    """Attention kernel: `sdpa`, `eager`, `flash_attention_2`, …"""
    chat_template: str | None = None
    """A Jinja chat template, or the path of a template file; replaces the tokenizer's."""
    processor: dict[str, Any] = Field(default_factory=dict)
    """Settings of the processor for images by their own names, such as `min_pixels` and `max_pixels`."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Read the code before you enable this."""
    init_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for `from_pretrained`."""


class Rates(NamedTuple):
    """Learning rates with which GRPO learns."""

    least: float
    """Below it, hardly anything changes."""
    usual: float
    """A default to start from."""
    most: float
    """Above it, most runs diverge within tens of steps."""


LORA = Rates(least=5e-6, usual=1e-4, most=2e-3)
"""Adapters start at zero and need steps 10 to 100 times those of full fine-tuning."""
FULL = Rates(least=1e-7, usual=1e-6, most=5e-5)


def rates_of(model: ModelConfig) -> Rates:
    """Return the usual learning rates for a model, with adapters or without."""
    return FULL if model.lora is None else LORA
