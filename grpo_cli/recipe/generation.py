"""The `generation` section: how completions are sampled."""

from typing import Any, Literal

from pydantic import Field

from grpo_cli.recipe.base import Integer, Number, OpenSection


class VllmConfig(OpenSection):
    """vLLM's settings: `GRPOConfig`'s `vllm_…` fields without the prefix."""

    mode: Literal["colocate", "server"] = "colocate"
    """`colocate` shares the training devices; `server` talks to a vLLM server."""


class GenerationConfig(OpenSection):
    """How completions are sampled; any sampling field of `GRPOConfig` goes here by its own name."""

    backend: Literal["transformers", "transformers_continuous_batching", "vllm"] = "transformers"
    """What samples the completions."""
    num_generations: Integer = Field(default=8, ge=2)
    """Completions sampled for each prompt (the group size)."""
    num_generations_eval: Integer | None = Field(default=None, ge=1)
    """Group size while evaluating during training; `num_generations` where it is not given."""
    max_completion_length: Integer = Field(default=512, ge=1)
    """Longest completion, in tokens."""
    temperature: Number = Field(default=1.0, gt=0)
    """Sampling temperature."""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: Integer = Field(default=0, ge=0)
    """Sample from this many of the likeliest tokens; 0 is all."""
    min_p: Number | None = Field(default=None, ge=0, le=1)
    """Leave out tokens below this share of the likeliest one's probability."""
    repetition_penalty: Number = Field(default=1.0, gt=0)
    """Above 1, tokens that have appeared become less likely."""
    steps_per_generation: Integer | None = Field(default=None, ge=1)
    """Micro-steps served by one generation batch; `gradient_accumulation_steps` where it is not given."""
    generation_batch_size: Integer | None = Field(default=None, ge=1)
    """Completions in one generation batch; excludes `steps_per_generation`."""
    vllm: VllmConfig = VllmConfig()
    """vLLM's settings, read where `backend` is `vllm`."""

    def trl_fields(self) -> dict[str, Any]:
        """Every `GRPOConfig` field this section sets, under TRL's names."""
        own = self.model_dump(exclude={"backend", "vllm"}, exclude_none=True)
        if self.backend != "vllm":
            return own
        vllm = {f"vllm_{name}": value for name, value in self.vllm.model_dump().items()}
        return {**own, **vllm}
