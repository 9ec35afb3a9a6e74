"""The `dataset` section: where rows come from, how they become prompts, what rewards receive."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import NAME, Integer, Number, OneOrMany, Section
from grpo_cli.recipe.difficulty import DifficultyConfig
from grpo_cli.recipe.rewards import RewardConfig


class PromptConfig(Section):
    """How a row becomes a prompt; the texts are sandboxed Jinja templates over the row's columns."""

    user: str | None = None
    """The user's message, such as `{{ question }}`. Leave out if rows have a `prompt` column. With `images`,
    `{{ image }}` says where the next image goes."""
    system: str | None = None
    """The system message; needs a chat template."""
    style: Literal["auto", "chat", "text"] = "auto"
    """`chat` renders messages with the chat template, `text` uses the rendered text unchanged;
    `auto` is `chat` if the tokenizer has a chat template."""
    images: OneOrMany[str] = ()
    """Columns with a row's images, in order: paths relative to the data file, bytes, images of `datasets`, lists
    of these, or nothing. They come before the text, or where `{{ image }}` stands."""

    @property
    def fixed_system(self) -> str | None:
        """The system message, if it is the same for every row."""
        return self.system if self.system and not set("{}") & set(self.system) else None


class ColumnConfig(Section):
    """A column for the rewards, extracted from another one."""

    from_: str = Field(alias="from")
    """The column to read; `a.b` is the key `b` of the mapping in column `a`."""
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


class StreamingConfig(Section):
    """Training rows are read while they are needed, pass after pass, each shuffled again; `true` is short for the
    defaults. Held-out rows are read whole. Needs `training.max_steps`."""

    buffer_size: Integer = Field(default=1000, ge=1)
    """Rows that are kept in memory and drawn from at random. With `training.shuffle_dataset: false` rows keep the
    order of the data."""


SOURCE = "source"
"""The column that holds the name of a row's source, in a mixture."""
IMAGES = "images"
"""The column of a training row that holds its images; TRL's name."""
Streaming = Annotated[
    StreamingConfig | None,
    # `streaming: true` is short for the defaults.
    BeforeValidator(
        lambda value: ({} if value else None) if isinstance(value, bool) else value,
        json_schema_input_type=bool | StreamingConfig | None,
    ),
]
FIRST_ROWS = 1024
"""Rows of streamed data that are read before the training."""
_EVAL_KEYS = ("eval", "eval_split", "eval_size", "eval_rows")


class _DatasetBase(Section):
    prompt: PromptConfig = PromptConfig.model_construct()
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
    difficulty: DifficultyConfig | None = None
    """Draw prompts by how difficult they are; without it all are drawn equally often, in shuffled order."""

    @property
    def parts(self) -> "tuple[SingleDataset, ...]":
        """The sources of a mixture; of any other dataset itself."""
        return (self,)  # type: ignore[return-value]

    @property
    def shares(self) -> dict[str, float]:
        """Each source's share of the prompts; empty if this is not a mixture."""
        return {}

    @property
    def source_name(self) -> str | None:
        """Its name in a mixture; None if it is none of its sources."""
        return None

    @property
    def named_eval(self) -> str | None:
        """The key that names evaluation rows, if one does."""
        return next((key for key in _EVAL_KEYS if getattr(self, key, None) not in (None, 0)), None)

    @property
    def streams(self) -> StreamingConfig | None:
        """How its training rows are streamed; None if they are read before the training."""
        return getattr(self, "streaming", None)

    @property
    def has_images(self) -> bool:
        """True if prompts may hold images."""
        return any(part.prompt.images for part in self.parts)

    @property
    def rows_read(self) -> int | None:
        """The most training rows that are read before the training; None without a limit."""
        return min(self.limit or FIRST_ROWS, FIRST_ROWS) if self.streams else self.limit

    @property
    def is_text(self) -> bool:
        """True if prompts are plain text by the recipe's word, even if the tokenizer has a chat template."""
        return all(part.prompt.style == "text" for part in self.parts)

    @property
    def longest_prompt(self) -> int | None:
        """The most tokens that a prompt may have; None without a limit."""
        limits = [each.max_prompt_length or 0 for each in self.parts]
        return max(limits) if all(limits) else None

    @property
    def fixed_system(self) -> str | None:
        """The system message, if it is the same for every row."""
        first, *others = {each.prompt.fixed_system for each in self.parts}
        return None if others else first


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
    streaming: Streaming = None
    """Read training rows while they are needed, for data that does not fit into memory or on the disk."""


Paths = Annotated[OneOrMany[str], Field(min_length=1)]


class FilesDataset(_DatasetBase):
    """Local json, jsonl, csv or parquet files, by file extension."""

    kind: Literal["files"]
    train: Paths
    """One path or a list, relative to the recipe."""
    eval: Paths | None = None
    """One path or a list for evaluation."""
    streaming: Streaming = None
    """Read training rows while they are needed, for data that does not fit into memory; jsonl, csv and parquet."""


class ReasoningGymDataset(_DatasetBase):
    """A procedural task of reasoning-gym; rows have `question`, `answer` and `metadata`."""

    kind: Literal["reasoning_gym"]
    task: str
    """Name of the task, such as `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The task's own parameters."""
    levels: tuple[dict[str, Any], ...] = ()
    """Parameters of each level, beside `params`. Each has equally many rows, whose column `level` counts from 1:
    `difficulty` takes prompts in that order, or moves through the levels by itself (`adaptive`)."""
    size: Integer = Field(default=1000, ge=1)
    """Rows to generate for training, of all levels together; questions held out for evaluation are excluded."""
    eval_size: Integer = Field(default=0, ge=0)
    """Rows with distinct questions to hold out for evaluation, of all levels together."""

    @property
    def by_level(self) -> "tuple[ReasoningGymDataset, ...]":
        """Each level as a dataset of its own; only this one if it has none."""
        count = len(self.levels)
        return tuple(
            self.model_copy(
                update={
                    "levels": (),
                    "params": {**self.params, **level},
                    # The first levels have the rows that are left over.
                    "size": (self.size + count - 1 - place) // count,
                    "eval_size": (self.eval_size + count - 1 - place) // count,
                }
            )
            for place, level in enumerate(self.levels)
        ) or (self,)


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


class SourceKeys(Section):
    """What a source has besides the keys of its kind of dataset.

    Since `name` is the source's, a hub dataset's configuration is `config` here.
    """

    name: str = Field(pattern=NAME)
    """Name of the source: in metrics, in reports, and in the column `source` of its rows."""
    ratio: Number = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the other sources' ratios."""
    rewards: tuple[RewardConfig, ...] = ()
    """Rewards for this source's rows, beside the recipe's `rewards`, which score the rows of all sources."""

    @property
    def source_name(self) -> str | None:
        """Its name in the mixture."""
        return self.name


class FilesSource(SourceKeys, FilesDataset):
    """A source of local files."""


class ReasoningGymSource(SourceKeys, ReasoningGymDataset):
    """A source of rows from a procedural task."""


class InlineSource(SourceKeys, InlineDataset):
    """A source of rows written in the recipe itself."""


class EnvironmentSource(SourceKeys, EnvironmentDataset):
    """A source whose prompts `environment` gives; its `when` says which rows are whose."""


class HubSource(SourceKeys, HubDataset):
    """A source on the Hugging Face hub, or in its cache."""

    config: str | None = None
    """Configuration (subset) of the dataset, which is `name` in a recipe with one dataset."""


Source = Annotated[
    HubSource | FilesSource | ReasoningGymSource | InlineSource | EnvironmentSource,
    Field(discriminator="kind"),
]


def _fill_in(source: Any, shared: dict[str, Any]) -> Any:
    """Return a source with what stands beside `sources` and it does not say itself."""
    update = {key: value for key, value in shared.items() if key not in source.model_fields_set}
    if isinstance(source, EnvironmentDataset) and "prompt" in update:
        # The environment asks.
        update["prompt"] = update["prompt"].model_copy(update={"user": None})
    if source.named_eval:
        update.pop("eval_fraction", None)
    if not (source.named_eval or update.get("eval_fraction", source.eval_fraction)):
        update.pop("eval_limit", None)
    return source.model_copy(update=update)


class MixtureDataset(_DatasetBase):
    """Several sources, drawn by ratio; `sources` alone says so, and `kind` may be left out.

    `prompt`, `columns`, limits and `eval_` keys that stand beside `sources` are those of each source without its
    own. An epoch ends when every row of every source has been drawn; a source that is used up before starts over
    in a new order. Later epochs repeat the order of the first.
    """

    kind: Literal["mixture"] = "mixture"
    sources: tuple[Source, ...] = Field(min_length=1)
    """The sources; each is a dataset of its `kind`, with a `name`, a `ratio`, and `rewards` of its own."""

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        """Refuse double names, and fill in what stands beside `sources`."""
        names = [source.name for source in sources]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise PydanticCustomError(
                "grpo_sources",
                "has two sources with the name `{name}`",
                {"name": repeated[0], "fix": "rename one of them"},
            )
        for source in sources:
            if source.difficulty is not None:
                raise PydanticCustomError(
                    "grpo_sources",
                    "has `difficulty` in source `{name}`, and prompts of all sources are drawn together",
                    {"name": source.name, "fix": "write it beside `sources`"},
                )
        shared = {
            key: value
            for key, value in info.data.items()
            if key in _DatasetBase.model_fields and key != "difficulty"
        }
        return tuple(_fill_in(source, shared) for source in sources)

    @property
    def shares(self) -> dict[str, float]:
        """Each source's share of the prompts."""
        total = sum(source.ratio for source in self.sources)
        return {source.name: source.ratio / total for source in self.sources}

    @property
    def parts(self) -> "tuple[SingleDataset, ...]":
        """The sources."""
        return self.sources


SingleDataset = (
    HubDataset
    | FilesDataset
    | ReasoningGymDataset
    | InlineDataset
    | EnvironmentDataset
    | ScoredDataset
)
"""A dataset that is not a mixture; sources are such datasets too."""
DatasetConfig = Annotated[
    Annotated[SingleDataset | MixtureDataset, Field(discriminator="kind")],
    # `sources` alone makes a mixture.
    BeforeValidator(
        lambda value: (
            {"kind": "mixture", **value}
            if isinstance(value, dict) and "sources" in value
            else value
        )
    ),
]
