"""The functions of the Python API: what the commands do, with plain arguments and results."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import RunError
from grpo_cli.reporter import Reporter

if TYPE_CHECKING:
    from grpo_cli.checks.recipe import CheckedRecipe
    from grpo_cli.eval.request import BackendChoice, Split
    from grpo_cli.exporting.request import Format, GgufType, Precision
    from grpo_cli.probing.session import Probe
    from grpo_cli.recipe.recipe import Recipe
    from grpo_cli.runs.run import Run

Overrides = Mapping[str, Any]


def _as_flags(overrides: Overrides | None) -> list[str]:
    return [f"{path}={json.dumps(value)}" for path, value in (overrides or {}).items()]


def load_recipe(path: Path | str, overrides: Overrides | None = None) -> "Recipe":
    """Read and validate a recipe; raises `RecipeError` with every problem found."""
    from grpo_cli.recipe.loading import load_recipe as load

    return load(Path(path), _as_flags(overrides))


def check(path: Path | str, overrides: Overrides | None = None) -> "CheckedRecipe":
    """Run every check of a recipe that needs no model; raises `RecipeError` if the YAML itself cannot be read."""
    from grpo_cli.checks.recipe import check_recipe

    return check_recipe(Path(path), _as_flags(overrides))


def probe(
    path: Path | str,
    overrides: Overrides | None = None,
    *,
    prompts: int = 16,
    quick: bool = False,
    runs: Path | str = "runs",
) -> "Probe":
    """Sample and score a few completions, and take one training step that is thrown away.

    Args:
        path: The YAML file.
        overrides: Values to replace, by dotted path.
        prompts: Prompts to sample `num_generations` completions for.
        quick: Load no weights.
        runs: Where free disk space is checked.

    Raises:
        GrpoError: The recipe has errors, or the model, the data or a reward cannot be loaded.
    """
    from grpo_cli.probing.procedure import probe_recipe

    checked = check(path, overrides)
    return probe_recipe(
        checked.recipe,
        source=Path(path),
        prompts_sampled=prompts,
        quick=quick,
        runs=Path(runs),
        known=checked.problems,
    )


def train(
    path: Path | str,
    overrides: Overrides | None = None,
    *,
    runs: Path | str = "runs",
    run_id: str | None = None,
    resume: bool = False,
    force: bool = False,
    probe: bool = True,
    reporter: Reporter | None = None,
) -> "Run":
    """Train a recipe in processes of its own, and wait for the end.

    Args:
        path: The YAML file.
        overrides: Values to replace, by dotted path.
        runs: Where the run folder goes.
        run_id: Name of the run folder; the time by default.
        resume: Resume the newest run of this recipe, or `run_id`, from its last checkpoint.
        force: Resume even if the recipe has changed.
        probe: Run the quick probe first.
        reporter: Told what happens; nobody by default.

    Returns:
        The run, which may have been stopped.

    Raises:
        GrpoError: The recipe has errors, the probe refused it, or the run failed.
    """
    from grpo_cli.launch.prepare import ResumeRequest, prepare
    from grpo_cli.launch.train import train as supervise
    from grpo_cli.runs.run import Run

    reporter = reporter or Reporter()
    request = ResumeRequest(resume, None, force, run_id)
    prepared = prepare(
        Path(path), _as_flags(overrides), Path(runs), request, reporter, dry_run=False
    )
    probe = probe and prepared.is_new and not (resume and run_id)
    supervise(prepared, reporter, probe=probe)
    run = Run(prepared.folder)
    if run.status.state == "failed":
        error = run.status.error
        raise RunError(error.seen, error.fix, details=[f"The worker's log: {run.folder.log}"])
    return run


def evaluate(
    source: Path | str,
    overrides: Overrides | None = None,
    *,
    model: str | None = None,
    checkpoint: str | None = None,
    baseline: str | None = None,
    split: "Split" = "eval",
    limit: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    backend: "BackendChoice | None" = None,
    out: Path | str | None = None,
    num_processes: int | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Measure the models of a run, or a model with a recipe, and the gain over a baseline.

    Args:
        source: A run folder or a recipe.
        overrides: Values of a recipe to replace, by dotted path.
        model: Another model or adapter to measure.
        checkpoint: A step of the run, `best` or `all`; the final model by default.
        baseline: What to compare with; the model that training began with by default, `none` for nothing.
        split: Which rows to measure on.
        limit: How many prompts; all by default.
        samples: Answers a prompt.
        temperature: 0 takes the most likely token.
        backend: What samples; by default `auto`: vLLM on GPUs if training samples with it, otherwise transformers.
        out: Folder of the result; a new one in the run by default.
        num_processes: How many measure together; one for each GPU by default.
        reporter: Told how far it is; nobody by default.

    Returns:
        What `result.json` holds.

    Raises:
        GrpoError: The source, a setting, a model, the data or a reward is wrong.
    """
    from grpo_cli.eval.request import EvalOptions
    from grpo_cli.eval.run import evaluate as measure

    options = EvalOptions(
        model=model,
        checkpoint=checkpoint,
        baseline=baseline,
        split=split,
        limit=limit,
        samples=samples,
        temperature=temperature,
        backend=backend or "auto",
        out=None if out is None else Path(out),
    )
    flags = _as_flags(overrides)
    reporter = reporter or Reporter()
    return measure(Path(source), flags, options, reporter, num_processes=num_processes).result


def export(
    run: Path | str,
    to: Path | str,
    *,
    format: "Format" = "safetensors",
    checkpoint: str | None = None,
    dtype: "Precision | None" = None,
    gguf_type: "GgufType | None" = None,
    converter: Path | str | None = None,
    max_shard_size: str = "5GB",
    verify: bool = True,
    force: bool = False,
    push_to: str | None = None,
    private: bool = True,
    on_progress: Callable[[str], None] = lambda what: None,
    trust_checkpoint: bool = False,
) -> dict[str, Any]:
    """Export the model of a run to a folder, and verify that the export is the trained model.

    Args:
        run: The run folder.
        to: Folder of the export.
        format: What to write.
        checkpoint: A step of the run, or `best`; the final model by default.
        dtype: Of safetensors. By default the run's own, or float32 if that loses much of what was trained.
        gguf_type: Of a GGUF file; `f16` by default.
        converter: A llama.cpp checkout, or its converter.
        max_shard_size: Of one file of weights, such as `500MB`.
        verify: Load the export again and compare it with the trained model.
        force: Replace an earlier export.
        push_to: `ORG/NAME` of a repository on the hub to upload to, as one commit.
        private: Whether that repository is created as a private one.
        on_progress: Called with each thing that is being done.
        trust_checkpoint: Unpickle whatever the shards of the checkpoint hold, code too.

    Returns:
        What `export.json` holds: path, files, bytes, verification, warnings.

    Raises:
        GrpoError: The model cannot be exported, or the export is not what was trained; nothing is left then.
    """
    from grpo_cli.exporting import exporting
    from grpo_cli.exporting.formats import find_converter
    from grpo_cli.exporting.request import make_request

    request = make_request(Path(run), format, checkpoint, dtype, gguf_type, max_shard_size)
    command = find_converter(Path(converter) if converter else None) if format == "gguf" else None
    refine = dtype is None and format == "safetensors" and verify
    target = Path(to).expanduser().resolve()
    plan = exporting.ExportPlan(
        request, target, force, verify, refine, command, trusted=trust_checkpoint
    )
    if push_to is None:
        return exporting.export(plan, on_progress)
    return exporting.export_and_push(plan, push_to, private=private, tell=on_progress)
