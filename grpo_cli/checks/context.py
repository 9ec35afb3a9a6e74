"""What checks read: a recipe with all that was derived from it once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from grpo_cli.batch.inputs import batch_inputs
from grpo_cli.batch.plan import BatchInputs, BatchPlan, plan_batch
from grpo_cli.checks.kinds import SECTIONS, read_kinds
from grpo_cli.data.preview import Preview, join_previews, preview
from grpo_cli.errors import ProblemsError
from grpo_cli.issues import Issue
from grpo_cli.machine import Hardware, is_on_cpu, resolve_num_processes
from grpo_cli.recipe.dataset import DatasetConfig, MixtureDataset
from grpo_cli.recipe.launch import LaunchConfig
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.contract import RewardParams


@dataclass(frozen=True)
class CheckContext:
    """A recipe, the machine, and what is read of its kinds and data."""

    loaded: LoadedRecipe
    """The YAML tree, and the recipe without the values that its problems are about."""
    recipe: Recipe
    """The same recipe; None only for checks that also run if it does not fit the schema."""
    hardware: Hardware
    """Of the machine that trains."""
    rewards: Mapping[int, RewardParams]
    """Parameters of the rewards that can be read, by their index."""
    kinds: Mapping[str, Any]
    """Parameters of the tools and environments without errors, by their path, such as `tools.0`."""
    kind_issues: Sequence[Issue]
    """What is wrong with the parameters of rewards, tools and environments."""
    dataset: Any
    """The `dataset` section, by itself if the rest does not fit the schema; None if it does not either."""
    previews: Sequence[Preview]
    """The beginning of the data: one preview a source."""
    preview: Preview | None
    """The same of all sources together; None if the `dataset` section is wrong."""
    num_processes: int
    """Processes of the training on all machines."""
    plan: BatchPlan
    """The batch arithmetic."""
    steps: int | None
    """Optimizer steps of the training; None if they are not known."""
    on_cpu: bool
    """Whether training is known to be on a CPU."""


def read_context(loaded: LoadedRecipe, hardware: Hardware) -> CheckContext:
    """Return what checks read of a recipe."""
    recipe, dataset = loaded.recipe, _read_dataset(loaded)
    read = [read_kinds(loaded, section) for section in SECTIONS]
    rewards, tools, environments = (valid for valid, _ in read)
    sources = dataset.sources if isinstance(dataset, MixtureDataset) else [dataset]
    seed = recipe.seed if recipe else 0
    previews = [preview(source, seed) for source in sources if source is not None]
    seen = previews[0] if previews else None
    if isinstance(dataset, MixtureDataset):
        seen = join_previews(dataset, previews)
    processes = resolve_num_processes(recipe, hardware) if recipe else 1
    rows = (seen.train_rows, seen.eval_rows) if seen else (None, None)
    plan = plan_batch(batch_inputs(recipe, processes, *rows) if recipe else BatchInputs())
    return CheckContext(
        loaded,
        cast(Recipe, recipe),
        hardware,
        rewards={int(path.split(".")[1]): each for path, each in rewards.items() if "." in path},
        kinds={**tools, **environments},
        kind_issues=[issue for _, issues in read for issue in issues],
        dataset=dataset,
        previews=previews,
        preview=seen,
        num_processes=processes,
        plan=plan,
        steps=plan.total_optimizer_steps,
        on_cpu=recipe is not None and checks_on_cpu(recipe.launch, hardware),
    )


def _read_dataset(loaded: LoadedRecipe) -> Any:
    if loaded.recipe is not None:
        return loaded.recipe.dataset
    node = loaded.tree.child("dataset")
    try:
        return TypeAdapter(DatasetConfig).validate_python(node.plain()) if node else None
    except ValidationError:
        return None


Check = Callable[[CheckContext], Iterable[Issue]]


def checks_on_cpu(launch: LaunchConfig, hardware: Hardware) -> bool:
    """Return whether training is known to be on a CPU; a job's nodes may have GPUs that this machine lacks."""
    return is_on_cpu(launch, hardware) and (launch.use_cpu or launch.slurm is None)


def collect(check: Callable[[], object]) -> list[Issue]:
    """Return the problems that a function raises; none if it passes."""
    try:
        check()
    except ProblemsError as error:
        return error.problems
    return []
