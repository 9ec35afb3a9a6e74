"""The folder of one evaluation: the request, the data it is measured on, the samples, the result.

Owns the names of its files and who may write to it. The samples' own form is `samples.py`'s.
"""

import json
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import ExitCode, GrpoError, RunError, SetupError, UsageError
from grpo_cli.eval.request import EvalRequest
from grpo_cli.eval.samples import SampleFiles
from grpo_cli.runs.files import SCHEMA_VERSION, write_json
from grpo_cli.runs.folder import unwritable
from grpo_cli.runs.lock import lock_folder


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

    @property
    def failure(self) -> Path:
        """The error of ours that ended one of several processes."""
        return self.path / "failure.json"

    @property
    def samples(self) -> SampleFiles:
        """Every completion with its scores."""
        return SampleFiles(self.path / "samples")

    def lock(self) -> AbstractContextManager[None]:
        """Keeps other commands from measuring into the same folder; see `runs/locking.py`."""
        return lock_folder(self.path, "measuring")

    def write_request(self, request: EvalRequest) -> None:
        """Writes what was asked for; makes the folder.

        Raises:
            UsageError: The folder cannot be written.
        """
        told = {"schema_version": SCHEMA_VERSION, "request": request.model_dump(mode="json")}
        try:
            self.samples.path.mkdir(parents=True, exist_ok=True)
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
        except FileNotFoundError:
            raise UsageError(
                f"{self.path} is not the folder of an evaluation: it has no request.json. "
                "Fix: name a folder that `grpo eval` made"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise self._damaged(self.request) from None

    def write_about(self, about: dict[str, Any]) -> None:
        """Writes what the data is, where it is not known yet."""
        if not self.about.is_file():
            write_json(self.about, about)

    def check_about(self, about: dict[str, Any]) -> None:
        """Compares the data with what the evaluation was begun with.

        Raises:
            UsageError: The data changed, or what it was is lost.
        """
        if self.about.is_file() and self.read_about() != about:
            raise UsageError(
                f"the data changed since {self.path} was begun, and its samples answer the old prompts. "
                "Fix: measure anew, without --resume"
            )
        if not self.about.is_file() and self.samples.any():
            raise self._damaged(self.about)

    def read_about(self) -> dict[str, Any]:
        """What the data is: split, rows, fingerprint.

        Raises:
            UsageError: The file is damaged.
        """
        try:
            return dict(json.loads(self.about.read_text(encoding="utf-8")))
        except (ValueError, TypeError, FileNotFoundError):
            raise self._damaged(self.about) from None

    def write_failure(self, error: GrpoError) -> None:
        """Leaves a process's error to the command that waits for it."""
        write_json(self.failure, {"message": str(error), "exit_code": int(error.exit_code)})

    def take_failure(self) -> GrpoError | None:
        """The error that a process left, as that process raised it; None where it left none."""
        try:
            told = json.loads(self.failure.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        self.failure.unlink()
        kinds = {ExitCode.USAGE: UsageError, ExitCode.ENVIRONMENT: SetupError}
        return kinds.get(told["exit_code"], RunError)(told["message"])

    def remove(self) -> None:
        """Takes the folder away."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _damaged(self, file: Path) -> UsageError:
        return UsageError(
            f"{file} is missing, damaged or another version's. Fix: measure anew, with another --out"
        )
