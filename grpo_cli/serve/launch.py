"""From what `grpo serve` names to a server's plan."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from grpo_cli.errors import SetupError
from grpo_cli.serve.plan import Served, ServePlan, find_served, plan_server


def prepare(
    source: Path,
    checkpoint: str | None,
    *,
    host: str,
    port: int,
    max_model_len: int | None,
    gpu_memory_utilization: float | None,
    needs_vllm: bool,
) -> ServePlan:
    """The plan of a server.

    Raises:
        UsageError: There is no model to serve.
        SetupError: vLLM is not installed, and it is needed.
    """
    command = _find_vllm()
    if command is None and needs_vllm:
        raise SetupError('vllm is not installed. Fix: pip install "grpo-cli[vllm]"')
    served = find_served(source, checkpoint)
    return plan_server(
        _materialized(served) if needs_vllm else served,
        command or "vllm",
        host=host,
        port=port,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
    )


def _find_vllm() -> str | None:
    beside = str(Path(sys.executable).parent)
    return shutil.which("vllm", path=beside) or shutil.which("vllm")


def _materialized(served: Served) -> Served:
    """The same with a folder in the place of a GGUF file, which vLLM would not serve as trained."""
    from grpo_cli.models.loading import model_folder_or_id

    return replace(served, model=model_folder_or_id(served.settings))
