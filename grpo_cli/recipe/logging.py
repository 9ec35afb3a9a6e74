"""The `logging` section: what is reported, and where to."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from grpo_cli.recipe.base import Number, OneOrMany, OpenSection


def _none_as_empty(value: Any) -> Any:
    """Reads TRL's `none` as no tracker at all."""
    return () if value in (None, "none", ["none"]) else value


class LoggingConfig(OpenSection):
    """Where metrics and samples go; `metrics.jsonl` in the run folder is always written."""

    report_to: Annotated[OneOrMany[str], BeforeValidator(_none_as_empty)] = ()
    """Trackers: `tensorboard`, `wandb`, `trackio`, `mlflow`, …; `all` is every one that is installed."""
    log_completions: bool = True
    """Write every sampled group with its scores to `completions/`."""
    logging_steps: Number = Field(default=1, gt=0)
    """Optimizer steps between two records (TRL's own default is 10)."""

    def trl_fields(self) -> dict[str, Any]:
        """Every `GRPOConfig` field this section sets, under TRL's names."""
        fields = self.model_dump(exclude={"log_completions"})
        return {**fields, "report_to": list(self.report_to)}
