"""What checks read: a recipe with all that was derived from it once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

from pydantic import TypeAdapter, ValidationError

from grpo_cli.batch.plan import BatchInputs, BatchPlan, batch_inputs, plan_batch
from grpo_cli.data.preview import Preview, join_previews, preview
from grpo_cli.data.rows import suggest
from grpo_cli.errors import ProblemsError, RecipeError, RunError
from grpo_cli.issues import Issue
from grpo_cli.machine import Hardware, is_on_cpu, resolve_num_processes
from grpo_cli.models.source import resolve_source
from grpo_cli.recipe.base import Section
from grpo_cli.recipe.dataset import DatasetConfig, MixtureDataset
from grpo_cli.recipe.episode import KindConfig
from grpo_cli.recipe.explanation import UNKNOWN, explain, unknown_key
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.recipe.yaml_tree import KeyPath, dotted, split_path
from grpo_cli.rewards import registry as reward_kinds
from grpo_cli.rewards.contract import RewardContext, RewardParams

SECTIONS = ("rewards", "tools", "environment")


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
    """What is wrong with the parameters of rewards, tools and environments, and with the names of tools."""
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
    """Whether training is known to be on a CPU; a job's nodes may have GPUs that this machine lacks."""

    def find_unseen(self) -> Iterator[str]:
        """Yield what the training depends on and no check looks at, in words."""
        recipe, seen, processes = self.recipe, self.preview, self.num_processes
        if recipe.dataset.streams and recipe.dataset.limit != recipe.dataset.rows_read:
            yield f"rows after the first {recipe.dataset.rows_read:,}, which are read while training needs them"
        elif seen is None or seen.train_rows is None:
            yield "the rows of the dataset, which are loaded when training starts"
        with suppress(RecipeError):
            if resolve_source(recipe.model).kind == "hub":
                yield f"the model {recipe.model.path}: a hub id, which is not looked up here"
        if processes > 1 and not recipe.launch.use_cpu and self.hardware.gpus == 0:
            yield f"GPUs for the {processes} processes: none was found, or `--gpus 0` was given"


def read_context(loaded: LoadedRecipe, hardware: Hardware) -> CheckContext:
    """Return what checks read of a recipe."""
    recipe, dataset = loaded.recipe, _read_dataset(loaded)
    read = [read_kinds(loaded, section) for section in SECTIONS]
    rewards, tools, environments = (valid for valid, _ in read)
    kinds = {**tools, **environments}
    seed = recipe.seed if recipe else 0
    previews = [preview(source, seed) for source in dataset.parts] if dataset else []
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
        kinds=kinds,
        kind_issues=[*(issue for _, issues in read for issue in issues), *_check_names(kinds)],
        dataset=dataset,
        previews=previews,
        preview=seen,
        num_processes=processes,
        plan=plan,
        steps=plan.total_optimizer_steps,
        on_cpu=recipe is not None
        and is_on_cpu(recipe.launch, hardware)
        and (recipe.launch.use_cpu or recipe.launch.slurm is None),
    )


def _check_names(kinds: Mapping[str, Any]) -> Iterator[Issue]:
    """Find tools with the same name."""
    owners: dict[str, str] = {}
    for path, params in kinds.items():
        shared = [name for name, owner in owners.items() if owner.startswith("tools")]
        for name in params.tool_names() or ():
            # A row takes one environment, so the names of two of them do not meet.
            if name in shared:
                seen = f"its tool `{name}` has the same name as that of {owners[name]}"
                yield Issue(seen, "rename one of them: the model calls tools by name", path)
            owners.setdefault(name, path)


def _read_dataset(loaded: LoadedRecipe) -> Any:
    if loaded.recipe is not None:
        return loaded.recipe.dataset
    node = loaded.tree.child("dataset")
    try:
        return TypeAdapter(DatasetConfig).validate_python(node.plain()) if node else None
    except ValidationError:
        return None


Check = Callable[[CheckContext], Iterable[Issue]]


@contextmanager
def collect(issues: list[Issue]) -> Iterator[None]:
    """Add the problems that the body raises to `issues`."""
    try:
        yield
    except ProblemsError as error:
        issues += error.problems


class KindRegistry(NamedTuple):
    """The kinds that a section of the recipe may name."""

    noun: str
    """What messages call a kind."""
    common: type[Section]
    """The keys that entries of every kind have."""
    find: Callable[[str], Any]
    """Returns the parameters' class of a kind; None if there is none."""
    names: Callable[[], list[str]]


def kind_entries(loaded: LoadedRecipe, section: str) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield the entries of a section that name their kind, each with its path: of a list, or a single one."""
    node = loaded.tree.child(section)
    if node is None:
        return
    listed = isinstance(node.value, list)
    for index, entry in enumerate(node.plain() if listed else [node.plain()]):
        if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
            yield (section, index) if listed else (section,), entry


def read_kinds(loaded: LoadedRecipe, section: str) -> tuple[dict[str, Any], list[Issue]]:
    """Return the parameters of a section's entries by their path, and what is wrong.

    Tools and environments with errors are left out; of rewards, only those whose parameters cannot be read.
    """
    valid: dict[str, Any] = {}
    issues: list[Issue] = []
    of_recipe: tuple[RewardContext | None, ...] = ()
    if section == "rewards":
        recipe = loaded.recipe
        of_recipe = (RewardContext(recipe.generation.max_completion_length) if recipe else None,)
    for at, entry in kind_entries(loaded, section):
        params, wrong = _read_params(loaded, at, entry, _registry_of(section))
        issues += wrong
        if params is None:
            continue
        path, found = dotted(at), params.problems(*of_recipe)
        issues += [replace(each, path=f"{path}.{each.path}") for each in found]
        if section == "rewards" or not any(each.level == "error" for each in found):
            valid[path] = params
    return valid, issues


def _registry_of(section: str) -> KindRegistry:
    if section == "rewards":
        return KindRegistry(
            "reward kind", RewardConfig, reward_kinds.find_kind, reward_kinds.kind_names
        )
    # Imported late: recipes without tools and environments do not pay for it.
    from grpo_cli.environments.registry import find_kind, kind_names

    noun = f"kind of {section.removesuffix('s')}"
    return KindRegistry(noun, KindConfig, partial(find_kind, section), partial(kind_names, section))


def _read_params(
    loaded: LoadedRecipe, at: KeyPath, entry: dict[str, Any], registry: KindRegistry
) -> tuple[Any, list[Issue]]:
    """Return the parameters of an entry, validated by its kind; None, with issues, if they are wrong."""
    kind, path = entry["kind"], dotted(at)
    try:
        schema = registry.find(kind)
    except RunError as error:
        return None, [error.as_issue(f"{path}.kind")]
    if schema is None:
        names = registry.names()
        fix = suggest(kind, names, f"write one of {', '.join(names)}")
        return None, [Issue(f"there is no {registry.noun} `{kind}`", fix, f"{path}.kind")]
    common = registry.common.model_fields
    values = {key: each for key, each in entry.items() if key not in common}
    try:
        return schema.model_validate(values), []
    except ValidationError as error:
        wrong = explain(error, schema, loaded.tree, at)
    keys = {split_path(issue.path)[len(at) :][:1] for issue in wrong}
    issues = []
    with suppress(ValidationError):
        # What it needs to be installed does not depend on the wrong ones.
        rest = {key: each for key, each in values.items() if (key,) not in keys}
        others = schema.model_validate(rest).problems()
        issues = [
            replace(each, path=f"{path}.{each.path}".rstrip(".")) for each in others if each.package
        ]
    for issue in wrong:
        # An unknown parameter may also be a misspelt key that every entry has.
        known = [*schema.model_fields, *common]
        unknown = issue.kind == UNKNOWN
        issues.append(unknown_key(loaded.tree, split_path(issue.path), known) if unknown else issue)
    return None, issues
