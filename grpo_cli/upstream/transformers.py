"""Internal names of transformers. Does not import it."""

import sys
from typing import Any

VERSION = "5.17.0"

EAGER = "eager_attention_forward"
"""Name of the attention function of `eager` in the files of models."""
_TRAINER = "transformers.trainer.Trainer"

METHODS = {
    f"{_TRAINER}._determine_best_metric": "metrics, trial",
    f"{_TRAINER}._get_output_dir": "trial",
    f"{_TRAINER}._load_from_checkpoint": "resume_from_checkpoint, model",
}
ATTRIBUTES = {_TRAINER: "_tr_loss _total_loss_scalar _globalstep_last_logged"}
"""The sums of the record in progress, which checkpoints keep."""
NAMES = {
    "transformers.integrations.integration_utils": "INTEGRATION_TO_CALLBACK",
    "transformers.integrations.deepspeed": "_hf_deepspeed_config_weak_ref",
    "transformers.configuration_utils": "_attn_implementation",
    "transformers.trainer_utils": "rotate_checkpoints",
    "transformers.models.llama.modeling_llama": EAGER,
}
LITERALS: dict[str, tuple[str, ...]] = {
    "transformers.trainer": ("loss", "grad_norm", "learning_rate"),
}


def attention_name(model: Any) -> str:
    """Return the name of the attention implementation that a model uses."""
    return str(model.config._attn_implementation)


def eager_namespaces(model: Any) -> list[dict[str, Any]]:
    """Return the namespaces of the files of a model that define, or import, the attention function of `eager`.

    Raises:
        NotImplementedError: There is none.
    """
    # Wrappers such as FSDP's are classes of other files, on top of the model's.
    classes = {base for module in model.modules() for base in type(module).__mro__}
    files = {each.__module__ for each in classes} & sys.modules.keys()
    namespaces = [names for file in files if EAGER in (names := vars(sys.modules[file]))]
    if not namespaces:
        raise NotImplementedError("its attention cannot be replaced")
    return namespaces
