"""Writes the parts of the documentation that stand in the code already.

`make docs` runs it; a test fails where the files differ from what it would write. Owns the layout
of the references only: every word of them comes from the code, the schema and the installed TRL.
"""

import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_cli.analysis.diagnosis.rule import Rule
from grpo_cli.analysis.diagnosis.rules import RULES
from grpo_cli.checks.schema import build_schema
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.asynchronous import AsyncConfig
from grpo_cli.recipe.dataset import (
    ColumnConfig,
    FilesDataset,
    HubDataset,
    InlineDataset,
    PromptConfig,
    ReasoningGymDataset,
    ScoredDataset,
)
from grpo_cli.recipe.evaluation import EvaluationConfig
from grpo_cli.recipe.expect import ExpectConfig, ExpectedMetric, MeasuredConfig
from grpo_cli.recipe.fast import FastConfig
from grpo_cli.recipe.generation import DynamicSamplingConfig, GenerationConfig, VllmConfig
from grpo_cli.recipe.launch import LaunchConfig
from grpo_cli.recipe.logging import LoggingConfig
from grpo_cli.recipe.model import LoraConfig, ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.recipe.slurm import SlurmConfig
from grpo_cli.recipe.training import EarlyStoppingConfig, TrainingConfig
from grpo_cli.rewards.description import KindDescription, ParameterDescription, describe_kind
from grpo_cli.rewards.registry import KINDS
from grpo_cli.runs.files import write_json, write_text

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "recipe.md"
REWARDS = ROOT / "docs" / "rewards.md"
DIAGNOSIS = ROOT / "docs" / "diagnosis.md"
SCHEMA = ROOT / "recipes" / "recipe.schema.json"

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("(top level)", Recipe),
    ("model", ModelConfig),
    ("model.lora", LoraConfig),
    ("dataset, kind: hub", HubDataset),
    ("dataset, kind: files", FilesDataset),
    ("dataset, kind: reasoning_gym", ReasoningGymDataset),
    ("dataset, kind: inline", InlineDataset),
    ("dataset, kind: scored", ScoredDataset),
    ("dataset.prompt", PromptConfig),
    ("dataset.columns.NAME", ColumnConfig),
    ("rewards, every entry", RewardConfig),
    ("generation", GenerationConfig),
    ("generation.dynamic_sampling", DynamicSamplingConfig),
    ("generation.vllm", VllmConfig),
    ("training", TrainingConfig),
    ("training.early_stopping", EarlyStoppingConfig),
    ("training.fast", FastConfig),
    ("training.asynchronous", AsyncConfig),
    ("launch", LaunchConfig),
    ("launch.slurm", SlurmConfig),
    ("logging", LoggingConfig),
    ("evaluation", EvaluationConfig),
    ("expect", ExpectConfig),
    ("expect.metrics, every entry", ExpectedMetric),
    ("expect.measured", MeasuredConfig),
)
KIND_SECTIONS = tuple(KINDS.items())
INTRO = """# Recipe reference

Every key of a recipe, with its default and its meaning. Generated from the schema by `make docs`; do
not edit. Names are TRL's wherever TRL has one. Besides the keys listed, `generation`,
`generation.vllm`, `training` and `logging` take every `GRPOConfig` field named at their end, with
TRL's meaning and default.

The kinds of rewards and their parameters are in [the reference of rewards](rewards.md). Editors check
and complete recipes with the same schema: `grpo schema` prints it.
"""
REWARDS_INTRO = """# Reward reference

Every kind of reward: its formula, its range, where it comes from, and its parameters. Generated from
the code by `make docs`; do not edit. In a terminal `grpo rewards show KIND` says the same.

Beside the parameters here, every entry of `rewards` takes `name`, `weight`, `when`, `timeout_s`,
`on_error` and `clip`: see [the recipe reference](recipe.md#rewards-every-entry). How to try rewards
before training is in [Your own reward](own-reward.md#try-it-before-training).
"""
_MARK = "<!-- Written by `make docs` from the rules; do not edit from here on. -->\n"


def render_reference() -> str:
    """The recipe reference as Markdown."""
    parts = [INTRO]
    for title, model in SECTIONS:
        parts.append(f"\n## {title}\n\n{_docstring(model)}\n")
        rows = list(_rows(model))
        if rows:
            parts.append(
                "\n| key | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
            )
        if title in ("generation", "generation.vllm", "training", "logging"):
            parts.append(f"\nAlso: {_upstream(title, model)}.\n")
    return "".join(parts)


def render_rewards() -> str:
    """The reference of rewards as Markdown: an overview, then a section for each kind."""
    described = [describe_kind(kind) for kind in KINDS]
    overview = [f"| [`{each.kind}`](#{each.kind}) | {each.summary} |" for each in described]
    head = [REWARDS_INTRO, "\n| kind | what it does |\n| --- | --- |\n", "\n".join(overview), "\n"]
    return "".join([*head, *(_kind(each) for each in described)])


def render_diagnosis() -> str:
    """The page on diagnosis, with its table of rules: what stands behind the mark is replaced."""
    prose, mark, _ = DIAGNOSIS.read_text(encoding="utf-8").partition(_MARK)
    rows = [
        f"| `{rule.name}` | {rule.title} | {_code(rule.metrics)} | {_records(rule)} "
        f"| {_cell(rule.threshold)} | {_cell(rule.source)} |"
        for rule in RULES
    ]
    head = (
        "| rule | what is wrong | metric | records looked at (needed) | threshold | source |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    return "\n".join([f"{prose}{mark}\n", head, *rows, ""])


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _kind(described: KindDescription) -> str:
    rows = [
        f"| `{each.name}` | {_shown(each)} | {_cell(each.doc)} |" for each in described.parameters
    ]
    table = "\n".join(["\n| parameter | default | meaning |\n| --- | --- | --- |", *rows, ""])
    return f"\n## {described.kind}\n\n{described.doc}\n{table if rows else ''}"


def _shown(parameter: ParameterDescription) -> str:
    return "required" if parameter.required else f"`{json.dumps(parameter.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write_all() -> None:
    """Writes every generated file."""
    write_text(REFERENCE, render_reference())
    write_text(REWARDS, render_rewards())
    write_text(DIAGNOSIS, render_diagnosis())
    write_json(SCHEMA, build_schema())


def _records(rule: Rule) -> str:
    # Some look at measurements instead.
    return f"{rule.window} ({rule.min_records})" if rule.window else "–"


def _docstring(model: type[BaseModel]) -> str:
    lines = [line.strip() for line in (model.__doc__ or "").strip().splitlines()]
    return "\n".join(lines)


def _rows(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        meaning = _cell(" ".join((field.description or "").split()))
        yield f"| `{field.alias or name}` | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        literal = typing.get_args(field.annotation)
        only = typing.get_origin(field.annotation) is typing.Literal and len(literal) == 1
        return f"`{literal[0]}`" if only else "required"
    value = field.default if field.default is not PydanticUndefined else field.default_factory()  # type: ignore[call-arg,misc]
    if isinstance(value, BaseModel):
        return "see below"
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return f"`{words[value]}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _upstream(home: str, model: type[BaseModel]) -> str:
    names = grpo_fields.names_in(typing.cast(grpo_fields.Home, home))
    return ", ".join(f"`{name}`" for name in sorted(names) if name not in model.model_fields)


if __name__ == "__main__":
    sys.exit(write_all())
