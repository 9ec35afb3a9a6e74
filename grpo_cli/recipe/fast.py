"""`training.fast`: which parts of a step are done with less work, and when that would not be exact.

Owns the switches and the reasons that the recipe alone gives. What only the model or the processes tell is
the worker's, in `train/fast/`.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from grpo_cli.recipe.base import Integer, Section


class FastConfig(Section):
    """Less work for the same gradient; each part is on where it is exact."""

    no_signal: bool = True
    """Leave completions with advantage 0 out of the forward and backward pass: they add nothing to the
    gradient."""
    shared_prompts: bool = True
    """Compute the prompt of a group once in the forward and backward pass, and no padding at all."""
    sampling: bool = True
    """Compute the prompt of a group once while sampling, and stop computing completions that have ended."""
    max_tokens_per_micro_batch: Integer | None = Field(default=None, ge=1)
    """Tokens of one forward and backward pass at most: what bounds the memory of learning. As many as
    `per_device_train_batch_size` completions have with their padding where it is not given. A completion that
    alone has more gets a pass of its own."""


ATTENTION = ("sdpa", "eager")
"""What attention shared prompts may stand in for: other kinds bring kernels with limits of their own."""
MASK_BYTES = 64 * 2**20
"""What the masks of shared prompts may take on a GPU, where attention without any needs none."""
PARTS = ("no_signal", "shared_prompts", "sampling")
BUDGET = "max_tokens_per_micro_batch"
_SAMPLED_BY = frozenset(
    "max_new_tokens max_length do_sample temperature top_k top_p min_p repetition_penalty pad_token_id "
    "bos_token_id eos_token_id disable_compile transformers_version use_cache _from_model_config".split()
)
"""Settings of `generate()` that `models/drawing.py` reads, or that change nothing."""
_ASKS_NOTHING = {"num_beams": 1, "num_return_sequences": 1, "typical_p": 1.0, "guidance_scale": 1.0}
"""Values that are as good as none, where they are not `false`."""


class _Switch:
    """Reads `true` and `false` as all parts on or off, and says so in the JSON Schema."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_read_switch, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "boolean"}, handler(schema)]}


def _read_switch(value: Any) -> Any:
    if isinstance(value, bool):
        return dict.fromkeys(PARTS, value)
    if not isinstance(value, Mapping | FastConfig):
        meant = "false" if str(value).lower() in ("no", "off", "0", "none") else "true"
        raise PydanticCustomError(
            "grpo_switch", "should be true, false, or a mapping", {"fix": f"write `{meant}`"}
        )
    return value


FastSwitch = Annotated[FastConfig, _Switch()]
"""`true`, `false`, or the section."""


def find_large_masks(completions: int, tokens: int) -> str | None:
    """Return why a GPU should not share prompts: their masks would be large. None if they are not.

    Args:
        completions: In one forward and backward pass.
        tokens: Of the longest completion.
    """
    size = completions * tokens * tokens
    if size <= MASK_BYTES:
        return None
    return f"the masks of {completions} completions of {tokens} tokens take {size / 2**20:.0f} MiB on a GPU"


def leave_off(fast: FastConfig, parts: Iterable[str]) -> FastConfig:
    """The same without these parts."""
    off = {part: None if part == BUDGET else False for part in parts}
    return fast.model_copy(update=off)


def find_beyond(asked: Mapping[str, Any]) -> list[str]:
    """Those settings of `generate()` that `sampling` does not honour, so that only `generate()` will do."""
    beyond = [
        name
        for name, value in asked.items()
        if value is not None
        and name not in _SAMPLED_BY
        and not (value is False or _ASKS_NOTHING.get(name) == value)
    ]
    return sorted(beyond + ["use_cache"] * (asked.get("use_cache") is False))


def find_left_off(fast: FastConfig, settings: Mapping[str, Any]) -> dict[str, str]:
    """The parts that are switched on but would change what is sampled or learned, or cost time; and why.

    Args:
        fast: The switches.
        settings: `GRPOConfig` fields by name; those that are not there have TRL's defaults.
    """
    found: dict[str, str] = {}
    whole = _why_no_repacking(settings)
    if fast.no_signal and (why := whole or _why_all_count(settings)) is not None:
        found["no_signal"] = why
    if fast.shared_prompts and (why := whole or _why_no_layouts(settings)) is not None:
        found["shared_prompts"] = why
    if fast.max_tokens_per_micro_batch and whole is not None:
        found[BUDGET] = whole
    if fast.sampling and settings.get("neftune_noise_alpha"):
        found["sampling"] = "neftune_noise_alpha makes other noise for every copy of a prompt"
    if fast.sampling and (beyond := find_beyond(settings.get("generation_kwargs") or {})):
        found["sampling"] = f"only generate() knows {', '.join(beyond)} (generation_kwargs)"
    return found


def _why_no_repacking(given: Mapping[str, Any]) -> str | None:
    """What binds completions to the micro-batch that they came in.

    Source: `GRPOTrainer._compute_loss`, trl 1.16.0; `Trainer`, transformers 5.17.
    """
    optimizer = given.get("optim")
    # A recipe has its name, `TrainingArguments` an enumeration.
    optimizer = str(getattr(optimizer, "value", optimizer))
    for name in ("entropy_coef", "use_adaptive_entropy"):
        if given.get(name):
            return f"the entropy of every completion is learned from ({name})"
    if given.get("top_entropy_quantile", 1.0) < 1:
        return "top_entropy_quantile chooses among all tokens of a micro-batch"
    if given.get("beta") and given.get("loss_type") == "bnpo":
        return "loss_type bnpo weighs the KL term by the micro-batch"
    if given.get("neftune_noise_alpha"):
        return "neftune_noise_alpha makes noise by the width of a micro-batch"
    if optimizer in ("lomo", "adalomo") or optimizer.endswith("layerwise"):
        return f"optim {optimizer} updates the weights within the backward pass"
    return None


def _why_all_count(given: Mapping[str, Any]) -> str | None:
    """What learns from completions whose advantage is 0."""
    if given.get("beta"):
        return f"beta is {given['beta']}, which holds every completion to the reference model"
    return None


def _why_no_layouts(given: Mapping[str, Any]) -> str | None:
    """What takes longer the more shapes there are."""
    return "torch_compile would compile each batch anew" if given.get("torch_compile") else None
