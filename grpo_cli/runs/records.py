"""What the files of a run folder hold; `files.read_file` and `parse_records` take any other type for damage.

Keys that are not named here are kept as they are; those with a default are filled in.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from grpo_cli.runs.files import record_reader

_STRICT = with_config(ConfigDict(strict=True, extra="allow", allow_inf_nan=False))
_Filled: Any = Field(default_factory=dict)
_Unknown: Any = Field(default=None)
_Listed: Any = Field(default_factory=list)
Scores = dict[str, float | None]


@_STRICT
class DataFacts(TypedDict, total=False):
    """`data` of `manifest.json`."""

    train_rows: int | None
    eval_rows: int | None
    dropped: dict[str, dict[str, int]]
    fingerprint: str
    fingerprint_version: int
    plain_text: bool
    sources: dict[str, Any] | None


@_STRICT
class Hardware(TypedDict, total=False):
    """`hardware` of `manifest.json`."""

    host: str
    machine: str
    cpus: int
    memory_gib: float | None


@_STRICT
class Accelerator(TypedDict, total=False):
    """`accelerator` of `manifest.json`."""

    device: str


@_STRICT
class Git(TypedDict, total=False):
    """`git` of `manifest.json`."""

    revision: str
    dirty: bool


@_STRICT
class Manifest(TypedDict, total=False):
    """`manifest.json`."""

    argv: Annotated[list[str], _Listed]
    versions: Annotated[dict[str, str | None], _Filled]
    git: Annotated[Git | None, _Unknown]
    hardware: Annotated[Hardware, _Filled]
    accelerator: Annotated[Accelerator, _Filled]
    data: Annotated[DataFacts, _Filled]
    code: Annotated[dict[str, str], _Filled]
    fast: dict[str, Any]
    model: str | None
    adapter: str | None
    teacher: str | None
    dtype: str


@_STRICT
class _RecipeFacts(TypedDict, total=False):
    seed: Required[int]
    dataset: Required[dict[str, Any]]


@_STRICT
class Resolved(TypedDict):
    """`resolved.json`; the schema checks the recipe in it."""

    schema_version: int
    recipe: _RecipeFacts


@_STRICT
class Plan(TypedDict, total=False):
    """`launch/plan.json`."""

    strategy: str
    num_processes: int
    device: str
    stall_timeout_s: float | None
    server: dict[str, Any] | None


@_STRICT
class Resumption(TypedDict, total=False):
    """`launch/resume.json`."""

    checkpoint: Required[str]
    step: Required[int]
    forced: bool
    trusted: bool


@_STRICT
class Failure(TypedDict):
    """`logs/attempt_N/failure_RANK.json`."""

    time: float
    rank: int
    reason: str
    traceback: str | None


@with_config(ConfigDict(strict=True, extra="ignore", allow_inf_nan=False))
class MetricRecord(TypedDict, total=False):
    """A metric with its interval."""

    value: Annotated[float | None, _Unknown]
    low: Annotated[float | None, _Unknown]
    high: Annotated[float | None, _Unknown]
    prompts: Annotated[int, Field(default=0)]
    reason: Annotated[str | None, _Unknown]


@_STRICT
class Measurement(TypedDict, total=False):
    """`eval/before.json` and its like, and what `metrics.jsonl` has of them."""

    held_out: str
    prompts: int
    completions: int
    failures: dict[str, int]
    timeouts: dict[str, int]
    reward: float | None
    rewards: Scores
    accuracy: Scores
    logged: Scores
    completion_length: float | None
    clipped: float | None
    likelihood_gap: float | None
    metrics: dict[str, MetricRecord]
    lower_is_better: list[str]
    temperature: float | None
    seconds: float | None


@_STRICT
class TrainerState(TypedDict, total=False):
    """`trainer_state.json` of a checkpoint.

    Source: `TrainerState` of transformers 5.24.
    """

    best_model_checkpoint: str | None
    global_step: int


@_STRICT
class Trackers(TypedDict, total=False):
    """`trackers.json`."""

    runs: Annotated[dict[str, dict[str, str | None]], _Filled]
    failures: Annotated[dict[str, str], _Filled]


@_STRICT
class Episode(TypedDict, total=False):
    """How one episode went."""

    turns: int
    end: str
    calls: Annotated[list[Annotated[list[str | float | None], Field(min_length=2)]], _Listed]
    """Tool, failure or nothing, and seconds."""
    shortened: int


@_STRICT
class Message(TypedDict, total=False):
    """One message."""

    role: str
    name: str | None
    tool_calls: list[dict[str, Any]] | None


Prompt = str | list[Message]


def _check_lengths(group: Mapping[str, Any]) -> Mapping[str, Any]:
    count = len(group["completions"])
    columns = [group["tokens"], group["clipped"], *group["rewards"].values()]
    columns += [*group["reasons"].values(), *group["failed"].values()]
    columns += filter(None, (group["messages"], group["episodes"]))
    if any(len(column) != count for column in columns):
        raise ValueError("its columns differ in length")
    return group


@_STRICT
class _Group(TypedDict, total=False):
    time: float
    step: Required[int]
    split: Annotated[str, Field(default="train", pattern="^(train|eval)$")]
    row: Required[int]
    prompt: Required[Prompt]
    completions: Required[list[str]]
    tokens: Required[list[int]]
    clipped: Required[list[bool]]
    rewards: Required[dict[str, list[float | None]]]
    reasons: Annotated[dict[str, list[str | None]], _Filled]
    failed: Annotated[dict[str, list[bool]], _Filled]
    messages: Annotated[list[list[Message]], _Listed]
    episodes: Annotated[list[Episode], _Listed]


read_group = record_reader(Annotated[_Group, AfterValidator(_check_lengths)])
"""A record of `completions/rank_N.jsonl`."""


@_STRICT
class Sample(TypedDict, total=False):
    """A record of `eval/before.jsonl` and its like."""

    group: Required[int]
    row: Required[int]
    prompt: Required[Prompt]
    text: Required[str]
    tokens: Required[int]
    clipped: Required[bool]
    rewards: Required[Scores]
    reasons: Required[dict[str, str]]
    failed: Required[list[str]]
    answers: Required[dict[str, str | None]]
    total: Required[float | None]
    messages: Annotated[list[Message], _Listed]
    episode: Annotated[Episode | None, _Unknown]
    source: Annotated[str | None, _Unknown]
    late: Annotated[list[str], _Listed]


read_sample = record_reader(Sample)


@_STRICT
class _Chunked(Sample):
    chunk: Required[int]
    chunk_size: Required[int]
    chunk_s: Required[float]


read_chunked = record_reader(_Chunked)
"""A record of `samples/` of an evaluation by `grpo eval`."""


@_STRICT
class EvalData(TypedDict, total=False):
    """`data.json` of an evaluation."""

    split: str
    rows: Required[int]
    fingerprint: str


@_STRICT
class _EvalSettings(TypedDict, total=False):
    samples: Required[int]
    temperature: Required[float]
    seed: Annotated[int, Field(default=0)]
    backend: Annotated[str, Field(default="transformers")]
    split: Required[str]
    limit: int | None


@_STRICT
class _Subject(TypedDict, total=False):
    prompts: Required[int]
    tokens: int
    sampling_s: float
    tokens_per_s: Required[float | None]
    completions: int
    failures: dict[str, int]
    timeouts: dict[str, int]
    metrics: Required[dict[str, MetricRecord]]


@_STRICT
class _HarnessScore(TypedDict):
    value: float
    stderr: float | None


@_STRICT
class _Harness(TypedDict):
    name: str
    version: str
    subjects: Annotated[dict[str, dict[str, dict[str, _HarnessScore]]], Field(min_length=1)]


@_STRICT
class EvalResult(TypedDict, total=False):
    """`result.json` of an evaluation."""

    schema_version: Required[Literal[1]]
    kind: Required[Literal["grpo-eval"]]
    subjects: Required[Annotated[dict[str, _Subject], Field(min_length=1)]]
    differences: Required[dict[str, dict[str, MetricRecord]]]
    verdicts: Required[dict[str, str]]
    settings: Required[_EvalSettings]
    data: Required[dict[str, Any]]
    recipe: Required[dict[str, Any]]
    primary: Required[str]
    baseline: Required[str | None]
    harness: _Harness


@_STRICT
class Thumbnail(TypedDict):
    """A record of `thumbnails/rank_N.jsonl`."""

    thumbnail: str
    jpeg: str


read_thumbnail = record_reader(Thumbnail)


@_STRICT
class _Stepped(TypedDict):
    step: int


@_STRICT
class _Measured(Measurement):
    when: Required[Literal["before", "warmup", "after"]]


@_STRICT
class _Warmup(TypedDict, total=False):
    warmup_step: Required[int]
    total_steps: Required[int]
    loss: float | None
    eval_loss: float | None


@_STRICT
class _Resumed(_Stepped):
    attempt: int


@_STRICT
class _Fast(TypedDict):
    left_off: dict[str, str]


_EVENTS = {
    "measure": record_reader(_Measured),
    "warmup": record_reader(_Warmup),
    "resume": record_reader(_Resumed),
    "server": record_reader(_Stepped),
    "fast": record_reader(_Fast),
}


def read_metrics(record: Any) -> dict[str, Any] | None:
    """Return a record of `metrics.jsonl`; None if it is damaged."""
    if not isinstance(record, dict) or not isinstance(event := record.get("event"), str):
        return None
    if event in ("train", "eval"):
        # Without pydantic, since there are hundreds of thousands of them.
        return record if type(record.get("step")) is int else None
    reader = _EVENTS.get(event)
    return reader(record) if reader else record
