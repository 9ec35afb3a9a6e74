"""Every completion of an evaluation with its scores, written as it comes and read back.

Owns the lines of the files, and what of an interrupted evaluation counts as done: whole chunks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_cli.analysis.samples import ScoredCompletion
from grpo_cli.eval.chunks import Chunk
from grpo_cli.runs.files import write_text


@dataclass(frozen=True)
class SampleFiles:
    """The files of one evaluation: one for each subject and process."""

    path: Path

    def append(
        self,
        subject: str,
        rank: int,
        chunk: Chunk,
        seconds: float,
        scored: Sequence[ScoredCompletion],
        *,
        warms_up: bool,
    ) -> None:
        """Append one chunk in one write.

        Args:
            subject: Whose completions they are.
            rank: The process that sampled them.
            chunk: Their prompts.
            seconds: How long sampling took.
            scored: The completions.
            warms_up: Whether it is the first that this process sampled from the subject.
        """
        about = {
            "chunk": chunk.number,
            "chunk_size": len(scored),
            "chunk_s": seconds,
            "chunk_warms_up": warms_up,
        }
        lines = [{**asdict(each), **about} for each in scored]
        # A lone surrogate, which UTF-8 cannot hold, is written as JSON's own escape of it.
        file = self.path / f"{subject}.{rank}.jsonl"
        with file.open("a", encoding="utf-8", errors="backslashreplace") as out:
            out.write("".join(_as_line(line) for line in lines))

    def read(self, subject: str) -> dict[int, list[dict[str, Any]]]:
        """The chunks of a subject that are whole, by number; records as `append` wrote them."""
        chunks: dict[int, list[dict[str, Any]]] = {}
        for path in sorted(self.path.glob(f"{subject}.*.jsonl")):
            for record in _read_whole_lines(path):
                chunks.setdefault(record["chunk"], []).append(record)
        return {
            number: records
            for number, records in chunks.items()
            if len(records) == records[0]["chunk_size"]
        }

    def count(self, subject: str) -> int:
        """How many samples of a subject there are so far."""
        files = self.path.glob(f"{subject}.*.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in files)

    def any(self) -> bool:
        """Whether anything was sampled yet."""
        return any(path.stat().st_size for path in self.path.glob("*.jsonl"))

    def forget_torn(self) -> None:
        """Takes away chunks that were cut off while being written, before an evaluation goes on."""
        for path in self.path.glob("*.jsonl"):
            records = list(_read_whole_lines(path))
            counts: dict[int, int] = {}
            for record in records:
                counts[record["chunk"]] = counts.get(record["chunk"], 0) + 1
            whole = [each for each in records if counts[each["chunk"]] == each["chunk_size"]]
            write_text(path, "".join(_as_line(each) for each in whole))


def _as_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _read_whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    # Not `splitlines`, which also breaks at U+2028 and its kin inside a text.
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line) if line else None
        except ValueError:
            # The last line of a process that was killed.
            return
        if isinstance(record, dict) and "chunk" in record:
            yield record
