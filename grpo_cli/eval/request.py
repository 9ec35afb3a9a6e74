"""What `grpo eval` measures, with which settings: worked out once, written down, read by every process."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from grpo_cli.checks.compatibility import EPISODE_IMAGES, find_conflicts
from grpo_cli.checks.generation import choose_local_backend, read_vllm_version, with_backend
from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import SetupError, UsageError, check_choice, install_extra
from grpo_cli.machine import is_on_cpu, read_hardware
from grpo_cli.models.source import is_adapter, read_present_base, refuse_sharded
from grpo_cli.recipe.comparison import hash_code
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.checkpoints import find_model, find_trained
from grpo_cli.runs.folder import RunFolder

Progress = Callable[[str, int, int], None]
"""Told which subject is measured, how many completions are done, and how many there are in all."""
Backend = Literal["transformers", "vllm"]
BackendChoice = Literal["auto", Backend]
Split = Literal["eval", "train"]
_VLLM_CHUNK = 256
"""Prompts after which samples are written down, so that an interrupted evaluation can be resumed."""

WARMUP = "warmup"
"""The name of what a run had after its warm-up, among the models that are measured."""


@dataclass(frozen=True)
class EvalOptions:
    """Flags of the command line; None leaves it to the recipe."""

    model: str | None = None
    checkpoint: str | None = None
    baseline: str | None = None
    split: Split = "eval"
    limit: int | None = None
    samples: int | None = None
    temperature: float | None = None
    seed: int | None = None
    backend: BackendChoice = "auto"
    batch_size: int | None = None
    out: Path | None = None
    resume: bool = False


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
    """The baseline last, if there is one."""
    baseline: str | None
    """Name of the subject that the others are compared with."""
    split: Split
    limit: int | None
    samples: int
    temperature: float
    seed: int
    backend: Backend
    batch_size: int

    code: dict[str, str] = {}
    """Files of rewards, tools and environments, each with a hash: a resumed evaluation must score alike."""

    def differing(self, other: "EvalRequest") -> list[str]:
        """Return the settings and files of code in which two requests differ."""
        values, others = self._movable(), other._movable()
        files = sorted(self.code.keys() | other.code.keys())
        return [
            *(name for name in values if values[name] != others[name]),
            *(file for file in files if self.code.get(file) != other.code.get(file)),
        ]

    def _movable(self) -> dict[str, Any]:
        """Return the settings with paths relative to the run folder, which may have been moved meanwhile."""
        source, values = Path(self.source), self.model_dump(exclude={"source", "code"})
        for subject in values["subjects"]:
            for section, key in ((subject["model"], "path"), (subject, "adapter")):
                if section[key] and Path(section[key]).is_relative_to(source):
                    section[key] = Path(section[key]).relative_to(source)
        return values

    @property
    def chunk_size(self) -> int:
        """Prompts sampled at a time; vLLM batches by itself, and needs many."""
        if self.backend == "vllm":
            return _VLLM_CHUNK
        return max(self.batch_size // self.samples, 1)


def make_request(source: Path, overrides: list[str] | None, options: EvalOptions) -> EvalRequest:
    """Work out what to measure; raises `GrpoError` if the recipe, the run, a model or a setting is wrong."""
    recipe, hardware = _read_recipe(source, overrides), read_hardware()
    check_choice("--split", options.split, get_args(Split))
    check_choice("--backend", options.backend, get_args(BackendChoice))
    backend: Backend = "transformers"
    if options.backend != "auto":
        backend = options.backend
    elif recipe.generation.backend == "vllm" and not is_on_cpu(recipe.launch, hardware):
        # That of training, if it works on this machine.
        backend = choose_local_backend(recipe, hardware, read_vllm_version()).backend
    subjects, baseline = _name_subjects(source, recipe, options)
    evaluation = recipe.evaluation
    samples = options.samples or evaluation.samples_per_prompt
    temperature = options.temperature
    if temperature is None:
        greedy = evaluation.temperature == 0 and samples > 1
        temperature = recipe.generation.temperature if greedy else evaluation.temperature
    if samples > 1 and temperature == 0:
        raise UsageError(
            f"--samples {samples} at temperature 0 would be {samples} times the same completion",
            "--temperature 1.0, or --samples 1",
        )
    request = EvalRequest(
        source=str(source),
        recipe=recipe,
        subjects=subjects,
        baseline=baseline,
        split=options.split,
        # In a recipe, 0 leaves out the measurements of a training.
        limit=options.limit or evaluation.limit or None,
        samples=samples,
        temperature=temperature,
        seed=recipe.seed if options.seed is None else options.seed,
        backend=backend,
        batch_size=options.batch_size or evaluation.batch_size,
        code=hash_code(recipe),
    )
    for conflict in find_conflicts(with_backend(recipe, backend), EPISODE_IMAGES):
        raise UsageError(f"{conflict.seen}", "--backend transformers")
    if backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise SetupError(
            "vllm is not installed", f"{install_extra('vllm')}, or --backend transformers"
        )
    return request


def _read_recipe(source: Path, overrides: list[str] | None) -> Recipe:
    if source.is_dir() and overrides:
        raise UsageError(
            "--set changes recipes, and a run keeps the one it was trained with",
            "name the recipe, and the run's model with --model",
        )
    if any((source / name).is_file() for name in ("config.json", "adapter_config.json")):
        # An export holds the recipe too.
        beside = source / "recipe.yaml"
        raise UsageError(
            f"{source} is a model, not a run or a recipe",
            f"grpo eval {beside if beside.is_file() else 'RECIPE'} --model {source}",
        )
    run = RunFolder(source) if source.is_dir() else None
    recipe = run.read_recipe() if run else check_recipe(source, overrides).recipe
    if not recipe.rewards:
        what = "learns from a teacher" if recipe.is_sampled else "is for scored data"
        more = "" if recipe.is_sampled else "; a run ranks its held-out responses by itself"
        raise UsageError(
            f"{source} {what}, and has no reward that scores a new answer",
            f"give grpo eval a recipe with rewards, and this model with --model{more}",
        )
    return recipe


def _name_subjects(
    source: Path, recipe: Recipe, options: EvalOptions
) -> tuple[tuple[Subject, ...], str | None]:
    """Return the models to measure, and the name of the baseline, which comes last."""
    run = RunFolder(source) if source.is_dir() else None
    if options.checkpoint is not None and run is None:
        raise UsageError("--checkpoint names a checkpoint of a run", "name a folder under runs/")
    if options.model is not None and run is not None:
        raise UsageError("--model goes with a recipe", "grpo eval RECIPE --model PATH")
    own = recipe.model.model_copy(update={"lora": None})
    start = recipe.model.adapter.path if recipe.model.adapter else None
    base: Subject | None = Subject(name="start" if start else "base", model=own, adapter=start)
    if run is not None:
        trained = find_trained(run, options.checkpoint)
        if (warmed := run.warmup / "model").is_dir() and options.baseline is None:
            trained = [*trained, (WARMUP, warmed)]
        subjects = [_from_folder(name, path, recipe.model) for name, path in trained]
    elif options.model is not None:
        subjects = [_from_path("model", options.model, recipe)]
    else:
        subjects, base = [Subject(name="model", model=own, adapter=start)], None
    if options.baseline is not None:
        named = options.baseline != "none"
        base = _from_path("baseline", options.baseline, recipe) if named else None
    return (*subjects, *([base] if base else [])), base.name if base else None


def _from_path(name: str, path: str, recipe: Recipe) -> Subject:
    """Return a hub id, a folder of weights, an adapter (on the model that it names), or a run's final model."""
    folder = Path(path).expanduser()
    run = RunFolder(folder)
    if run.resolved.is_file():
        _, folder = find_model(run, None)
        return _from_folder(name, folder, run.read_recipe().model)
    if not folder.is_dir():
        return _plain(name, path, recipe.model)
    if not is_adapter(folder):
        return _from_folder(name, folder, recipe.model)
    base = read_present_base(folder) or recipe.model.path
    own = base == recipe.model.path
    return _from_folder(
        name, folder, recipe.model if own else _plain(name, base, recipe.model).model
    )


def _from_folder(name: str, folder: Path, base: ModelConfig) -> Subject:
    folder = folder.absolute()
    refuse_sharded(folder)
    if not is_adapter(folder):
        return _plain(name, str(folder), base)
    model = base.model_copy(update={"lora": None})
    return Subject(name=name, model=model, adapter=str(folder))


def _plain(name: str, path: str, like: ModelConfig) -> Subject:
    """Return another model, loaded with the settings of a known one."""
    model = like.model_copy(update={"path": path, "revision": None, "lora": None})
    return Subject(name=name, model=model)
