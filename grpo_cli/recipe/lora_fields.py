"""What the installed peft's `LoraConfig` accepts, and which of it a recipe refuses."""

from functools import cache

from grpo_cli.recipe.upstream_fields import UpstreamField, read_class

_CLASSES = (
    ("peft", "config.py", "PeftConfigMixin"),
    ("peft", "config.py", "PeftConfig"),
    ("peft", "tuners/lora/config.py", "LoraConfig"),
)
"""`LoraConfig` and its parents, the oldest first, as laid out in peft 0.21."""
_BY_ITSELF = "remove it: peft writes it when it saves"
_REWRITES = "remove it: `init_lora_weights` here leaves the base's weights as they are, and needs no settings"
VARIANTS: dict[str, str] = {
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt cannot be merged into the model",
    "arrow_config": "it mixes several adapters, and one is trained here",
    "kasa_config": "it rewrites the base's weights, which the saved adapter would no longer fit",
    "layer_replication": "a model with repeated layers cannot be merged and exported",
    "lora_bias": "it cannot be merged into layers without a bias, as most models have",
    "megatron_config": "models are not trained with Megatron here",
    "monteclora_config": "it draws adapters anew in each pass, so that the sampler's and the learner's differ",
    "trainable_token_indices": "TRL computes log-probabilities without it (`modules_to_save` trains embeddings)",
    "use_bdlora": "vLLM and export take whole adapters, not blocks of them",
    "use_qalora": "it cannot be merged into the model",
    "velora_config": "it learns from compressed activations, whose error GRPO's small advantages drown in",
}
"""Kinds of LoRA that are refused → why."""
REFUSED: dict[str, str] = {
    **{name: f"remove it: {reason}" for name, reason in VARIANTS.items()},
    "task_type": "remove it: the model is always a causal language model",
    "peft_type": "remove it: `model.lora` is always LoRA",
    "base_model_name_or_path": "set `model.path`",
    "revision": "set `model.revision`",
    "inference_mode": "remove it: adapters are trained",
    "auto_mapping": _BY_ITSELF,
    "peft_version": _BY_ITSELF,
    "megatron_core": "remove it: models are not trained with Megatron here",
    "qalora_group_size": "remove it: `use_qalora` is refused",
    "runtime_config": "remove it: it is about moving DoRA between CPU and GPU, and nothing is moved here",
    **dict.fromkeys(("corda_config", "eva_config", "loftq_config", "lora_ga_config"), _REWRITES),
}
"""Fields that a recipe refuses → what to do instead."""


@cache
def read_lora_fields() -> dict[str, UpstreamField]:
    """Return the fields of the installed `LoraConfig` and its parents.

    Raises:
        SetupError: peft is missing, or laid out in a way this version does not know.
    """
    return {field.name: field for place in _CLASSES for field in read_class(*place)}
