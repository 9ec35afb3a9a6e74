"""From what `grpo serve` names to a server's plan. Owns the file of the trained chat template."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from grpo_cli.errors import SetupError
from grpo_cli.models.source import read_chat_template
from grpo_cli.serve.plan import Served, ServePlan, find_served, plan_server


@contextmanager
def prepare(
    source: Path,
    checkpoint: str | None,
    *,
    host: str,
    port: int,
    max_model_len: int | None,
    gpu_memory_utilization: float | None,
    needs_vllm: bool,
) -> Iterator[ServePlan]:
    """The plan of a server, and the files it needs while it runs.

    Raises:
        UsageError: There is no model to serve.
        SetupError: vLLM is not installed, and it is needed.
    """
    command = _find_vllm()
    if command is None and needs_vllm:
        raise SetupError('vllm is not installed. Fix: pip install "grpo-cli[vllm]"')
    served = find_served(source, checkpoint)
    with tempfile.TemporaryDirectory(prefix="grpo-serve-") as scratch:
        yield plan_server(
            _materialized(served) if needs_vllm else served,
            command or "vllm",
            host=host,
            port=port,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            chat_template=_write_template(served, Path(scratch)),
        )


def _find_vllm() -> str | None:
    beside = str(Path(sys.executable).parent)
    return shutil.which("vllm", path=beside) or shutil.which("vllm")


def _write_template(served: Served, scratch: Path) -> Path | None:
    """The template a recipe sets, as a file; a folder that was exported holds its own."""
    template = read_chat_template(served.settings) if served.settings is not None else None
    if template is None:
        return None
    path = scratch / "chat_template.jinja"
    path.write_text(template, encoding="utf-8")
    return path


def _materialized(served: Served) -> Served:
    """The same with a folder in the place of a GGUF file, which vLLM would not serve as trained."""
    from grpo_cli.models.loading import model_folder_or_id
    from grpo_cli.recipe.model import ModelConfig

    return replace(served, model=model_folder_or_id(ModelConfig(path=served.model)))
