"""The `teacher` section: a model whose answers are learned from, beside the rewards or without any."""

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import Address, Number, Section


class TeacherConfig(Section):
    """A model that training moves towards: its KL divergence on sampled completions is a term of the loss."""

    path: str | None = Field(default=None, min_length=1)
    """Hub id, folder of weights or of a LoRA adapter, or a finished run. An adapter is merged into its base."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    weight: Number = Field(default=0.1, gt=0)
    """Factor of the term, as TRL's `beta`; without rewards it only scales the gradient."""
    base_url: Address | None = Field(default=None, validate_default=True)
    """Instead of `path`: address of a running vLLM server that has the teacher, such as `http://10.0.0.2:8000`
    (`vllm serve MODEL`, without `--enable-lora`: with adapters vLLM misreads prompts). It tells log-probabilities
    at `generation.temperature: 1` alone."""

    @field_validator("base_url")
    @classmethod
    def _check_place(cls, base_url: str | None, info: ValidationInfo) -> str | None:
        if (base_url is None) == (info.data.get("path", "") is None):
            message = "one of `path` and `base_url` is needed, and not both"
            raise PydanticCustomError("grpo_teacher", message)
        return base_url

    @property
    def place(self) -> str:
        """Where the teacher is."""
        return self.path or str(self.base_url)
