"""The `logging` section: what is reported, and where to."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from grpo_cli.recipe.base import Number, OpenSection


def _as_list(value: Any) -> Any:
    """Reads `wandb` as `[wandb]`, and `none` as `[]`."""
    if value is None or value == "none":
        return ()
    return (value,) if isinstance(value, str) else value


class LoggingConfig(OpenSection):
    """Where metrics and samples go; `metrics.jsonl` in the run folder is always written."""

    report_to: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    """Trackers: `tensorboard`, `wandb`, `trackio`, `mlflow`, …"""
    log_completions: bool = True
    """Write every sampled group with its scores to `completions/`."""
    logging_steps: Number = Field(default=1, gt=0)
    """Optimizer steps between two records (TRL's own default is 10)."""

    def trl_fields(self) -> dict[str, Any]:
        """Every `GRPOConfig` field this section sets, under TRL's names."""
        fields = self.model_dump(exclude={"log_completions"})
        return {**fields, "report_to": list(self.report_to)}
