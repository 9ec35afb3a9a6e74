"""The `dataset` section: where rows come from, how they become prompts, what rewards receive."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

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
    """Hold out this share of the training prompts for evaluation; the rows of one prompt stay together."""
    eval_seed: Integer = Field(default=42, ge=0, lt=2**32)
    """Seed of what is held out by `eval_fraction`, or drawn for evaluation. It is not the recipe's `seed`, so that
    runs with different seeds are measured on the same rows."""
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


_PLACES = {
    "train": ("eval",),
    "path": ("name", "split", "eval_split", "revision"),
    "rows": ("eval_rows",),
}
"""Where scored rows may come from, and the keys that go with each place."""


class ScoredDataset(_DatasetBase):
    """Responses that somebody has scored already: rows of a prompt, a response and its reward.

    Nothing is sampled in training and `rewards` is left out. The rows of one prompt are a group: their
    rewards give the advantages. Prompts with a single response are left out, since there is nothing to
    compare it with; of a group larger than `generation.num_generations` each visit takes another part, and
    in a smaller one the places left over count for nothing. The rows come from files (`train`), the hub
    (`path`) or the recipe itself (`rows`).
    """

    kind: Literal["scored"]
    train: Paths | None = None
    """One file or a list, relative to the recipe."""
    eval: Paths | None = None
    """One file or a list for evaluation."""
    path: str | None = Field(default=None, min_length=1)
    """In the place of `train`: a dataset id of the hub."""
    name: str | None = None
    """Configuration (subset) of the hub's dataset."""
    split: str = "train"
    """Split of the hub's dataset to train on."""
    eval_split: str | None = None
    """Split of the hub's dataset to evaluate on."""
    revision: str | None = None
    """Branch, tag or commit of the hub's dataset."""
    rows: tuple[dict[str, Any], ...] | None = None
    """In the place of `train`: the training rows themselves."""
    eval_rows: tuple[dict[str, Any], ...] | None = None
    """The evaluation rows themselves."""
    response: str = Field(default="{{ response }}", min_length=1)
    """The response: a template over the row's columns, like the prompt's."""
    reward: str = Field(default="reward", min_length=1)
    """The column that holds the reward, a number."""

    @model_validator(mode="after")
    def _check_place(self) -> "ScoredDataset":
        given = [name for name in _PLACES if getattr(self, name) is not None]
        if len(given) != 1:
            seen = f"`{'` and `'.join(given)}` both do" if given else "nothing does"
            raise PydanticCustomError(
                "grpo_place",
                "needs one of `train` (files), `path` (hub) and `rows` to say where the rows are; {seen}",
                {
                    "seen": seen,
                    "fix": "keep one of them" if given else "add `train: rows.jsonl`, say",
                },
            )
        strangers = {
            key: place for place in _PLACES for key in _PLACES[place] if place not in given
        }
        for key in strangers:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise PydanticCustomError(
                    "grpo_place",
                    "has `{key}`, which goes with `{place}`, and the rows come from `{given}`",
                    {
                        "key": key,
                        "place": strangers[key],
                        "given": given[0],
                        "fix": f"remove `{key}`",
                    },
                )
        return self

    @property
    def source(self) -> "FilesDataset | HubDataset | InlineDataset":
        """The same rows, read as plain ones; without a share held out, which is taken of whole prompts."""
        shared: dict[str, Any] = {
            "prompt": self.prompt,
            "columns": self.columns,
            "limit": self.limit,
            "eval_limit": None if self.eval_fraction else self.eval_limit,
        }
        if self.train is not None:
            return FilesDataset(kind="files", train=self.train, eval=self.eval, **shared)
        if self.path is not None:
            return HubDataset(
                kind="hub",
                path=self.path,
                name=self.name,
                split=self.split,
                eval_split=self.eval_split,
                revision=self.revision,
                **shared,
            )
        return InlineDataset(
            kind="inline", rows=self.rows or (), eval_rows=self.eval_rows, **shared
        )


DatasetConfig = Annotated[
    HubDataset | FilesDataset | ReasoningGymDataset | InlineDataset | ScoredDataset,
    Field(discriminator="kind"),
]
