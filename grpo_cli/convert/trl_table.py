"""TRL's keys and where they live in a recipe: today's fields, names of earlier versions, what is gone.

Owns the table that all dialects share; today's fields are read from the installed sources.
Source: `GRPOConfig`, `ModelConfig` and `ScriptArguments` of trl 0.14 to 1.16, `TrainingArguments` of
transformers 4.48 to 5.17.
"""

from grpo_cli.convert.key_report import Ledger
from grpo_cli.convert.values import fits
from grpo_cli.errors import nearest
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.explanation import Path

_NOT_NOW = "nothing is pushed while training; `grpo export RUN --push org/name` does it afterwards"
_OWN_PREFIX = "it has no meaning for GRPO"
GONE: dict[str, str] = {
    "overwrite_output_dir": "removed from transformers; every run gets a folder of its own",
    "logging_dir": "removed from transformers; trackers write to the run folder",
    "save_safetensors": "removed from transformers; checkpoints are always safetensors",
    "include_tokens_per_second": "removed from transformers",
    "fp16_backend": "removed from transformers",
    "fp16_opt_level": "removed from transformers",
    "half_precision_backend": "removed from transformers",
    "bf16_backend": "removed from transformers",
    "past_index": "removed from transformers",
    "jit_mode_eval": "removed from transformers",
    "use_ipex": "removed from transformers",
    "use_mps_device": "removed from transformers; the device is found by itself",
    "tpu_num_cores": "removed from transformers",
    "torchdynamo": "removed from transformers; use `training.torch_compile`",
    "ray_scope": "removed from transformers",
    "mp_parameters": "removed from transformers",
    "eval_use_cache": "removed from transformers",
    "group_by_length": "removed from transformers; GRPO draws its prompts itself",
    "include_inputs_for_metrics": "removed from transformers",
    "vllm_dtype": "removed from TRL; vLLM samples in the precision of training",
    "vllm_enable_prefix_caching": "removed from TRL; vLLM decides",
    "push_to_hub_model_id": _NOT_NOW,
    "push_to_hub_organization": _NOT_NOW,
    "push_to_hub_token": "tokens do not belong in a recipe; use `hf auth login`",
    "dataset_num_proc": _OWN_PREFIX,
    "max_length": f"{_OWN_PREFIX}; prompts and completions have a length each",
    "max_seq_length": f"{_OWN_PREFIX}; prompts and completions have a length each",
    "packing": _OWN_PREFIX,
    "ignore_bias_buffers": "a debugging aid of TRL's scripts",
}
"""Keys that earlier versions had, and why a recipe has no place for them."""


def take_field(ledger: Ledger, key: Path, name: str, note: str = "") -> bool:
    """Takes a key that is a field of `GRPOConfig` with a home in a recipe, under today's or an old name.

    Args:
        ledger: The account.
        key: Where the value stands in the source.
        name: The field's name, as the source's tool gives it to TRL.
        note: What to say of it.

    Returns:
        Whether it was taken, or dropped with a reason; False where it is no such field.
    """
    today = grpo_fields.RENAMED.get(name, name)
    if today not in grpo_fields.read_grpo_fields() or grpo_fields.home_of(today) is None:
        return False
    if today != name and ledger.node(*key[:-1], today) is not None:
        ledger.drop(key, f"`{today}`, its name of today, is given too")
        return True
    if today == "use_liger_kernel":
        _take_kernels(ledger, key)
        return True
    value = ledger.get(*key)
    unset = grpo_fields.read_grpo_fields()[today].default == "None"
    if value is None and (unset or not fits(today, None)):
        ledger.drop(key, "empty, so the default holds")
        return True
    ledger.keep(key, grpo_fields.key_in_home(today), value, note)
    return True


def _take_kernels(ledger: Ledger, key: Path) -> None:
    """Takes the switch that TRL 1.16 calls deprecated, as what it names in its place."""
    if ledger.is_on(*key):
        note = "deprecated in TRL, which names this in its place; `pip install kernels`"
        ledger.keep(key, "model.init_kwargs.use_kernels", True, note)
    else:
        ledger.drop(key, "off, as it is by default")


def drop_known(ledger: Ledger, key: Path, name: str) -> bool:
    """Drops a key that TRL or transformers know or knew, and a recipe does not take; says why."""
    reason = GONE.get(name) or _shorten(grpo_fields.refusal_of(name))
    if reason is None:
        return False
    ledger.drop(key, reason)
    return True


def _shorten(advice: str | None) -> str | None:
    return None if advice is None else advice.removeprefix("remove it: ")


def drop_unknown(ledger: Ledger, key: Path, known: set[str]) -> None:
    """Drops a key that nobody knows, with the name that may have been meant."""
    close = nearest(str(key[-1]), known - {str(key[-1])})
    hint = f"; did you mean `{close}`?" if close else ""
    ledger.drop(key, f"unknown to {ledger.tool}{hint}")


def field_names() -> set[str]:
    """The names that a config may give fields of `GRPOConfig`, today's and earlier ones."""
    return {*grpo_fields.read_grpo_fields(), *grpo_fields.RENAMED}
