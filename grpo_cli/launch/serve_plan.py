"""How a model is served: which folder, which adapter, which flags. Pure; starts nothing.

Source: vLLM 0.31, `vllm serve` and its flags.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import RecipeError, UsageError
from grpo_cli.launch.server_plan import ServerPlan
from grpo_cli.models.adapters import is_adapter, read_adapter_base, read_vllm_rank
from grpo_cli.models.sharded import refuse_sharded
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trained import find_trained


@dataclass(frozen=True)
class Served:
    """The model behind a name, and how it was spoken to in training."""

    name: str
    """What requests call it."""
    model: str
    """A folder or hub id of whole weights."""
    adapter: Path | None
    """A LoRA adapter on top of it."""
    settings: ModelConfig
    """How `model` is loaded."""
    system: str | None = None
    """The system message, where it is known and the same for every row."""
    template: Path | None = None
    """The chat template, where it is not the one beside the weights."""
    template_kwargs: Mapping[str, Any] | None = None
    """What the template is given besides the messages."""


def find_served(source: Path, checkpoint: str | None) -> Served:
    """The model that a run or an export holds.

    Args:
        source: A run folder, or a folder that `grpo export` (or any trainer) wrote.
        checkpoint: Which of a run's models; None is the final one.

    Raises:
        UsageError: It holds no model that can be served.
    """
    if (source / "resolved.json").is_file():
        return _of_run(RunFolder(source), checkpoint)
    if checkpoint is not None:
        raise UsageError("--checkpoint names a checkpoint of a run. Fix: name a folder under runs/")
    folder = source.absolute()
    if is_adapter(folder):
        base = read_adapter_base(folder)
        if base is None:
            raise UsageError(
                f"{source}/adapter_config.json does not name its base model. "
                "Fix: correct `base_model_name_or_path`, or export as safetensors"
            )
        if base.startswith("/") and not Path(base).is_dir():
            raise UsageError(
                f"{source} is an adapter on {base}, which is not here. Fix: put that model there, or "
                "correct `base_model_name_or_path` in its adapter_config.json"
            )
        return _of_export(folder, base, folder)
    if (folder / "config.json").is_file():
        return _of_export(folder, str(folder), None)
    if list(folder.glob("*.gguf")):
        raise UsageError(
            f"{source} holds a GGUF file, which is llama.cpp's to serve. "
            f"Fix: ollama create {folder.name} -f {source}/Modelfile; or export as safetensors"
        )
    raise UsageError(f"{source} is neither a run nor a model folder. Fix: name one of them")


def _of_run(run: RunFolder, checkpoint: str | None) -> Served:
    recipe = run.read_recipe()
    ((_, trained),) = find_trained(run, checkpoint)
    trained = trained.absolute()
    refuse_sharded(trained)
    adapter = is_adapter(trained)
    model = (read_adapter_base(trained) or recipe.model.path) if adapter else str(trained)
    revision = recipe.model.revision if model == recipe.model.path else None
    template = trained / "chat_template.jinja"
    return Served(
        recipe.name,
        model,
        trained if adapter else None,
        recipe.model.model_copy(
            update={"path": model, "lora": None, "chat_template": None, "revision": revision}
        ),
        recipe.dataset.prompt.fixed_system,
        template if adapter and template.is_file() else None,
        recipe.generation.extras.get("chat_template_kwargs"),
    )


def _of_export(folder: Path, model: str, adapter: Path | None) -> Served:
    """An exported folder; of the recipe beside it nothing is taken that could run code."""
    template = folder / "chat_template.jinja"
    try:
        recipe = load_recipe(folder / "recipe.yaml")
    except RecipeError:
        return Served(folder.name, model, adapter, ModelConfig(path=model))
    return Served(
        recipe.name,
        model,
        adapter,
        ModelConfig(path=model, dtype=recipe.model.dtype if adapter else "auto"),
        recipe.dataset.prompt.fixed_system,
        template if adapter and template.is_file() else None,
        recipe.generation.extras.get("chat_template_kwargs"),
    )


def _read_dtype(model: ModelConfig) -> str | None:
    """The precision to name: vLLM would run float32 weights in 16 bits."""
    if model.dtype != "auto":
        return model.dtype
    try:
        told = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        return "float32" if (told.get("dtype") or told.get("torch_dtype")) == "float32" else None
    except (OSError, ValueError, AttributeError):
        return None


@dataclass(frozen=True, kw_only=True)
class ServePlan(ServerPlan):
    """A server for whoever talks with a trained model."""

    name: str
    """What requests call the model."""
    system: str | None
    """The system message of the example."""

    @property
    def url(self) -> str:
        """The root of its OpenAI-compatible API."""
        return f"{self.root}/v1"

    @property
    def curl(self) -> str:
        """A command that asks it something."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*opening, {"role": "user", "content": "Hello"}]
        body = shlex.quote(
            json.dumps({"model": self.name, "messages": messages}, ensure_ascii=False)
        )
        return f"curl {self.url}/chat/completions -H 'Content-Type: application/json' -d {body}"


def plan_server(
    served: Served,
    command: tuple[str, ...],
    *,
    host: str,
    port: int,
    max_model_len: int | None,
    gpu_memory_utilization: float | None,
) -> ServePlan:
    """The command that serves a model.

    Args:
        served: What is served.
        command: What starts a server of vLLM's, up to its model.
        host: Where it listens.
        port: On which port.
        max_model_len: Longest prompt and answer, in tokens; None leaves it to the model.
        gpu_memory_utilization: Share of the GPU's memory (of the machine's, on a CPU).
    """
    flags = {
        "--host": host,
        "--port": port,
        "--served-model-name": served.name if served.adapter is None else f"{served.name}-base",
        "--max-model-len": max_model_len,
        "--gpu-memory-utilization": gpu_memory_utilization,
        "--chat-template": served.template,
        "--default-chat-template-kwargs": (
            json.dumps(served.template_kwargs) if served.template_kwargs else None
        ),
        "--dtype": _read_dtype(served.settings),
        "--revision": served.settings.revision,
        "--tokenizer-revision": served.settings.revision,
    }
    if served.adapter is not None:
        flags |= {
            "--lora-modules": f"{served.name}={served.adapter}",
            "--max-lora-rank": read_vllm_rank(served.adapter),
        }
    named = [str(part) for flag in flags.items() if flag[1] is not None for part in flag]
    switches = [
        *([] if served.adapter is None else ["--enable-lora"]),
        *(["--trust-remote-code"] if served.settings.trust_remote_code else []),
    ]
    argv = (*command, served.model, *named, *switches)
    return ServePlan(argv, host, port, name=served.name, system=served.system)
