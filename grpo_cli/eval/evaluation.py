"""`grpo eval` from what was named to a written result, on this process alone.

Owns the settings' defaults, the folder an evaluation gets, and taking up one that was interrupted.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from grpo_cli.checks.backend import choose_backend, read_vllm_version
from grpo_cli.checks.recipe_checks import check_recipe
from grpo_cli.errors import SetupError, UsageError, install_extra
from grpo_cli.eval.folder import EvalFolder
from grpo_cli.eval.inputs import stamp_inputs
from grpo_cli.eval.request import (
    Backend,
    EvalRequest,
    Progress,
    Split,
    check_sampling,
    name_subjects,
)
from grpo_cli.eval.result import build_result, write_result
from grpo_cli.machine import is_on_cpu, pick_device, read_hardware
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder, claim_folder
from grpo_cli.runs.manifest import describe_origin


@dataclass(frozen=True)
class EvalOptions:
    """What the command line asks for; None leaves it to the recipe."""

    model: str | None = None
    checkpoint: str | None = None
    baseline: str | None = None
    split: Split = "eval"
    limit: int | None = None
    samples: int | None = None
    temperature: float | None = None
    seed: int | None = None
    backend: Backend | None = None
    batch_size: int | None = None
    out: Path | None = None
    resume: bool = False


def prepare(source: Path, overrides: list[str] | None, options: EvalOptions) -> EvalRequest:
    """Works out what to measure.

    Raises:
        GrpoError: The recipe, the run, a model or a setting is wrong.
    """
    recipe = _read_recipe(source, overrides)
    if not recipe.is_sampled:
        raise UsageError(
            f"{source} was made for scored data, so no reward of it can score a new answer. Fix: give grpo eval a "
            "recipe with rewards, and this model with --model; a run ranks its held-out responses by itself"
        )
    request = _make_request(source, recipe, options)
    if request.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise SetupError(
            f"vllm is not installed. Fix: {install_extra('vllm')}, or --backend transformers"
        )
    return request


def open_folder(request: EvalRequest, options: EvalOptions) -> EvalFolder:
    """The folder the evaluation goes to: a fresh one, or one that is taken up again.

    Raises:
        UsageError: It exists already, cannot be written, or there is none to take up.
    """
    root = _root(Path(request.source), request.recipe)
    if options.resume:
        return _find_unfinished(request, options.out, root)
    folder = EvalFolder(_fresh(options.out) if options.out else claim_folder(root, "--out DIR"))
    folder.write_request(request)
    return folder


def _read_recipe(source: Path, overrides: list[str] | None) -> Recipe:
    if not source.is_dir():
        return check_recipe(source, overrides).recipe
    if overrides:
        raise UsageError(
            "--set changes recipes, and a run keeps the one it was trained with. "
            "Fix: name the recipe, and the run's model with --model"
        )
    return RunFolder(source).read_recipe()


def _pick_backend(recipe: Recipe) -> str:
    """Return what samples unless told: on a GPU what training samples with, if it is installed here."""
    hardware = read_hardware()
    if recipe.generation.backend != "vllm" or is_on_cpu(recipe.launch, hardware):
        return "transformers"
    return choose_backend(recipe, hardware, read_vllm_version()).backend


def _make_request(source: Path, recipe: Recipe, options: EvalOptions) -> EvalRequest:
    for flag, value, known in (
        ("--split", options.split, get_args(Split)),
        ("--backend", options.backend or _pick_backend(recipe), get_args(Backend)),
    ):
        if value not in known:
            raise UsageError(f"there is no {flag} {value}. Fix: {' or '.join(known)}")
    subjects, baseline = name_subjects(
        source,
        recipe,
        model=options.model,
        checkpoint=options.checkpoint,
        baseline=options.baseline,
    )
    evaluation = recipe.evaluation
    samples = options.samples or evaluation.samples_per_prompt
    temperature = options.temperature
    if temperature is None:
        greedy = evaluation.temperature == 0 and samples > 1
        temperature = recipe.generation.temperature if greedy else evaluation.temperature
    check_sampling(samples, temperature)
    return EvalRequest(
        source=str(source),
        recipe=recipe,
        subjects=subjects,
        baseline=baseline,
        split=options.split,
        # 0 leaves out the measurement of a training; here it was asked for.
        limit=options.limit or evaluation.limit or None,
        samples=samples,
        temperature=temperature,
        seed=recipe.seed if options.seed is None else options.seed,
        backend=options.backend or _pick_backend(recipe),
        batch_size=options.batch_size or evaluation.batch_size,
        inputs=stamp_inputs(
            recipe,
            (subject.model for subject in subjects),
            (subject.adapter for subject in subjects if subject.adapter),
        ),
    )


def _root(source: Path, recipe: Recipe) -> Path:
    """Where evaluations go: into the run, or beside the runs."""
    return RunFolder(source).evaluations if source.is_dir() else Path("evals") / recipe.name


def _fresh(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(
            f"{path} exists already, and nothing is overwritten. Fix: another --out, or --resume"
        )
    return path


def _find_unfinished(request: EvalRequest, out: Path | None, root: Path) -> EvalFolder:
    """The newest evaluation of the same request without a result, one with samples before others."""
    newest = sorted(root.glob("*/"), reverse=True)
    candidates = (
        [out] if out else sorted(newest, key=lambda path: not EvalFolder(path).samples.any())
    )
    for path in candidates:
        folder = EvalFolder(path)
        if not folder.request.is_file() or folder.result.is_file():
            continue
        try:
            differing = folder.read_request().differing(request)
        except UsageError:
            if out:
                raise
            continue
        if not differing:
            folder.samples.path.mkdir(exist_ok=True)
            with folder.lock():
                folder.samples.forget_torn()
            return folder
        if out:
            raise UsageError(
                f"{out} was started with other settings ({', '.join(differing)}). "
                "Fix: give the same ones, or another --out"
            )
    raise UsageError(
        f"there is no interrupted evaluation with these settings in {out or root}. Fix: leave out --resume"
    )


def run_here(request: EvalRequest, folder: EvalFolder, tell: Progress) -> None:
    """Measures in this process alone."""
    import torch

    from grpo_cli.eval.work import Place, measure

    device = torch.device(pick_device(request.recipe.launch))
    measure(request, folder, Place(0, 1, device), tell)


def finish(
    request: EvalRequest, folder: EvalFolder, harness: dict[str, Any] | None
) -> dict[str, Any]:
    """Sums up what was sampled, and writes the result.

    Args:
        request: What was asked for.
        folder: Holds every sample.
        harness: Scores of standard benchmarks, where they were asked for.
    """
    origin = describe_origin(sys.argv, Path(request.source), request.seed)
    result = build_result(request, folder, folder.read_about(), origin)
    if harness is not None:
        result["harness"] = harness
    write_result(folder, result)
    return result
