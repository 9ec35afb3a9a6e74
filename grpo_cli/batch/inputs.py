"""The settings that decide the arithmetic, and the products that rules and counts are made of.

Owns names and defaults, not their meaning together: any numbers may stand here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """The settings that decide the arithmetic, under TRL's names and with TRL's defaults."""

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_processes: int = 1
    num_generations: int = 8
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    max_resample: int | None = None
    """Rounds in which groups without signal are replaced; None where they are not."""
    num_iterations: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    """Optimizer steps; negative means that `num_train_epochs` decides."""
    dataset_size: int | None = None
    """Training prompts; None where unknown."""
    evaluates: bool = False
    """Whether `eval_strategy` is other than "no"."""
    per_device_eval_batch_size: int = 8
    num_generations_eval: int | None = None
    eval_dataset_size: int | None = None
    """Evaluation prompts; None where unknown."""

    @property
    def micro_batch(self) -> int:
        """Completions of one micro-step, on all processes."""
        return self.per_device_train_batch_size * self.num_processes

    @property
    def generation_batch(self) -> int:
        """Completions of one generation batch, set or derived."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return self.generation_batch_size or self.micro_batch * steps

    @property
    def eval_batch(self) -> int:
        """Completions of one batch of the evaluation, on all processes."""
        return self.per_device_eval_batch_size * self.num_processes

    @property
    def eval_group(self) -> int:
        """Completions of one prompt in the evaluation."""
        return self.num_generations_eval or self.num_generations
