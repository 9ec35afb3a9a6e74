"""What checks read: a recipe with all that was derived from it once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from grpo_cli.batch.inputs import batch_inputs
from grpo_cli.batch.plan import BatchPlan, plan_batch
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
    hardware: Hardware
    """Of the machine that trains."""

    @property
    def recipe(self) -> Recipe:
        """The recipe; None only for checks that also run if it does not fit the schema."""
        return cast(Recipe, self.loaded.recipe)

    @cached_property
    def kind_issues(self) -> list[Issue]:
        """What is wrong with the parameters of rewards, tools and environments."""
        return [issue for section in SECTIONS for issue in self._read[section][1]]

    @cached_property
    def rewards(self) -> Mapping[int, RewardParams]:
        """Parameters of the rewards that can be read, by their index."""
        valid, _ = self._read["rewards"]
        return {int(path.split(".")[1]): each for path, each in valid.items() if "." in path}

    @cached_property
    def kinds(self) -> Mapping[str, Any]:
        """Parameters of the tools and environments without errors, by their path, such as `tools.0`."""
        return {**self._read["tools"][0], **self._read["environment"][0]}

    @cached_property
    def _read(self) -> Mapping[str, tuple[dict[str, Any], list[Issue]]]:
        return {section: read_kinds(self.loaded, section) for section in SECTIONS}

    @cached_property
    def dataset(self) -> Any:
        """The `dataset` section, by itself if the rest does not fit the schema; None if it does not either."""
        if self.loaded.recipe is not None:
            return self.loaded.recipe.dataset
        node = self.loaded.tree.child("dataset")
        try:
            return TypeAdapter(DatasetConfig).validate_python(node.plain()) if node else None
        except ValidationError:
            return None

    @cached_property
    def previews(self) -> tuple[Preview, ...]:
        """The beginning of the data: one preview a source."""
        if self.dataset is None:
            return ()
        is_mixture = isinstance(self.dataset, MixtureDataset)
        seed = self.loaded.recipe.seed if self.loaded.recipe else 0
        sources = self.dataset.sources if is_mixture else (self.dataset,)
        return tuple(preview(source, seed) for source in sources)

    @cached_property
    def preview(self) -> Preview | None:
        """The beginning of the data; None if the `dataset` section is wrong."""
        if isinstance(self.dataset, MixtureDataset):
            return join_previews(self.dataset, list(self.previews))
        return self.previews[0] if self.previews else None

    @cached_property
    def num_processes(self) -> int:
        """Processes of the training on all machines."""
        return resolve_num_processes(self.recipe, self.hardware) if self.loaded.recipe else 1

    @property
    def on_cpu(self) -> bool:
        """Whether training is known to be on a CPU."""
        return checks_on_cpu(self.recipe.launch, self.hardware)

    @cached_property
    def plan(self) -> BatchPlan:
        """The batch arithmetic of the recipe."""
        seen = self.preview
        rows = (seen.train_rows, seen.eval_rows) if seen else (None, None)
        return plan_batch(batch_inputs(self.recipe, self.num_processes, *rows))

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the training; None if they are not known."""
        return self.plan.total_optimizer_steps


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
