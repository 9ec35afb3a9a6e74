"""Generate the parts of the documentation that come from the code.

Run by `make docs`; a test fails if the generated files are out of date. This script only defines the layout: the
text comes from the code, the schema and the installed TRL.
"""

import dataclasses
import enum
import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_cli.analysis.diagnosis.diagnosis import RULES
from grpo_cli.analysis.diagnosis.rule import Rule
from grpo_cli.checks.compatibility import Conflict, read_conflicts
from grpo_cli.checks.schema import build_schema
from grpo_cli.recipe import base, grpo_fields
from grpo_cli.recipe.base import Section, field_docs
from grpo_cli.recipe.dataset import (
    ColumnConfig,
    EnvironmentDataset,
    FilesDataset,
    HubDataset,
    InlineDataset,
    MixtureDataset,
    PromptConfig,
    ReasoningGymDataset,
    ScoredDataset,
    SourceKeys,
    StreamingConfig,
)
from grpo_cli.recipe.difficulty import AdaptiveDifficulty, OrderDifficulty, PoolsDifficulty
from grpo_cli.recipe.episode import EpisodeConfig, KindConfig
from grpo_cli.recipe.evaluation import EvaluationConfig, HeldOutSetConfig
from grpo_cli.recipe.expect import ExpectConfig, ExpectedMetric, MeasuredConfig
from grpo_cli.recipe.generation import DynamicSamplingConfig, GenerationConfig, VllmConfig
from grpo_cli.recipe.kinds import KindDescription, ParameterDescription
from grpo_cli.recipe.launch import LaunchConfig, SlurmConfig
from grpo_cli.recipe.model import AdapterConfig, LoraConfig, ModelConfig
from grpo_cli.recipe.recipe import LoggingConfig, Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.recipe.teacher import TeacherConfig
from grpo_cli.recipe.training import AsyncConfig, EarlyStoppingConfig, FastConfig, TrainingConfig
from grpo_cli.recipe.warmup import WarmupConfig
from grpo_cli.rewards.registry import BUILT_IN, describe_kind, find_kind
from grpo_cli.runs.files import write_json, write_text

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "recipe.md"
REWARDS = ROOT / "docs" / "rewards.md"
DIAGNOSIS = ROOT / "docs" / "diagnosis.md"
SCHEMA = ROOT / "recipes" / "recipe.schema.json"
UPSTREAM = base.TABLE

SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("(top level)", Recipe),
    ("model", ModelConfig),
    ("model.adapter", AdapterConfig),
    ("model.lora", LoraConfig),
    ("dataset, kind: hub", HubDataset),
    ("dataset, kind: files", FilesDataset),
    ("dataset, kind: reasoning_gym", ReasoningGymDataset),
    ("dataset, kind: inline", InlineDataset),
    ("dataset, kind: environment", EnvironmentDataset),
    ("dataset, kind: scored", ScoredDataset),
    ("dataset.sources", MixtureDataset),
    ("dataset.sources, every entry", SourceKeys),
    ("dataset.streaming", StreamingConfig),
    ("dataset.difficulty, kind: adaptive", AdaptiveDifficulty),
    ("dataset.difficulty, kind: pools", PoolsDifficulty),
    ("dataset.difficulty, kind: order", OrderDifficulty),
    ("dataset.prompt", PromptConfig),
    ("dataset.columns.NAME", ColumnConfig),
    ("teacher", TeacherConfig),
    ("rewards, every entry", RewardConfig),
    ("tools and environment, every entry", KindConfig),
    ("episode", EpisodeConfig),
    ("generation", GenerationConfig),
    ("generation.dynamic_sampling", DynamicSamplingConfig),
    ("generation.vllm", VllmConfig),
    ("training", TrainingConfig),
    ("training.early_stopping", EarlyStoppingConfig),
    ("training.fast", FastConfig),
    ("training.asynchronous", AsyncConfig),
    ("warmup", WarmupConfig),
    ("launch", LaunchConfig),
    ("launch.slurm", SlurmConfig),
    ("logging", LoggingConfig),
    ("evaluation", EvaluationConfig),
    ("evaluation.during, every entry", HeldOutSetConfig),
    ("expect", ExpectConfig),
    ("expect.metrics, every entry", ExpectedMetric),
    ("expect.measured", MeasuredConfig),
)
KIND_SECTIONS = tuple((kind, find_kind(kind)) for kind in BUILT_IN)
INTRO = """# Recipe reference

Every key of a recipe, with its default and meaning. Generated from the schema by `make docs`; do not edit.
Names follow TRL. In addition to the keys in their tables, `generation`, `generation.vllm`, `training` and
`logging` accept the `GRPOConfig` fields listed below them, and `model.lora` those of peft's `LoraConfig`, with
TRL's or peft's meaning and default.

The [reward reference](rewards.md) describes the kinds of rewards and their parameters. Editors can validate and
complete recipes with the JSON schema that `grpo schema` prints.
"""
COMPATIBILITY_INTRO = """
## What does not work together

`grpo check` refuses these pairs. It also reports settings that only act beside others, and what does not fit the
machine or the data.

| setting | with | reason | fix |
| --- | --- | --- | --- |
"""
REWARDS_INTRO = """# Reward reference

Every kind of reward: its formula, range, source and parameters. Generated from the code by `make docs`; do
not edit. `grpo rewards show KIND` prints the same in a terminal.

In addition to the parameters here, every entry of `rewards` accepts `name`, `weight`, `when`, `timeout_s`,
`on_error` and `clip`: see [the recipe reference](recipe.md#rewards-every-entry).
[Your own reward](own-reward.md#try-it-before-training) shows how to test rewards before training.
"""
_MARK = "<!-- Written by `make docs` from the rules; do not edit from here on. -->\n"


def render_upstream_fields() -> str:
    """Return the fields of TRL's and peft's configurations as JSON: type, default and help, a line a field."""
    from peft import LoraConfig
    from trl import GRPOConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig

    lines = []
    for config in (GRPOConfig, AsyncGRPOConfig, LoraConfig):
        fields = ",\n".join(
            f"{json.dumps(each.name)}: {json.dumps(_field_row(each))}"
            for each in dataclasses.fields(config)
        )
        lines.append(f"{json.dumps(config.__name__)}: {{\n{fields}\n}}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _field_row(field: "dataclasses.Field[typing.Any]") -> list[typing.Any]:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    default = default.value if isinstance(default, enum.Enum) else default
    is_plain = default is None or isinstance(default, bool | int | float | str | list | dict)
    return [_annotation(field.type), default if is_plain else None, field.metadata.get("help", "")]


def _annotation(kind: typing.Any) -> str:
    """Return a type as Python writes it, with the values of enumerations."""
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if isinstance(kind, str):
        return kind
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"Literal{[str(member.value) for member in kind]}"
    if origin in (typing.Union, types.UnionType):
        # `SchedulerType | str` means: one of the names of the enumeration.
        is_enum = any(isinstance(each, enum.EnumMeta) for each in arguments)
        return " | ".join(_annotation(each) for each in arguments if not (is_enum and each is str))
    if origin is typing.Literal:
        return f"Literal{list(arguments)}"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_annotation, arguments))}]"
    return "None" if kind is type(None) else str(getattr(kind, "__name__", kind))


def render_reference() -> str:
    """Return the recipe reference as Markdown."""
    parts = [INTRO]
    for title, model in SECTIONS:
        parts.append(f"\n## {title}\n\n{_docstring(model)}\n")
        rows = list(_rows(model))
        if rows:
            parts.append(
                "\n| key | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
            )
        if title in ("model.lora", "generation", "generation.vllm", "training", "logging"):
            parts.append(f"\nAlso: {_upstream(title, model)}.\n")
    rows = [
        f"| {_named(each.setting)} | {_named(each.other)} | {_said(each)} | {_cell(each.fix)} |"
        for each in read_conflicts()
    ]
    return "".join([*parts, COMPATIBILITY_INTRO, "\n".join(rows), "\n"])


def _named(setting: str) -> str:
    path, _, more = setting.partition(" of ")
    is_path = " " not in path.partition(": ")[0] and path not in ("images", "no rewards")
    return (f"`{path}`" if is_path else path) + (f" of {more}" if more else "")


def _said(conflict: Conflict) -> str:
    said = re.sub(r"\{(\w+)\}", "…", conflict.why)
    return "–" if said == "-" else _cell(said)


def render_rewards() -> str:
    """Return the reward reference as Markdown: an overview, then a section for each kind."""
    described = [describe_kind(kind) for kind in BUILT_IN]
    overview = [f"| [`{each.kind}`](#{each.kind}) | {each.summary} |" for each in described]
    head = [REWARDS_INTRO, "\n| kind | what it does |\n| --- | --- |\n", "\n".join(overview), "\n"]
    return "".join([*head, *(_kind(each) for each in described)])


def render_diagnosis() -> str:
    """Return the diagnosis page with the text after the mark replaced by the table of rules."""
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
    """Write every generated file."""
    # First: the others read it.
    write_text(UPSTREAM, render_upstream_fields())
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


def _rows(model: type[Section]) -> Iterator[str]:
    docs = field_docs(model)
    for name, field in model.model_fields.items():
        meaning = _cell(" ".join(docs.get(name, "").split()))
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
    names = grpo_fields.fields_in(typing.cast(grpo_fields.Home, home))
    return ", ".join(f"`{name}`" for name in sorted(names) if name not in model.model_fields)


if __name__ == "__main__":
    sys.exit(write_all())
