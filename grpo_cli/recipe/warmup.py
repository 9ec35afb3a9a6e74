"""The `warmup` section: supervised steps before GRPO."""

from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import Integer, Number, OneOrMany, Section
from grpo_cli.recipe.dataset import DatasetConfig, FilesDataset, Paths

Answer = Annotated[str, Field(min_length=1)]


class WarmupConfig(Section):
    """Supervised steps before GRPO, for what the model hardly ever samples: the form of an answer, or a call.

    It learns from answers that you write (`answer`), or from the best of its own completions (`best_of`). Only the
    model's own tokens count in the loss. GRPO starts from the adapter or weights that result; with `training.beta`
    they are the reference.
    """

    answer: OneOrMany[Answer] | None = Field(default=None, min_length=1)
    """What the model should write: a template over the row's columns, like the prompt's. With tools or an
    environment it may be a list, one answer for each turn; the results between them are the real ones."""
    best_of: Integer | None = Field(default=None, ge=2)
    """Instead of `answer`: sample so many completions of each prompt and learn from the best one (rejection
    sampling), unless its reward is below the mean of all."""
    train: Paths | None = None
    """Files with rows to use instead of the recipe's training rows; `dataset.columns` and `dataset.prompt` apply
    to them too."""
    limit: Integer = Field(default=256, ge=1)
    """Use only the first rows."""
    learning_rate: Number | None = Field(default=None, gt=0)
    """Learning rate; 2e-4 with LoRA and 1e-5 without if left out."""
    num_train_epochs: Number = Field(default=3, gt=0)
    """How often each answer is learned from."""
    max_steps: Integer | None = Field(default=None, ge=1)
    """Optimizer steps; overrides `num_train_epochs`."""
    per_device_train_batch_size: Integer = Field(default=8, ge=1)
    """Answers in a micro-batch."""
    gradient_accumulation_steps: Integer = Field(default=1, ge=1)
    """Micro-batches in an optimizer step."""
    eval_fraction: Number = Field(default=0.1, ge=0, lt=1)
    """Share of the answers that are held out. Their loss is computed once an epoch, and GRPO starts from the
    weights with the lowest. 0 holds out none."""
    patience: Integer = Field(default=2, ge=1)
    """Stop after so many evaluations without a lower held-out loss."""

    @model_validator(mode="after")
    def _check_source(self) -> "WarmupConfig":
        if (self.answer is None) == (self.best_of is None):
            seen = "neither" if self.answer is None else "both"
            raise PydanticCustomError(
                "grpo_warmup",
                "needs either `answer` or `best_of` to say what is learned; it has {seen}",
                {
                    "seen": seen,
                    "fix": 'keep one, such as `answer: "<answer>{{ answer }}</answer>"`',
                },
            )
        return self

    @property
    def described(self) -> str:
        """What it learns from, in words."""
        kept = f"the best of {self.best_of} completions" if self.best_of else "written answers"
        names = [path.rsplit("/", 1)[-1] for path in self.train or ()]
        return f"{kept}, from up to {self.limit} rows{' of ' * bool(names)}{', '.join(names)}"

    def read_from(self, dataset: DatasetConfig) -> FilesDataset | None:
        """Return the warm-up's own files, with the recipe's prompts; None if it has none."""
        if self.train is None:
            return None
        shared = {
            name: getattr(dataset, name) for name in ("prompt", "columns", "max_prompt_length")
        }
        return FilesDataset(kind="files", train=self.train, limit=self.limit, **shared)
