"""A vLLM server, ready to be started: which model, argv, environment, address. Starts nothing.

Source: vLLM 0.31, `vllm serve` and its flags; trl 1.16, "vLLM integration" (what a trainer needs of it).
"""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_cli.errors import RecipeError, UsageError
from grpo_cli.machine import pick_free_port
from grpo_cli.models.source import (
    is_adapter,
    model_folder_or_id,
    read_adapter_base,
    read_dtype,
    read_present_base,
    refuse_sharded,
)
from grpo_cli.models.vllm_engine import (
    AUTOMATIC,
    CPU_MEMORY,
    adapter_rank,
    model_length,
    pick_dtype,
    processor_settings,
    read_vllm_rank,
)
from grpo_cli.processes import run_module
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.checkpoints import find_model
from grpo_cli.runs.files import read_object
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.manifest import read_version
from grpo_cli.upstream.vllm import ADAPTER_ENDPOINTS, DEVELOPMENT_ENDPOINTS, SERVER_MODULE

PORT = 8000
"""Where a server listens, unless a flag or the recipe says otherwise."""
GROUP_PORT = 51216
"""Where TRL's trainer and server exchange weights, unless `vllm_group_port` is set."""
VLLM_SERVE = ("vllm", "serve")
"""The command of a server, up to its model, if this machine was not searched for it."""
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""On a CPU training and sampling take turns, and each may use every core during its turn. vLLM would bind the
process, and the training in it, to some: a step of SmolLM2-135M on 2 cores took two to three times as long."""
_ENVIRONMENT = {DEVELOPMENT_ENDPOINTS: "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class ServerPlan:
    """A server, ready to be started."""

    argv: tuple[str, ...]
    host: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the current ones."""

    @property
    def root(self) -> str:
        """Its address, without a path."""
        # A server that listens everywhere is asked on this machine.
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"

    @property
    def health(self) -> str:
        """The URL that answers once the model is loaded."""
        return f"{self.root}/health"

    def command_line(self) -> str:
        """Return the command as one would type it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])


@dataclass(frozen=True, kw_only=True)
class ManagedServer(ServerPlan):
    """A server that is started, watched and ended with the training."""

    group_port: int
    max_restarts: int


@dataclass(frozen=True, kw_only=True)
class ServePlan(ServerPlan):
    """A server that answers requests to a trained model."""

    name: str
    """What requests call the model."""
    system: str | None
    """The system message of the example."""
    is_text: bool = False
    """Whether the model continues plain text."""

    @property
    def url(self) -> str:
        """The root of its OpenAI-compatible API."""
        return f"{self.root}/v1"

    @property
    def curl(self) -> str:
        """A command that sends it an example request."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*opening, {"role": "user", "content": "Hello"}]
        asked = {"prompt": "Hello"} if self.is_text else {"messages": messages}
        body = json.dumps({"model": self.name, **asked}, ensure_ascii=False)
        path = "completions" if self.is_text else "chat/completions"
        return f"curl {self.url}/{path} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


@dataclass(frozen=True)
class ServerLocation:
    """Machine-specific inputs of a launch plan."""

    vllm: tuple[str, ...] = VLLM_SERVE
    """The command of a server, up to its model."""
    model: str | None = None
    """What vLLM reads instead of `model.path`."""
    server_port: int = 8000
    group_port: int = GROUP_PORT


def find_server_location(recipe: Recipe) -> ServerLocation:
    """Return the vLLM command, model and free ports of a managed server."""
    model = model_folder_or_id(recipe.model)
    return ServerLocation(find_vllm() or VLLM_SERVE, model, pick_free_port(), pick_free_port())


def find_vllm() -> tuple[str, ...] | None:
    """Return the command of a server, up to its model; None if vLLM is not installed.

    The command beside this Python comes first. With the package `vllm-cpu` (0.31) the command asks for the version
    of a package `vllm` and fails, so the module of the same server is run.
    """
    if read_version("vllm-cpu") and not read_version("vllm"):
        return (*run_module(SERVER_MODULE), "--model")
    command = shutil.which("vllm", path=str(Path(sys.executable).parent)) or shutil.which("vllm")
    return None if command is None else (command, "serve")


def _build_argv(
    command: tuple[str, ...], model: str, flags: Mapping[str, Any], switches: list[str]
) -> tuple[str, ...]:
    named = [str(part) for flag in flags.items() if flag[1] is not None for part in flag]
    return (*command, model, *named, *switches)


def plan_training_server(
    recipe: Recipe,
    command: tuple[str, ...],
    model: str,
    *,
    host: str,
    port: int,
    device: Literal["cpu", "cuda"],
    visible_devices: Mapping[str, str] | None = None,
) -> ServerPlan:
    """Return the server that a training samples from: it takes weights and returns true log-probabilities.

    Args:
        command: The command of a server, up to its model.
        model: A folder or hub id of the initial weights.
        device: Where it computes. On a CPU weights come in a folder, otherwise by NCCL.
    """
    vllm, length = recipe.generation.vllm.extras, model_length(recipe)
    flags: dict[str, Any] = {
        "--host": host,
        "--port": port,
        "--dtype": pick_dtype(recipe, device),
        "--revision": recipe.model.revision,
        "--max-model-len": "auto" if length == AUTOMATIC else length,
        "--gpu-memory-utilization": vllm.get(
            "gpu_memory_utilization", CPU_MEMORY if device == "cpu" else None
        ),
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": -1,
        "--seed": recipe.seed,
        "--model-impl": vllm.get("model_impl") or None,
        "--max-lora-rank": (rank := adapter_rank(recipe, device)),
        "--mm-processor-kwargs": _list_processor_settings(
            recipe.model, has_images=recipe.has_images
        ),
    }
    if device == "cuda":
        flags["--tensor-parallel-size"] = vllm.get("tensor_parallel_size")
        flags["--weight-transfer-config"] = json.dumps({"backend": "nccl"})
    switches = ["--trust-remote-code"] if recipe.model.trust_remote_code else []
    switches += ["--enable-lora"] if rank else []
    # The endpoint that takes tokens with images.
    switches += ["--enable-scale-out"] if recipe.has_images else []
    for name, value in recipe.generation.vllm.server_args.items():
        if isinstance(value, bool):
            switches.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags[f"--{name}"] = value
    environment = {
        **_ENVIRONMENT,
        **(UNBOUND if device == "cpu" else {}),
        **({ADAPTER_ENDPOINTS: "1"} if rank else {}),
        **(visible_devices or {}),
    }
    return ServerPlan(_build_argv(command, model, flags, switches), host, port, environment)


def _list_processor_settings(model: ModelConfig, *, has_images: bool) -> str | None:
    settings = processor_settings(model, has_images=has_images)
    return json.dumps(settings) if settings else None


def plan_managed_server(
    recipe: Recipe,
    location: ServerLocation,
    *,
    device: Literal["cpu", "cuda"],
    visible_devices: Mapping[str, str],
) -> ManagedServer:
    """Return the server that is started with the training."""
    vllm = recipe.generation.vllm
    plan = plan_training_server(
        recipe,
        location.vllm,
        location.model or recipe.model.path,
        host="127.0.0.1",
        port=location.server_port,
        device=device,
        visible_devices=visible_devices,
    )
    return ManagedServer(
        **vars(plan),
        group_port=int(vllm.extras.get("group_port", location.group_port)),
        # An asynchronous training would learn from samples of the initial weights until it sends its own.
        max_restarts=0 if recipe.training.mode == "async" else vllm.max_restarts,
    )


@dataclass(frozen=True)
class Served:
    """A trained model to serve, and how it was prompted in training."""

    name: str
    """What requests call it."""
    model: str
    """A folder or hub id of full weights."""
    adapter: Path | None
    """A LoRA adapter on top of it."""
    settings: ModelConfig
    """How `model` is loaded."""
    system: str | None = None
    """The system message, if it is known and the same for every row."""
    template: Path | None = None
    """The chat template, if it is not the one beside the weights."""
    template_kwargs: Mapping[str, Any] | None = None
    """Further arguments of the template."""
    has_images: bool = False
    """Whether it was trained on images."""
    is_text: bool = False
    """Whether it was trained on plain text, which it continues, even if there is a chat template."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Its stop strings and whether its texts lack special tokens, as `GenerationConfig.reading` has them."""


def find_served(source: Path, checkpoint: str | None) -> Served:
    """Return the model that a run or an export holds.

    Raises:
        UsageError: It holds no model that can be served.
    """
    if (source / "resolved.json").is_file():
        return _of_run(RunFolder(source), checkpoint)
    if checkpoint is not None:
        raise UsageError("--checkpoint names a checkpoint of a run", "name a folder under runs/")
    folder = source.absolute()
    if is_adapter(folder):
        return _of_export(folder, _read_base(folder), folder)
    if (folder / "config.json").is_file():
        return _of_export(folder, str(folder), None)
    if list(folder.glob("*.gguf")):
        raise UsageError(
            f"{source} holds a GGUF file, which vLLM does not serve",
            f"ollama create {folder.name} -f {source}/Modelfile; or export as safetensors",
        )
    raise UsageError(f"{source} is neither a run nor a model folder", "name one of them")


def _read_base(adapter: Path) -> str:
    base = read_present_base(adapter)
    if base is None:
        raise UsageError(
            f"{adapter}/adapter_config.json does not name its base model",
            "correct `base_model_name_or_path`, or export as safetensors",
        )
    return base


def _of_run(run: RunFolder, checkpoint: str | None) -> Served:
    recipe = run.read_recipe()
    _, trained = find_model(run, checkpoint)
    trained = trained.absolute()
    refuse_sharded(trained)
    adapter = trained if is_adapter(trained) else None
    model = (read_adapter_base(trained) or recipe.model.path) if adapter else str(trained)
    revision = recipe.model.revision if model == recipe.model.path else None
    loaded = {"path": model, "lora": None, "chat_template": None, "revision": revision}
    settings = recipe.model.model_copy(update=loaded)
    return _prompted(recipe, model, adapter, settings, is_text=run.asks_in_text())


def _of_export(folder: Path, model: str, adapter: Path | None) -> Served:
    """Return an exported model; nothing that could run code is taken from the recipe beside it."""
    try:
        recipe = load_recipe(folder / "recipe.yaml")
    except RecipeError:
        return Served(folder.name, model, adapter, ModelConfig(path=model))
    settings = ModelConfig(path=model, dtype=recipe.model.dtype if adapter else "auto")
    if model == recipe.model.path:
        settings = settings.model_copy(update={"revision": recipe.model.revision})
    is_text = bool(read_object(folder / "export.json").get("plain_text", recipe.dataset.is_text))
    return _prompted(recipe, model, adapter, settings, is_text=is_text)


def _prompted(
    recipe: Recipe, model: str, adapter: Path | None, settings: ModelConfig, *, is_text: bool
) -> Served:
    template = adapter / "chat_template.jinja" if adapter else None
    return Served(
        recipe.name,
        model,
        adapter,
        settings,
        recipe.dataset.fixed_system,
        template if template and template.is_file() else None,
        recipe.setting("chat_template_kwargs"),
        recipe.has_images,
        is_text,
        recipe.generation.reading,
    )


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and how much memory it may use."""

    host: str
    port: int | None
    """None: the recipe's port, or 8000."""
    max_model_len: int | None
    """Longest prompt and answer together, in tokens; None: the model's own limit."""
    gpu_memory_utilization: float | None
    """Share of the memory; None: vLLM's default."""


def plan_server(
    served: Served, command: tuple[str, ...], listening: Listening, *, on_gpu: bool
) -> ServePlan:
    """Return the server of a trained model; `command` is that of a server, up to its model."""
    host, port = listening.host, listening.port or PORT
    settings, adapter = served.settings, served.adapter
    kwargs = served.template_kwargs
    flags = {
        "--host": host,
        "--port": port,
        "--served-model-name": f"{served.name}-base" if adapter else served.name,
        "--max-model-len": listening.max_model_len,
        "--gpu-memory-utilization": listening.gpu_memory_utilization,
        "--chat-template": served.template,
        "--default-chat-template-kwargs": json.dumps(kwargs) if kwargs else None,
        "--dtype": _dtype_to_name(settings, in_16_bits=on_gpu and adapter is not None),
        "--revision": settings.revision,
        "--tokenizer-revision": settings.revision,
        "--lora-modules": f"{served.name}={adapter}" if adapter else None,
        "--max-lora-rank": read_vllm_rank(adapter) if adapter else None,
        "--mm-processor-kwargs": _list_processor_settings(settings, has_images=served.has_images),
    }
    switches = ["--enable-lora"] if adapter else []
    switches += ["--trust-remote-code"] if settings.trust_remote_code else []
    argv = _build_argv(command, served.model, flags, switches)
    return ServePlan(
        argv, host, port, name=served.name, system=served.system, is_text=served.is_text
    )


def _dtype_to_name(model: ModelConfig, *, in_16_bits: bool) -> str | None:
    """Return the precision to name: vLLM would run float32 weights in 16 bits, as its kernels of adapters must."""
    dtype: str = read_dtype(Path(model.path)) if model.dtype == "auto" else model.dtype
    if dtype == "float32":
        return "bfloat16" if in_16_bits else dtype
    return None if model.dtype == "auto" else dtype
