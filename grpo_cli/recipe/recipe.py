"""The whole recipe: one frozen object, the only input of everything downstream."""

from typing import Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from grpo_cli.recipe.base import Integer, Section
from grpo_cli.recipe.dataset import DatasetConfig, ScoredDataset
from grpo_cli.recipe.evaluation import EvaluationConfig
from grpo_cli.recipe.expect import ExpectConfig
from grpo_cli.recipe.generation import GenerationConfig
from grpo_cli.recipe.launch import LaunchConfig
from grpo_cli.recipe.logging import LoggingConfig
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.recipe.training import TrainingConfig


class Recipe(Section):
    """A GRPO training, from the model to the launch."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the runs: they go to `runs/<name>/<timestamp>/`."""
    description: str | None = None
    """What this recipe is for."""
    seed: Integer = Field(default=42, ge=0, lt=2**32)
    """Seed of data order, adapters and sampling."""
    model: ModelConfig
    """What is trained."""
    dataset: DatasetConfig
    """What is asked."""
    rewards: tuple[RewardConfig, ...] = Field(default=(), validate_default=True)
    """What is rewarded; the weighted sum of the list. Left out with `dataset.kind: scored` alone."""
    generation: GenerationConfig = GenerationConfig()
    """How completions are sampled."""
    training: TrainingConfig = TrainingConfig()
    """How the model learns."""
    launch: LaunchConfig = LaunchConfig()
    """On which devices."""
    logging: LoggingConfig = LoggingConfig()
    """What is reported."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How the model is measured before and after."""
    expect: ExpectConfig | None = None
    """Where a normal run lies, and by which runs that is known."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _check_rewards(cls, rewards: Any, info: ValidationInfo) -> Any:
        """Rewards are needed, except where the rows bring theirs along."""
        dataset = info.data.get("dataset")
        if isinstance(dataset, ScoredDataset):
            if rewards:
                raise PydanticCustomError(
                    "grpo_scored",
                    "belongs to data that is sampled; with `dataset.kind: scored` the rewards stand in the rows",
                    {
                        "fix": "remove it (`rewards: []` where a parent has some), or use another `dataset.kind`"
                    },
                )
        elif rewards == []:
            length = {"field_type": "Tuple", "min_length": 1, "actual_length": 0}
            raise PydanticKnownError("too_short", length)
        elif rewards == () and dataset is not None:
            raise PydanticKnownError("missing")
        return rewards

    @property
    def is_sampled(self) -> bool:
        """Whether training samples completions; with scored data it does not."""
        return not isinstance(self.dataset, ScoredDataset)
