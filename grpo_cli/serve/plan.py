"""How a model is served: which folder, which adapter, which flags. Pure; starts nothing.

Source: vLLM 0.31, `vllm serve` and its flags.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.errors import RecipeError, UsageError
from grpo_cli.models.adapters import is_adapter, read_adapter_base, read_vllm_rank
from grpo_cli.models.sharded import refuse_sharded
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trained import find_trained


@dataclass(frozen=True)
class Served:
    """The model behind a name."""

    name: str
    """What requests call it."""
    model: str
    """A folder or hub id of whole weights."""
    adapter: Path | None
    """A LoRA adapter on top of it."""
    settings: ModelConfig | None
    """How it was loaded in training, where a run was named."""
    system: str | None
    """The system message it was trained with, where that is known and the same for every row."""


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
        return Served(folder.name, base, folder, None, _read_system(folder))
    if (folder / "config.json").is_file():
        return Served(folder.name, str(folder), None, None, _read_system(folder))
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
    return Served(
        recipe.name,
        (read_adapter_base(trained) or recipe.model.path) if adapter else str(trained),
        trained if adapter else None,
        recipe.model,
        recipe.dataset.prompt.fixed_system,
    )


def _read_system(export: Path) -> str | None:
    """The system message in the recipe beside exported weights; nothing else of it is taken."""
    try:
        return load_recipe(export / "recipe.yaml").dataset.prompt.fixed_system
    except RecipeError:
        return None


@dataclass(frozen=True)
class ServePlan:
    """A server, ready to be started."""

    argv: tuple[str, ...]
    name: str
    host: str
    port: int
    system: str | None
    """The system message of the example."""

    @property
    def url(self) -> str:
        """The root of its OpenAI-compatible API."""
        return f"http://{self.host}:{self.port}/v1"

    @property
    def health(self) -> str:
        """What answers when the model is loaded."""
        return f"http://{self.host}:{self.port}/health"

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
    command: str,
    *,
    host: str,
    port: int,
    max_model_len: int | None,
    gpu_memory_utilization: float | None,
    chat_template: Path | None,
) -> ServePlan:
    """The command that serves a model.

    Args:
        served: What is served.
        command: vLLM's.
        host: Where it listens.
        port: On which port.
        max_model_len: Longest prompt and answer, in tokens; None leaves it to the model.
        gpu_memory_utilization: Share of the GPU's memory (of the machine's, on a CPU).
        chat_template: A file that takes the place of the tokenizer's.
    """
    flags = {
        "--host": host,
        "--port": port,
        "--served-model-name": served.name if served.adapter is None else f"{served.name}-base",
        "--max-model-len": max_model_len,
        "--gpu-memory-utilization": gpu_memory_utilization,
        "--chat-template": chat_template,
    }
    if served.settings is not None and served.settings.dtype != "auto":
        flags["--dtype"] = served.settings.dtype
    if served.adapter is not None:
        flags |= {
            "--lora-modules": f"{served.name}={served.adapter}",
            "--max-lora-rank": read_vllm_rank(served.adapter),
        }
    named = [str(part) for flag in flags.items() if flag[1] is not None for part in flag]
    lora = [] if served.adapter is None else ["--enable-lora"]
    argv = (command, "serve", served.model, *named, *lora)
    return ServePlan(argv, served.name, host, port, served.system)
