"""What is to be measured, with which settings: worked out once, written down, read by every process.

Owns the passage from a run or a recipe to subjects, and the rules settings must keep.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from grpo_cli.errors import UsageError
from grpo_cli.models.adapters import is_adapter, read_adapter_base
from grpo_cli.models.sharded import refuse_sharded
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trained import find_trained

Progress = Callable[[str, int, int], None]
"""Told which subject is measured, how many completions are done, and how many there are in all."""
Backend = Literal["transformers", "vllm"]
Split = Literal["eval", "train"]
_VLLM_CHUNK = 256
"""Prompts after which samples are written down, so that an interrupted evaluation can go on."""


class Subject(BaseModel):
    """One model that is measured."""

    model_config = ConfigDict(frozen=True)

    name: str
    """What the result calls it: `final`, `base`, `checkpoint-20`."""
    model: ModelConfig
    """Without `lora`, which is how a model is trained, not which model it is."""
    adapter: str | None = None
    """Folder of the LoRA adapter on top of the model; None measures the model itself."""


class EvalRequest(BaseModel):
    """Everything a process needs to measure."""

    model_config = ConfigDict(frozen=True)

    source: str
    """The run folder or recipe that was named."""
    recipe: Recipe
    subjects: tuple[Subject, ...]
    """The baseline last, where there is one."""
    baseline: str | None
    """Name of the subject that the others are compared with."""
    split: Split
    limit: int | None
    samples: int
    temperature: float
    seed: int
    backend: Backend
    batch_size: int
    inputs: dict[str, str] = {}
    """Local files the measurement depends on, each with a stamp."""

    def differing(self, other: "EvalRequest") -> list[str]:
        """The settings in which two requests differ; how the source is spelled is none."""
        names = [name for name in type(self).model_fields if name not in ("source", "inputs")]
        files = sorted(
            name
            for name in self.inputs.keys() | other.inputs.keys()
            if self.inputs.get(name) != other.inputs.get(name)
        )
        return [name for name in names if getattr(self, name) != getattr(other, name)] + files

    @property
    def chunk_size(self) -> int:
        """Prompts sampled at a time; vLLM batches by itself, and wants many."""
        if self.backend == "vllm":
            return _VLLM_CHUNK
        return max(self.batch_size // self.samples, 1)


def name_subjects(
    source: Path, recipe: Recipe, *, model: str | None, checkpoint: str | None, baseline: str | None
) -> tuple[tuple[Subject, ...], str | None]:
    """The models to measure, and which of them is the baseline.

    Args:
        source: A run folder, or a recipe.
        recipe: The run's, or the recipe itself.
        model: A folder or hub id to measure in the place of the recipe's own model.
        checkpoint: A step, `all` or `best`; only of a run.
        baseline: A folder or hub id, or `none`; None is the recipe's model.

    Raises:
        UsageError: There is no such model or checkpoint.
    """
    run = RunFolder(source) if source.is_dir() else None
    if checkpoint is not None and run is None:
        raise UsageError("--checkpoint names a checkpoint of a run. Fix: name a folder under runs/")
    if model is not None and run is not None:
        raise UsageError("--model goes with a recipe. Fix: grpo eval RECIPE --model PATH")
    if run is not None:
        measured = [
            _of_folder(name, path, recipe.model) for name, path in find_trained(run, checkpoint)
        ]
    elif model is not None:
        measured = [_of_path("model", model, recipe)]
    else:
        measured = [_own("model", recipe)]
    base = _baseline(recipe, baseline, implied=run is not None or model is not None)
    return (*measured, *([base] if base else [])), base.name if base else None


def _baseline(recipe: Recipe, wanted: str | None, *, implied: bool) -> Subject | None:
    if wanted == "none" or (wanted is None and not implied):
        return None
    if wanted is not None:
        return _of_path("baseline", wanted, recipe)
    return _own("base", recipe)


def _own(name: str, recipe: Recipe) -> Subject:
    """The recipe's model as it was before any training."""
    return Subject(name=name, model=recipe.model.model_copy(update={"lora": None}))


def _of_path(name: str, path: str, recipe: Recipe) -> Subject:
    """A hub id, a folder of weights, an adapter (on the model that it names), or a run's final model."""
    folder = Path(path).expanduser()
    run = RunFolder(folder)
    if run.resolved.is_file():
        ((_, folder),) = find_trained(run, None)
        return _of_folder(name, folder, run.read_recipe().model)
    if not is_adapter(folder):
        return (
            _of_folder(name, folder, recipe.model)
            if folder.is_dir()
            else _plain(name, path, recipe.model)
        )
    base = read_adapter_base(folder) or recipe.model.path
    if base.startswith("/") and not Path(base).is_dir():
        raise UsageError(
            f"the adapter {path} was trained on {base}, which is not here. Fix: put that model there, or "
            "correct `base_model_name_or_path` in its adapter_config.json"
        )
    known = recipe.model if base == recipe.model.path else _plain(name, base, recipe.model).model
    return _of_folder(name, folder, known)


def _of_folder(name: str, folder: Path, base: ModelConfig) -> Subject:
    """A folder of weights, or of an adapter on `base`."""
    folder = folder.absolute()
    refuse_sharded(folder)
    if not is_adapter(folder):
        return _plain(name, str(folder), base)
    model = base.model_copy(update={"lora": None})
    return Subject(name=name, model=model, adapter=str(folder))


def _plain(name: str, path: str, like: ModelConfig) -> Subject:
    """Another model, loaded with the settings of a known one."""
    model = like.model_copy(update={"path": path, "revision": None, "lora": None})
    return Subject(name=name, model=model)


def check_sampling(samples: int, temperature: float) -> None:
    """Refuses settings under which several samples say no more than one.

    Raises:
        UsageError: Several samples at temperature 0.
    """
    if samples > 1 and temperature == 0:
        raise UsageError(
            f"--samples {samples} at temperature 0 would be {samples} times the same completion. "
            "Fix: --temperature 1.0, or --samples 1"
        )
