"""The whole recipe: one frozen object, the only input of everything downstream."""

from pydantic import Field

from grpo_cli.recipe.base import Integer, Section
from grpo_cli.recipe.dataset import DatasetConfig
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
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    """What is rewarded; the weighted sum of the list."""
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
