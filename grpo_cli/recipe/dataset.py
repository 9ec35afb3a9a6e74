"""The `dataset` section: where rows come from, how they become prompts, what rewards receive."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import Integer, Number, OneOrMany, Section


class PromptConfig(Section):
    """How a row becomes a prompt; the texts are sandboxed Jinja templates over the row's columns."""

    user: str | None = None
    """The user's message, such as `{{ question }}`. Leave out if rows have a `prompt` column."""
    system: str | None = None
    """The system message; needs a chat template."""
    style: Literal["auto", "chat", "text"] = "auto"
    """`chat` renders messages with the chat template, `text` uses the rendered text unchanged;
    `auto` is `chat` if the tokenizer has a chat template."""

    @property
    def fixed_system(self) -> str | None:
        """The system message, if it is the same for every row."""
        return self.system if self.system and not set("{}") & set(self.system) else None


class ColumnConfig(Section):
    """A column for the rewards, extracted from another one."""

    from_: str = Field(alias="from")
    """The column to read."""
    regex: str | None = None
    """Keep the first group of this pattern (or the whole match), stripped of white space."""
    on_no_match: Literal["error", "drop"] = "error"
    """What to do with a row in which the pattern is not found; dropped rows are counted and reported."""


Column = Annotated[
    ColumnConfig,
    # `answer: solution` is short for `answer: {from: solution}`.
    BeforeValidator(
        lambda value: {"from": value} if isinstance(value, str) else value,
        json_schema_input_type=str | ColumnConfig,
    ),
]


class _DatasetBase(Section):
    prompt: PromptConfig = PromptConfig()
    """How a row becomes a prompt."""
    columns: dict[str, Column] = Field(default_factory=dict)
    """New name → source column (or `{from, regex}`); the other columns keep their own names."""
    limit: Integer | None = Field(default=None, ge=1)
    """Use only the first rows of the training data."""
    eval_limit: Integer | None = Field(default=None, ge=1)
    """Use only the first rows of the evaluation data."""
    eval_fraction: Number | None = Field(default=None, gt=0, lt=1)
    """Hold out this share of the training prompts for evaluation; rows with the same prompt stay together."""
    eval_seed: Integer = Field(default=42, ge=0, lt=2**32)
    """Seed for choosing the held-out rows. It is separate from the recipe's `seed`, so that runs with different
    seeds are evaluated on the same rows."""
    max_prompt_length: Integer | None = Field(default=None, ge=1)
    """Drop rows whose prompt has more tokens; they are counted and reported."""


class HubDataset(_DatasetBase):
    """A dataset on the Hugging Face hub, or in its cache."""

    kind: Literal["hub"]
    path: str = Field(min_length=1)
    """Dataset id, such as `openai/gsm8k`."""
    name: str | None = None
    """Configuration (subset) of the dataset."""
    split: str = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split to evaluate on."""
    revision: str | None = None
    """Branch, tag or commit."""


Paths = Annotated[OneOrMany[str], Field(min_length=1)]


class FilesDataset(_DatasetBase):
    """Local json, jsonl, csv or parquet files, by file extension."""

    kind: Literal["files"]
    train: Paths
    """One path or a list, relative to the recipe."""
    eval: Paths | None = None
    """One path or a list for evaluation."""


class ReasoningGymDataset(_DatasetBase):
    """A procedural task of reasoning-gym; rows have `question`, `answer` and `metadata`."""

    kind: Literal["reasoning_gym"]
    task: str
    """Name of the task, such as `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The task's own parameters."""
    size: Integer = Field(default=1000, ge=1)
    """Rows to generate for training; questions held out for evaluation are excluded."""
    eval_size: Integer = Field(default=0, ge=0)
    """Rows with distinct questions to hold out for evaluation."""


class InlineDataset(_DatasetBase):
    """Rows written in the recipe itself."""

    kind: Literal["inline"]
    rows: tuple[dict[str, Any], ...]
    """The training rows."""
    eval_rows: tuple[dict[str, Any], ...] | None = None
    """The evaluation rows."""


class EnvironmentDataset(_DatasetBase):
    """No rows of its own: `environment` gives each prompt, from a seed. Rows have one column, `seed`."""

    kind: Literal["environment"]
    size: Integer = Field(default=1000, ge=1)
    """Episodes for training, each with its own seed."""
    eval_size: Integer = Field(default=0, ge=0)
    """Episodes to hold out for evaluation, with other seeds."""


PlainDataset = FilesDataset | HubDataset | InlineDataset
_SOURCES: dict[str, tuple[type[PlainDataset], str, tuple[str, ...]]] = {
    "train": (FilesDataset, "files", ("eval",)),
    "path": (HubDataset, "hub", ("name", "split", "eval_split", "revision")),
    "rows": (InlineDataset, "inline", ("eval_rows",)),
}
"""The keys that say where scored rows are, each with its kind of dataset and the keys that go with it."""


class ScoredDataset(_DatasetBase):
    """Responses that are scored already: rows of a prompt, a response and its reward.

    Training samples nothing, and `rewards` is left out. Rows with the same prompt form a group: their rewards
    give the advantages. Prompts with a single response are skipped, since there is nothing to compare it with.
    From a group larger than `generation.num_generations`, each visit draws different responses; a smaller group
    is filled with padding that has no effect. The rows come from files (`train`), the hub (`path`) or the recipe
    itself (`rows`).
    """

    kind: Literal["scored"]
    train: Paths | None = None
    """One file or a list, relative to the recipe."""
    eval: Paths | None = None
    """One file or a list for evaluation."""
    path: str | None = Field(default=None, min_length=1)
    """Instead of `train`: a dataset id of the hub."""
    name: str | None = None
    """Configuration (subset) of the hub's dataset."""
    split: str = "train"
    """Split of the hub's dataset to train on."""
    eval_split: str | None = None
    """Split of the hub's dataset to evaluate on."""
    revision: str | None = None
    """Branch, tag or commit of the hub's dataset."""
    rows: tuple[dict[str, Any], ...] | None = None
    """Instead of `train`: the training rows themselves."""
    eval_rows: tuple[dict[str, Any], ...] | None = None
    """The evaluation rows themselves."""
    response: str = Field(default="{{ response }}", min_length=1)
    """The response: a template over the row's columns, like the prompt's."""
    reward: str = Field(default="reward", min_length=1)
    """The column that holds the reward, a number."""

    @model_validator(mode="after")
    def _check_source(self) -> "ScoredDataset":
        named = [key for key in _SOURCES if getattr(self, key) is not None]
        if len(named) != 1:
            raise PydanticCustomError(
                "grpo_place",
                "needs one of `train` (files), `path` (hub) and `rows` to say where the rows are; {seen}",
                {
                    "seen": f"it has `{'` and `'.join(named)}`" if named else "it has none",
                    "fix": "keep one of them" if named else "add `train: rows.jsonl`, say",
                },
            )
        for source, (_, _, keys) in _SOURCES.items():
            for key in keys if source != named[0] else ():
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise PydanticCustomError(
                        "grpo_place",
                        "has `{key}`, which goes with `{source}`, but the rows come from `{named}`",
                        {"key": key, "source": source, "named": named[0], "fix": f"remove `{key}`"},
                    )
        return self

    @property
    def source(self) -> PlainDataset:
        """The rows as a plain dataset; without `eval_fraction`, which is a share of whole prompts."""
        key = next(key for key in _SOURCES if getattr(self, key) is not None)
        dataset, kind, keys = _SOURCES[key]
        shared = ("prompt", "columns", "limit", *(() if self.eval_fraction else ("eval_limit",)))
        values = {name: getattr(self, name) for name in (key, *keys, *shared)}
        return dataset.model_validate({"kind": kind, **values})


DatasetConfig = Annotated[
    HubDataset
    | FilesDataset
    | ReasoningGymDataset
    | InlineDataset
    | EnvironmentDataset
    | ScoredDataset,
    Field(discriminator="kind"),
]
