"""The `generation` section: how completions are sampled."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from grpo_cli.recipe import NUM_GENERATIONS
from grpo_cli.recipe.base import Address, Integer, Number, OpenSection, Section

_ADDRESS = ("server_base_url", "server_host", "server_port")
"""TRL's names for where a server is."""
_STOPS = ("stop_strings", "stop", "include_stop_str_in_output")
"""What `generation_kwargs` says of stop strings: transformers' name, and vLLM's."""
_OWN_FLAGS = re.compile(
    r"host|port|api-key|uds|ssl-.*|config|headless|served-model-name|logprobs-mode|max-logprobs"
    r"|weight-transfer-config|chat-template"
)
"""Flags of the server that `grpo train` gives itself."""
_FLAG_KEYS = {
    "model": "model.path",
    **{
        name: f"model.{name.replace('-', '_')}"
        for name in ("dtype", "revision", "trust-remote-code")
    },
    "seed": "seed",
    "max-model-len": "generation.vllm.max_model_length",
    **{
        name: f"generation.vllm.{name.replace('-', '_')}"
        for name in ("gpu-memory-utilization", "tensor-parallel-size", "model-impl")
    },
}
"""Flags of the server that a key of the recipe decides."""


def _check_flags(flags: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    for name in named:
        if not re.fullmatch("[a-z][a-z0-9-]*", name):
            raise PydanticCustomError("grpo_flag", f"names no flag of vllm serve: {name!r}")
        if name.startswith("data-parallel"):
            why = f"`{name}` is not supported: a server has one replica of the model"
            fix = "remove it; `generation.vllm.tensor_parallel_size` shares the model among GPUs"
            raise PydanticCustomError("grpo_flag", why, {"fix": fix})
        if (key := _FLAG_KEYS.get(name)) or _OWN_FLAGS.fullmatch(name):
            why = f"may not hold {name}, which {f'`{key}` decides' if key else 'is set already'}"
            fix = f"remove it, and set `{key}`" if key else "remove it"
            raise PydanticCustomError("grpo_flag", why, {"fix": fix})
    return named


def stop_params(strings: Sequence[str]) -> dict[str, Any]:
    """Return the `SamplingParams` under which vLLM ends completions as transformers does; none without strings.

    Texts that vLLM compares with them have the special tokens too.
    """
    if not strings:
        return {}
    params = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    return {"stop": list(strings), **params, "spaces_between_special_tokens": False}


class VllmConfig(OpenSection):
    """vLLM's settings: `GRPOConfig`'s `vllm_…` fields without the prefix, and those of a managed server."""

    mode: Literal["colocate", "server"] = "colocate"
    """`colocate` shares the training devices; `server` samples on separate devices."""
    managed: bool | None = None
    """In `server` mode: `grpo train` starts the server itself on GPUs that training does not use, monitors it,
    restarts it if it dies, and stops it at the end. `false` uses a server that is already running, as does
    `base_url`."""
    base_url: Address | None = None
    """Address of a running server, such as `http://10.0.0.2:8000`; `grpo serve RECIPE` starts one."""
    enable_lora: bool = True
    """With `model.lora`, send vLLM the adapter alone and have it sample with that (`--enable-lora`), if it can.
    `false` sends all weights, with the adapter merged in a copy: slower to send, faster to sample from."""
    max_restarts: Integer = Field(default=3, ge=0)
    """How many times a managed server is restarted before the run fails; never with `training.mode: async`."""
    server_args: Annotated[dict[str, str | int | float | bool], AfterValidator(_check_flags)] = (
        Field(default_factory=dict)
    )
    """More `vllm serve` flags for a managed server, by name: `{max-num-seqs: 64}`."""

    @property
    def is_managed(self) -> bool:
        """True if `grpo train` runs the server."""
        if self.mode != "server":
            return False
        return self.address is None if self.managed is None else self.managed

    @property
    def address(self) -> str | None:
        """Address of a running server, if the recipe names one; TRL's own names count too."""
        address = self.base_url or self.extras.get("server_base_url")
        if address is None and (self.managed is False or self.extras.keys() & set(_ADDRESS)):
            host = self.extras.get("server_host", "127.0.0.1")
            address = f"http://{host}:{self.extras.get('server_port', 8000)}"
        return None if address is None else str(address).rstrip("/")

    def trl_fields(self) -> dict[str, Any]:
        """Return what `GRPOConfig` knows of this, under TRL's names."""
        fields = {name: value for name, value in self.extras.items() if name not in _ADDRESS}
        if self.address is not None:
            fields["server_base_url"] = self.address
        return {f"vllm_{name}": value for name, value in {"mode": self.mode, **fields}.items()}


class DynamicSamplingConfig(Section):
    """Replaces groups without signal with new prompts (DAPO, arXiv 2503.14476, section 3.2)."""

    max_resample: Integer = Field(default=3, ge=1)
    """Maximum number of times that groups whose completions all have the same total reward are replaced with
    completions of new prompts, per generation batch; groups still without signal stay in the batch."""


class GenerationConfig(OpenSection):
    """How completions are sampled; any sampling field of `GRPOConfig` goes here by its own name."""

    backend: Literal["auto", "transformers", "transformers_continuous_batching", "vllm"] = "auto"
    """What samples the completions. `auto` is `vllm` with `vllm.mode: server`, or if the training has GPUs, the
    model is not quantized and a supported vLLM is installed; otherwise it is `transformers`. The choice is made
    before the run starts and recorded in the run's `resolved.json`."""
    num_generations: Integer = Field(default=NUM_GENERATIONS, ge=2)
    """Completions sampled for each prompt (the group size)."""
    num_generations_eval: Integer | None = Field(default=None, ge=1)
    """Group size for evaluation during training; by default `num_generations`."""
    max_completion_length: Integer = Field(default=512, ge=1)
    """Maximum number of tokens in a completion."""
    temperature: Number = Field(default=1.0, gt=0)
    """Sampling temperature."""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: Integer = Field(default=0, ge=0)
    """Sample from this many of the most likely tokens; 0 means all."""
    min_p: Number | None = Field(default=None, ge=0, le=1)
    """Exclude tokens below this share of the most likely token's probability."""
    repetition_penalty: Number = Field(default=1.0, gt=0)
    """Above 1, tokens that have appeared become less likely."""
    skip_special_tokens: bool = True
    """Leave special tokens out of texts: rewards, logs and evaluations see none of them. `false` keeps those of a
    task, such as `<call>` or `<think>` if they are special; end and padding tokens are always left out."""
    steps_per_generation: Integer | None = Field(default=None, ge=1)
    """Micro-steps per generation batch; by default `gradient_accumulation_steps`."""
    generation_batch_size: Integer | None = Field(default=None, ge=1)
    """Completions in one generation batch; cannot be combined with `steps_per_generation`."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without signal with completions of new prompts; off by default."""
    sampling_parts: Integer = Field(default=1, ge=1)
    """Number of parts, of whole groups, that a batch is sampled in: while one part is sampled, the previous one is
    scored, with the same weights. This helps if rewards wait (a judge, programs in a sandbox, a `python` function
    that is `async` or has a `timeout_s`) about as long as sampling takes, and sampling half a batch takes about
    half as long; rewards that do not wait are scored afterwards. 1 samples everything at once."""
    vllm: VllmConfig = VllmConfig.model_construct()
    """vLLM's settings, used if `backend` is `vllm`."""
    OURS: ClassVar[frozenset[str]] = frozenset(
        {"backend", "dynamic_sampling", "sampling_parts", "skip_special_tokens", "vllm"}
    )

    def trl_fields(self) -> dict[str, Any]:
        """Return every `GRPOConfig` field this section sets, under TRL's names."""
        own = self.model_dump(exclude=set(self.OURS), exclude_none=True)
        return {**own, **self.vllm.trl_fields()} if self.backend == "vllm" else own

    @property
    def sampling_options(self) -> dict[str, Any]:
        """The settings of sampling besides the temperature, as transformers and vLLM take them."""
        names = ("top_p", "top_k", "min_p", "repetition_penalty")
        narrowed = {name: getattr(self, name) for name in names}
        options = {name: value for name, value in narrowed.items() if value is not None}
        return {**options, **self._other_kwargs}

    @property
    def _other_kwargs(self) -> dict[str, Any]:
        """`generation_kwargs` without stop strings, which backends take in different ways."""
        options = self.extras.get("generation_kwargs") or {}
        return {name: value for name, value in options.items() if name not in _STOPS}

    @property
    def reading(self) -> dict[str, Any]:
        """How completions end and become texts, as `build_reader` takes it: stop strings, special tokens."""
        options = self.extras.get("generation_kwargs") or {}
        strings = options.get("stop_strings") or options.get("stop") or ()
        return {
            "stop_strings": (strings,) if isinstance(strings, str) else tuple(strings),
            "skip_special_tokens": self.skip_special_tokens,
        }

    @property
    def backend_kwargs(self) -> dict[str, Any]:
        """`generation_kwargs` as the backend takes them: vLLM with its names of stop strings, others without."""
        strings = self.reading["stop_strings"] if self.backend == "vllm" else ()
        return {**self._other_kwargs, **stop_params(strings)}

    @property
    def asks_server(self) -> bool:
        """True if completions come from a vLLM server; so it is on every machine, `auto` too."""
        return self.backend in ("auto", "vllm") and self.vllm.mode == "server"

    @property
    def has_managed_server(self) -> bool:
        """True if `grpo train` runs a vLLM server."""
        return self.asks_server and self.vllm.is_managed

    @property
    def managed_gpus(self) -> int:
        """GPUs that a managed server takes from training, if there are any."""
        size = self.vllm.extras.get("tensor_parallel_size", 1)
        return int(size) if self.has_managed_server else 0
