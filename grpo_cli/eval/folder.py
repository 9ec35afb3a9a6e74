"""The folder of one evaluation: the request, every sample as it comes, and the result.

Owns the names of its files, and what of an interrupted evaluation counts as done.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import UsageError
from grpo_cli.eval.request import EvalRequest
from grpo_cli.measure.chunks import Chunk
from grpo_cli.measure.samples import ScoredCompletion
from grpo_cli.runs.files import SCHEMA_VERSION, write_json, write_text
from grpo_cli.runs.folder import unwritable


@dataclass(frozen=True)
class EvalFolder:
    """The paths inside an evaluation's folder."""

    path: Path

    @property
    def request(self) -> Path:
        """What was asked for."""
        return self.path / "request.json"

    @property
    def result(self) -> Path:
        """Metrics, intervals and the verdict; written last."""
        return self.path / "result.json"

    @property
    def about(self) -> Path:
        """What the data is that is measured on."""
        return self.path / "data.json"

    @property
    def log(self) -> Path:
        """What several processes said."""
        return self.path / "workers.log"

    def samples(self, subject: str, rank: int) -> Path:
        """Every completion with its scores, one a line, as one process sampled them."""
        return self.path / "samples" / f"{subject}.{rank}.jsonl"

    def write_request(self, request: EvalRequest) -> None:
        """Writes what was asked for; makes the folder.

        Raises:
            UsageError: The folder cannot be written.
        """
        told = {"schema_version": SCHEMA_VERSION, "request": request.model_dump(mode="json")}
        try:
            (self.path / "samples").mkdir(parents=True, exist_ok=True)
            write_json(self.request, told)
        except OSError as error:
            raise unwritable(self.path, error, "--out DIR") from None

    def read_request(self) -> EvalRequest:
        """What was asked for.

        Raises:
            UsageError: This is no evaluation's folder.
        """
        try:
            told = json.loads(self.request.read_text(encoding="utf-8"))
            return EvalRequest.model_validate(told["request"])
        except OSError:
            raise UsageError(
                f"{self.path} is not the folder of an evaluation: it has no request.json. "
                "Fix: name a folder that `grpo eval` made"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"{self.request} is damaged, or another version's. Fix: measure anew, with another --out"
            ) from None

    def write_about(self, about: dict[str, Any]) -> None:
        """Writes what the data is.

        Raises:
            UsageError: The evaluation was begun with other data.
        """
        if self.about.is_file() and self.read_about() != about:
            raise UsageError(
                f"the data changed since {self.path} was begun, and its samples answer the old prompts. "
                "Fix: measure anew, without --resume"
            )
        write_json(self.about, about)

    def read_about(self) -> dict[str, Any]:
        """What the data is: split, rows, fingerprint."""
        return json.loads(self.about.read_text(encoding="utf-8"))

    def count_samples(self, subject: str) -> int:
        """How many samples of a subject there are so far."""
        files = (self.path / "samples").glob(f"{subject}.*.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in files)

    def has_samples(self) -> bool:
        """Whether anything was sampled yet."""
        return any(path.stat().st_size for path in (self.path / "samples").glob("*.jsonl"))

    def remove(self) -> None:
        """Takes the whole folder away."""
        shutil.rmtree(self.path, ignore_errors=True)

    def append(
        self,
        subject: str,
        rank: int,
        chunk: Chunk,
        seconds: float,
        scored: Sequence[ScoredCompletion],
    ) -> None:
        """Appends one chunk, with how long it took to sample; in one write."""
        lines = [
            {**asdict(each), "chunk": chunk.number, "chunk_size": len(scored), "chunk_s": seconds}
            for each in scored
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with self.samples(subject, rank).open("a", encoding="utf-8") as file:
            file.write(text)

    def read_samples(self, subject: str) -> dict[int, list[dict[str, Any]]]:
        """The chunks of a subject that are whole, by number; records as `append` wrote them."""
        chunks: dict[int, list[dict[str, Any]]] = {}
        for path in sorted((self.path / "samples").glob(f"{subject}.*.jsonl")):
            for record in _read_whole_lines(path):
                chunks.setdefault(record["chunk"], []).append(record)
        return {
            number: records
            for number, records in chunks.items()
            if len(records) == records[0]["chunk_size"]
        }

    def forget_torn(self) -> None:
        """Takes away chunks that were cut off while being written, before an evaluation goes on."""
        for path in (self.path / "samples").glob("*.jsonl"):
            records = list(_read_whole_lines(path))
            counts: dict[int, int] = {}
            for record in records:
                counts[record["chunk"]] = counts.get(record["chunk"], 0) + 1
            whole = [each for each in records if counts[each["chunk"]] == each["chunk_size"]]
            text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in whole)
            write_text(path, text)


def _read_whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    # Not `splitlines`, which also breaks at U+2028 and its kin inside a text.
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError:
            # The last line of a process that was killed.
            return


def as_scored(record: dict[str, Any]) -> ScoredCompletion:
    """A record of `read_samples` as it was before it was written."""
    names = ScoredCompletion.__dataclass_fields__
    return ScoredCompletion(**{name: record[name] for name in names})
