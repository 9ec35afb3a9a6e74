"""The folder of one evaluation: the request, the data it is measured on, the samples, the result."""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from grpo_cli.analysis.samples import ScoredCompletion
from grpo_cli.errors import ExitCode, GrpoError, RunError, SetupError, UsageError
from grpo_cli.eval.request import EvalOptions, EvalRequest
from grpo_cli.runs.files import SCHEMA_VERSION, lock_folder, read_file, write_json, write_text
from grpo_cli.runs.folder import RunFolder, claim_folder, unwritable
from grpo_cli.runs.metrics import RecordTail
from grpo_cli.runs.records import EvalData, read_chunked

REMEASURE = "measure again, with another --out"
"""The fix for a damaged file."""


class _Request(TypedDict):
    request: EvalRequest


class _Failure(TypedDict):
    message: str
    exit_code: int


@dataclass(frozen=True)
class Chunk:
    """Prompts sampled in one batch: the same on one process and on many, now or when resumed."""

    number: int
    places: tuple[int, ...]
    """Of these prompts among all, from 0."""
    seed: int


def make_chunks(lengths: Sequence[int], size: int, seed: int) -> list[Chunk]:
    """Return chunks of prompts of like length, the longest first, so that memory runs out at once or never.

    Source: the increment of SplitMix64 (Steele, Lea and Flood 2014), so that neighbouring seeds do not overlap.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    return [
        Chunk(
            number, tuple(order[start : start + size]), (seed * 0x9E3779B97F4A7C15 + number) % 2**32
        )
        for number, start in enumerate(range(0, len(order), size))
    ]


class EvalFolder:
    """The files of one evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.request = path / "request.json"
        self.data = path / "data.json"
        """Split, rows and fingerprint of the data that is measured on."""
        self.samples = path / "samples"
        """Every completion with its scores: a file for each subject and process."""
        self.logged = path / "logged.json"
        """Metrics that rewards log of all completions together, by subject."""
        self.result = path / "result.json"
        """Metrics, intervals and the verdict; written last."""
        self.log = path / "workers.log"
        self.failure = path / "failure.json"
        """The error that ended one of several processes."""

    def lock(self) -> AbstractContextManager[None]:
        """Keep other commands from measuring into the same folder."""
        return lock_folder(self.path, "measuring")

    def write_request(self, request: EvalRequest) -> None:
        """Make the folder, and write the request; raises `UsageError` if it cannot be written."""
        written = {"schema_version": SCHEMA_VERSION, "request": request.model_dump(mode="json")}
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            write_json(self.request, written)
        except OSError as error:
            raise unwritable(self.path, error, "--out DIR") from None

    def read_request(self) -> EvalRequest:
        """Return the request; raises `UsageError` if the file is damaged."""
        request: EvalRequest = self._read(self.request, _Request)["request"]
        return request

    def read_data(self) -> dict[str, Any]:
        """Return split, rows and fingerprint; raises `UsageError` if the file is missing or damaged."""
        data: dict[str, Any] = self._read(self.data, EvalData)
        return data

    def check_data(self, data: dict[str, Any]) -> None:
        """Refuse data other than what the evaluation was begun with, with a `UsageError`."""
        if (self.data.is_file() or self.has_samples()) and self.read_data() != data:
            raise UsageError(
                f"the data changed since {self.path} was begun, and its samples answer the old prompts",
                "measure again, without --resume",
            )

    def _read(self, file: Path, kind: Any) -> Any:
        if (content := read_file(file, kind, fix=REMEASURE)) is None:
            raise UsageError(f"{file} is missing", REMEASURE)
        return content

    def append(
        self,
        subject: str,
        rank: int,
        chunk: Chunk,
        seconds: float,
        scored: Sequence[ScoredCompletion],
        logged_by: Collection[str] = (),
        token_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Append one chunk, sampled in `seconds`, in one write; rewards in `logged_by` log metrics."""
        of_chunk = {"chunk": chunk.number, "chunk_size": len(scored), "chunk_s": seconds}
        records: list[dict[str, Any]] = [{**asdict(each), **of_chunk} for each in scored]
        if logged_by:
            records = [{**each, "logged_by": sorted(logged_by)} for each in records]
        if token_ids is not None:
            pairs = zip(records, token_ids, strict=True)
            records = [{**each, "token_ids": [*ids]} for each, ids in pairs]
        # A lone surrogate, which UTF-8 cannot hold, is written as JSON's own escape of it.
        file = self.samples / f"{subject}.{rank}.jsonl"
        with file.open("a", encoding="utf-8", errors="backslashreplace") as out:
            out.write(_as_lines(records))

    def read_chunks(self, subject: str) -> dict[int, list[dict[str, Any]]]:
        """Return the complete chunks of a subject by number, as `append` wrote them."""
        chunks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for path in sorted(self.samples.glob(f"{subject}.*.jsonl")):
            for record in _read_samples(path):
                chunks[record["chunk"]].append(record)
        return {
            number: records
            for number, records in chunks.items()
            if len(records) == records[0]["chunk_size"]
        }

    def read_logged(self, subject: str) -> dict[str, float]:
        """Return the metrics that rewards logged of a subject."""
        logged: dict[str, dict[str, float]]
        logged = read_file(self.logged, dict[str, dict[str, float]], {}, REMEASURE)
        return logged.get(subject, {})

    def count_samples(self, subject: str) -> int:
        """Return how many samples of a subject there are so far."""
        files = self.samples.glob(f"{subject}.*.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in files)

    def has_samples(self) -> bool:
        """Return whether anything was sampled yet."""
        return any(path.stat().st_size for path in self.samples.glob("*.jsonl"))

    def drop_torn_chunks(self) -> None:
        """Remove chunks that were cut off while being written, before the evaluation is resumed."""
        for path in self.samples.glob("*.jsonl"):
            records = _read_samples(path)
            counts = Counter(record["chunk"] for record in records)
            write_text(
                path,
                _as_lines(each for each in records if counts[each["chunk"]] == each["chunk_size"]),
            )

    def write_failure(self, error: GrpoError) -> None:
        """Leave a process's error to the command that waits for it."""
        write_json(self.failure, {"message": str(error), "exit_code": int(error.exit_code)})

    def take_failure(self) -> GrpoError | None:
        """Return and remove the error that a process left; None if there is none."""
        if (left := read_file(self.failure, _Failure)) is None:
            return None
        self.failure.unlink()
        kinds = {ExitCode.USAGE: UsageError, ExitCode.ENVIRONMENT: SetupError}
        return kinds.get(left["exit_code"], RunError)(left["message"])

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def _as_lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _read_samples(path: Path) -> list[dict[str, Any]]:
    return list(RecordTail(path, read_chunked).read_new())


def open_folder(request: EvalRequest, options: EvalOptions) -> EvalFolder:
    """Return the folder the evaluation goes to: a new one, or an interrupted one, or raise `UsageError`."""
    source, out = Path(request.source), options.out
    # Into the run, or beside the runs.
    parent = Path("evals") / request.recipe.name
    parent = RunFolder(source).evaluations if source.is_dir() else parent
    if options.resume:
        return _find_unfinished(request, out, parent)
    if out and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"{out} exists already, and nothing is overwritten", "another --out, or --resume"
        )
    folder = EvalFolder(out or claim_folder(parent, "--out DIR"))
    folder.write_request(request)
    return folder


def _find_unfinished(request: EvalRequest, out: Path | None, parent: Path) -> EvalFolder:
    """Return the newest evaluation of the same request without a result, preferably one with samples."""
    paths = [out] if out else sorted(parent.glob("*/"), reverse=True)
    for folder in sorted(map(EvalFolder, paths), key=lambda folder: not folder.has_samples()):
        if not folder.request.is_file() or folder.result.is_file():
            continue
        try:
            differing = folder.read_request().differing(request)
        except UsageError:
            if out:
                raise
            continue
        if not differing:
            with folder.lock():
                folder.write_request(request)
                folder.drop_torn_chunks()
            return folder
        if out:
            raise UsageError(
                f"{out} was started with other settings ({', '.join(differing)})",
                "give the same ones, or another --out",
            )
    raise UsageError(
        f"there is no interrupted evaluation with these settings in {out or parent}",
        "leave out --resume",
    )
