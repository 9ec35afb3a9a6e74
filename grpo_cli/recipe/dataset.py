"""The `dataset` section: where rows come from, how they become prompts, what rewards receive."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from grpo_cli.recipe.base import Integer, Number, OneOrMany, Section


class PromptConfig(Section):
    """How a row becomes a prompt; the texts are sandboxed Jinja templates over the row's columns."""

    user: str | None = None
    """The user's message, such as `{{ question }}`. Leave out when rows have a `prompt` column."""
    system: str | None = None
    """The system message; needs a chat template."""
    style: Literal["auto", "chat", "text"] = "auto"
    """`chat` renders messages through the chat template, `text` passes the rendered text on as it is;
    `auto` is `chat` where the tokenizer has a chat template."""

    @property
    def fixed_system(self) -> str | None:
        """The system message, where it is the same for every row."""
        return self.system if self.system and not set("{}") & set(self.system) else None


class ColumnConfig(Section):
    """A column for the rewards, extracted from another one."""

    from_: str = Field(alias="from")
    """The column to read."""
    regex: str | None = None
    """Keep the first group of this pattern (or the whole match), stripped of white space."""
    on_no_match: Literal["error", "drop"] = "error"
    """What to do with a row in which the pattern is not found; dropped rows are counted and reported."""


def _as_mapping(value: Any) -> Any:
    """Reads the short form `answer: solution` as `answer: {from: solution}`."""
    return {"from": value} if isinstance(value, str) else value


Column = Annotated[
    ColumnConfig, BeforeValidator(_as_mapping, json_schema_input_type=str | ColumnConfig)
]


class _DatasetBase(Section):
    prompt: PromptConfig = PromptConfig()
    """How a row becomes a prompt."""
    columns: dict[str, Column] = Field(default_factory=dict)
    """New name → source column (or `{from, regex}`); the other columns are passed on under their own names."""
    limit: Integer | None = Field(default=None, ge=1)
    """Use only the first rows of the training data."""
    eval_limit: Integer | None = Field(default=None, ge=1)
    """Use only the first rows of the evaluation data."""
    eval_fraction: Number | None = Field(default=None, gt=0, lt=1)
    """Hold out this share of the training rows for evaluation (chosen with the recipe's seed)."""
    max_prompt_length: Integer | None = Field(default=None, ge=1)
    """Rows whose prompt has more tokens are dropped, counted and reported."""


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
    """Local files: json, jsonl, csv or parquet, told apart by their ending."""

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
    """Rows to draw for training; none of them asks a question that is held out for evaluation."""
    eval_size: Integer = Field(default=0, ge=0)
    """Rows with distinct questions to hold out for evaluation."""


class InlineDataset(_DatasetBase):
    """Rows written in the recipe itself."""

    kind: Literal["inline"]
    rows: tuple[dict[str, Any], ...]
    """The training rows."""
    eval_rows: tuple[dict[str, Any], ...] | None = None
    """The evaluation rows."""


DatasetConfig = Annotated[
    HubDataset | FilesDataset | ReasoningGymDataset | InlineDataset, Field(discriminator="kind")
]
