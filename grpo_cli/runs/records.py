"""What the files of a run folder hold; `files.read_file` and `parse_records` take any other type for damage."""

# Types are made at run time, for pydantic alone.
# mypy: disable-error-code="valid-type"

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from grpo_cli.runs.files import type_adapter

_TYPED_DICT: Any = TypedDict
_Dict: Any = Field(default_factory=dict)
_List: Any = Field(default_factory=list)
_None: Any = Field(default=None)
Scores = dict[str, float | None]


def _record(extra: Literal["allow", "ignore"] = "allow", /, **fields: Any) -> Any:
    """Return the type of a JSON object with these keys, which may be missing unless they are `Required`.

    Those with a default are filled in; other keys are kept as they are.
    """
    config = ConfigDict(strict=True, extra=extra, allow_inf_nan=False)
    return with_config(config)(_TYPED_DICT("record", fields, total=False))


def _record_reader(kind: Any) -> Callable[[Any], dict[str, Any] | None]:
    """Return a function that checks a parsed line of a file of records; it returns None for what is damaged."""

    def read(record: Any) -> Any:
        with suppress(ValueError):
            return type_adapter(kind).validate_python(record)
        return None

    return read


Manifest = _record(
    argv=Annotated[list[str], _List],
    versions=Annotated[dict[str, str | None], _Dict],
    git=Annotated[_record(revision=str, dirty=bool) | None, _None],
    hardware=Annotated[_record(host=str, machine=str, cpus=int, memory_gib=float | None), _Dict],
    accelerator=Annotated[_record(device=str), _Dict],
    data=Annotated[
        _record(
            train_rows=int | None,
            eval_rows=int | None,
            dropped=dict[str, dict[str, int]],
            fingerprint=str,
            fingerprint_version=int,
            plain_text=bool,
            sources=dict[str, Any] | None,
        ),
        _Dict,
    ],
    code=Annotated[dict[str, str], _Dict],
    fast=_record(left_off=dict[str, str]),
    model=str | None,
    adapter=str | None,
    teacher=str | None,
    dtype=str,
)
"""`manifest.json`."""

Resolved = _record(
    schema_version=Required[int],
    recipe=Required[_record(seed=Required[int], dataset=Required[dict[str, Any]])],
)
"""`resolved.json`; the schema checks the recipe in it."""

Plan = _record(
    strategy=str,
    num_processes=int,
    device=str,
    stall_timeout_s=float | None,
    server=dict[str, Any] | None,
)
"""`launch/plan.json`."""

Resumption = _record(checkpoint=Required[str], step=Required[int], forced=bool, trusted=bool)
"""`launch/resume.json`."""

Failure = _record(
    time=Required[float],
    rank=Required[int],
    reason=Required[str],
    fix=Annotated[str, Field(default="")],
    traceback=Required[str | None],
)
"""`logs/attempt_N/failure_RANK.json`."""

MetricRecord = _record(
    "ignore",
    value=Annotated[float | None, _None],
    low=Annotated[float | None, _None],
    high=Annotated[float | None, _None],
    prompts=Annotated[int, Field(default=0)],
    reason=Annotated[str | None, _None],
)
"""A metric with its interval."""

_MEASUREMENT = {
    "held_out": str,
    "prompts": Annotated[int, Field(ge=0)],
    "completions": int,
    "failures": dict[str, int],
    "timeouts": dict[str, int],
    "reward": float | None,
    "rewards": Scores,
    "accuracy": Scores,
    "logged": Scores,
    "sources": dict[str, Scores],
    "completion_length": float | None,
    "clipped": float | None,
    "likelihood_gap": float | None,
    "metrics": dict[str, MetricRecord],
    "lower_is_better": list[str],
    "temperature": float | None,
    "seconds": float | None,
}
Measurement = _record(**_MEASUREMENT)
"""`eval/before.json` and its like, and what `metrics.jsonl` has of them."""

TrainerState = _record(best_model_checkpoint=str | None, global_step=int)
"""`trainer_state.json` of a checkpoint. Source: `TrainerState` of transformers 5.24."""

Trackers = _record(
    runs=Annotated[dict[str, dict[str, str | None]], _Dict],
    failures=Annotated[dict[str, str], _Dict],
)
"""`trackers.json`."""

_Episode = _record(
    turns=int,
    end=str,
    # Of each call: tool, failure or nothing, and seconds.
    calls=Annotated[list[Annotated[list[str | float | None], Field(min_length=2)]], _List],
    shortened=int,
)
_Message = _record(role=str, name=str | None, tool_calls=list[dict[str, Any]] | None)
_Prompt = str | list[_Message]


def _check_lengths(group: Mapping[str, Any]) -> Mapping[str, Any]:
    count = len(group["completions"])
    columns = [group["tokens"], group["clipped"], *group["rewards"].values()]
    columns += [*group["reasons"].values(), *group["failed"].values()]
    columns += filter(None, (group["messages"], group["episodes"]))
    if any(len(column) != count for column in columns):
        raise ValueError("its columns differ in length")
    return group


_Group = _record(
    time=float,
    step=Required[int],
    split=Annotated[str, Field(default="train", pattern="^(train|eval)$")],
    row=Required[int],
    prompt=Required[_Prompt],
    completions=Required[list[str]],
    tokens=Required[list[int]],
    clipped=Required[list[bool]],
    rewards=Required[dict[str, list[float | None]]],
    reasons=Annotated[dict[str, list[str | None]], _Dict],
    failed=Annotated[dict[str, list[bool]], _Dict],
    messages=Annotated[list[list[_Message]], _List],
    episodes=Annotated[list[_Episode], _List],
)
read_group = _record_reader(Annotated[_Group, AfterValidator(_check_lengths)])
"""A record of `completions/rank_N.jsonl`."""

_SAMPLE = {
    "group": Required[int],
    "row": Required[int],
    "prompt": Required[_Prompt],
    "text": Required[str],
    "tokens": Required[int],
    "clipped": Required[bool],
    "rewards": Required[Scores],
    "reasons": Required[dict[str, str]],
    "failed": Required[list[str]],
    "answers": Required[dict[str, str | None]],
    "total": Required[float | None],
    "messages": Annotated[list[_Message], _List],
    "episode": Annotated[_Episode | None, _None],
    "source": Annotated[str | None, _None],
    "late": Annotated[list[str], _List],
}
read_sample = _record_reader(_record(**_SAMPLE))
"""A record of `eval/before.jsonl` and its like."""

_CHUNK = {"chunk": Required[int], "chunk_size": Required[int], "chunk_s": Required[float]}
read_chunked = _record_reader(_record(**_SAMPLE, **_CHUNK))
"""A record of `samples/` of an evaluation by `grpo eval`."""

EvalData = _record(split=str, rows=Required[int], fingerprint=str)
"""`data.json` of an evaluation."""

_EvalSettings = _record(
    samples=Required[int],
    temperature=Required[float],
    seed=Annotated[int, Field(default=0)],
    backend=Annotated[str, Field(default="transformers")],
    split=Required[str],
    limit=int | None,
)
_Subject = _record(
    prompts=Required[int],
    tokens=int,
    sampling_s=float,
    tokens_per_s=Required[float | None],
    completions=int,
    failures=dict[str, int],
    timeouts=dict[str, int],
    metrics=Required[dict[str, MetricRecord]],
)
_HarnessScore = _record(value=Required[float], stderr=Required[float | None])
_HarnessScores = dict[str, dict[str, dict[str, _HarnessScore]]]
_Harness = _record(
    name=Required[str],
    version=Required[str],
    subjects=Required[Annotated[_HarnessScores, Field(min_length=1)]],
)
EvalResult = _record(
    schema_version=Required[Literal[1]],
    kind=Required[Literal["grpo-eval"]],
    subjects=Required[Annotated[dict[str, _Subject], Field(min_length=1)]],
    differences=Required[dict[str, dict[str, MetricRecord]]],
    verdicts=Required[dict[str, str]],
    settings=Required[_EvalSettings],
    data=Required[dict[str, Any]],
    recipe=Required[dict[str, Any]],
    primary=Required[str],
    baseline=Required[str | None],
    harness=_Harness,
)
"""`result.json` of an evaluation."""

read_thumbnail = _record_reader(_record(thumbnail=Required[str], jpeg=Required[str]))
"""A record of `thumbnails/rank_N.jsonl`."""

_WHEN = Literal["before", "warmup", "after"]
_WARMUP = {"warmup_step": Required[int], "total_steps": Required[int]}
_EVENTS = {
    "measure": _record_reader(_record(**_MEASUREMENT, when=Required[_WHEN])),
    "warmup": _record_reader(_record(**_WARMUP, loss=float | None, eval_loss=float | None)),
    "resume": _record_reader(_record(step=Required[int], attempt=Required[int])),
    "server": _record_reader(_record(step=Required[int])),
    "fast": _record_reader(_record(left_off=Required[dict[str, str]])),
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
