"""The `generation` section: how completions are sampled."""

import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import Integer, Number, OpenSection, Section

_ADDRESS = ("server_base_url", "server_host", "server_port")
"""TRL's names for where a server is."""


_OWN_FLAGS = re.compile(
    r"(host|port|model|api-key|uds|ssl-.*|config|headless|served-model-name|dtype|revision|seed|max-model-len"
    r"|gpu-memory-utilization|logprobs-mode|max-logprobs|tensor-parallel-size|data-parallel-.*"
    r"|weight-transfer-config|model-impl|trust-remote-code|chat-template)"
)
"""Flags of the server that training depends on, or that other settings give."""
_FLAG = re.compile(r"[a-z][a-z0-9-]*")


def _check_address(text: str) -> str:
    """An address that HTTP clients understand; TRL's takes no path."""
    try:
        parts = urlsplit(text)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        whole = False
    if not whole or parts.path.strip("/") or parts.query:
        raise PydanticCustomError(
            "grpo_address", "should be an address such as http://10.0.0.2:8000, without a path"
        )
    return text.rstrip("/")


def _check_flags(flags: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    for name in named:
        if not _FLAG.fullmatch(name):
            raise PydanticCustomError("grpo_flag", f"names no flag of vllm serve: {name!r}")
        if _OWN_FLAGS.fullmatch(name):
            raise PydanticCustomError(
                "grpo_flag", f"may not hold {name}, which the rest of the recipe decides"
            )
    return named


class VllmConfig(OpenSection):
    """vLLM's settings: `GRPOConfig`'s `vllm_…` fields without the prefix, and those of a server of ours."""

    mode: Literal["colocate", "server"] = "colocate"
    """`colocate` shares the training devices; `server` samples on devices of its own."""
    managed: bool | None = None
    """In `server` mode: `grpo train` starts the server itself, on GPUs that training then leaves to it,
    watches it, starts it again where it dies, and ends it. `false` uses one that runs already, as does an
    address (`base_url`)."""
    base_url: Annotated[str, AfterValidator(_check_address)] | None = None
    """Where a server runs already, such as `http://10.0.0.2:8000`; `grpo serve RECIPE` starts one."""
    max_restarts: Integer = Field(default=3, ge=0)
    """How often a managed server that died is started again before the run ends as failed."""
    server_args: Annotated[dict[str, str | int | float | bool], AfterValidator(_check_flags)] = (
        Field(default_factory=dict)
    )
    """More flags of `vllm serve` for a server of ours, by their names: `{max-num-seqs: 64}`."""

    @property
    def is_managed(self) -> bool:
        """Whether `grpo train` runs the server."""
        if self.mode != "server":
            return False
        return self.address is None if self.managed is None else self.managed

    @property
    def address(self) -> str | None:
        """Where a server runs already, as far as the recipe says; TRL's own names are read too."""
        told = self.base_url or self.extras.get("server_base_url")
        if told is None and (
            self.managed is False or any(name in self.extras for name in _ADDRESS)
        ):
            host = self.extras.get("server_host", "127.0.0.1")
            told = f"http://{host}:{self.extras.get('server_port', 8000)}"
        return None if told is None else str(told).rstrip("/")

    def trl_fields(self) -> dict[str, Any]:
        """What `GRPOConfig` knows of this, under TRL's names."""
        given = {name: value for name, value in self.extras.items() if name not in _ADDRESS}
        address = {} if self.address is None else {"server_base_url": self.address}
        return {
            f"vllm_{name}": value for name, value in {"mode": self.mode, **given, **address}.items()
        }


class DynamicSamplingConfig(Section):
    """Groups without signal give way to fresh prompts (DAPO, arXiv 2503.14476, section 3.2)."""

    max_resample: Integer = Field(default=3, ge=1)
    """How often at most the groups of a generation batch whose completions all have the same total reward are
    replaced by completions of fresh prompts. Those that are left then stay."""


class GenerationConfig(OpenSection):
    """How completions are sampled; any sampling field of `GRPOConfig` goes here by its own name."""

    backend: Literal["auto", "transformers", "transformers_continuous_batching", "vllm"] = "auto"
    """What samples the completions. `auto` is `vllm` where a server is asked for with `vllm.mode: server`, and
    where the training has GPUs, the model is not quantized and a supported vLLM is installed; otherwise it is
    `transformers`. It is decided before the run starts, and the run's `resolved.json` holds the answer."""
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
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without signal by completions of fresh prompts; off where it is not given."""
    sampling_parts: Integer = Field(default=1, ge=1)
    """Parts that a batch is sampled in, of whole groups: while one is sampled, the one before is scored, with
    the same weights. It pays where rewards wait (a judge, programs in a sandbox, a `python` function that is
    `async` or under `timeout_s`) about as long as sampling takes, and sampling half a batch takes about half
    as long; rewards that do not wait are scored afterwards. 1 samples all at once, and scores beside what else
    comes before the rewards are needed: the log-probabilities of vLLM's samples, and of the reference model."""
    vllm: VllmConfig = VllmConfig()
    """vLLM's settings, read where `backend` is `vllm`."""
    OURS: ClassVar[frozenset[str]] = frozenset(
        {"backend", "dynamic_sampling", "sampling_parts", "vllm"}
    )

    def trl_fields(self) -> dict[str, Any]:
        """Every `GRPOConfig` field this section sets, under TRL's names."""
        own = self.model_dump(exclude=set(self.OURS), exclude_none=True)
        if self.backend != "vllm":
            return own
        return {**own, **self.vllm.trl_fields()}

    @property
    def asks_server(self) -> bool:
        """Whether completions come from a vLLM server; so it is on every machine, `auto` too."""
        return self.backend in ("auto", "vllm") and self.vllm.mode == "server"

    @property
    def has_managed_server(self) -> bool:
        """Whether `grpo train` runs a vLLM server."""
        return self.asks_server and self.vllm.is_managed

    @property
    def managed_gpus(self) -> int:
        """GPUs that a managed server takes from training, where there are any."""
        return (
            int(self.vllm.extras.get("tensor_parallel_size", 1)) if self.has_managed_server else 0
        )
