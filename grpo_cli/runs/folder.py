"""The run folder: where everything about one run lies.

Owns the names of its files, making a fresh one, and reading back its recipe. Does not interpret
what the files say.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpo_cli.errors import SetupError, UsageError
from grpo_cli.runs.files import SCHEMA_VERSION, parse_json, read_object, write_json, write_text
from grpo_cli.runs.lock import lock_folder

if TYPE_CHECKING:
    from grpo_cli.recipe.recipe import Recipe

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_PARTS = {"hardware", "accelerator", "versions", "data"}
"""Of a manifest; what has another shape is damage."""
_OF_MACHINE_0 = Path("..", "..", "checkpoints")
"""Where the checkpoints of another machine's folder point."""


@dataclass(frozen=True)
class RunFolder:
    """The paths inside `runs/<name>/<timestamp>/`, or a name of the user's own in place of the time."""

    path: Path

    def machine(self, rank: int) -> "RunFolder":
        """One machine's part of a run that several share: all its own but the checkpoints."""
        return RunFolder(self.path / "machines" / str(rank)) if rank else self

    @property
    def shares_checkpoints(self) -> bool:
        """Whether this is another machine's part, so that the checkpoints are machine 0's to change."""
        # Others link theirs too, to a larger disk: this very link makes the difference.
        return self.checkpoints.is_symlink() and self.checkpoints.readlink() == _OF_MACHINE_0

    @property
    def main(self) -> "RunFolder":
        """Machine 0's part: this one, where no other machine is concerned."""
        return RunFolder(self.path.parent.parent) if self.shares_checkpoints else self

    @property
    def recipe(self) -> Path:
        """The recipe as given."""
        return self.path / "recipe.yaml"

    @property
    def resolved(self) -> Path:
        """The recipe after `extends`, overrides and defaults; the worker's only input."""
        return self.path / "resolved.json"

    @property
    def manifest(self) -> Path:
        """Versions, git, hardware, data fingerprint, seed."""
        return self.path / "manifest.json"

    @property
    def status(self) -> Path:
        """Where the run stands."""
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        """One JSON record a line, append-only."""
        return self.path / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        """Sampled groups with their scores, one file a process."""
        return self.path / "completions"

    @property
    def launch(self) -> Path:
        """What was launched, and the process ids of the workers."""
        return self.path / "launch"

    @property
    def plan(self) -> Path:
        """The command, the processes and the environment of the present attempt."""
        return self.launch / "plan.json"

    @property
    def accelerate(self) -> Path:
        """accelerate's config, where several processes are launched."""
        return self.launch / "accelerate.yaml"

    @property
    def stop_request(self) -> Path:
        """A file that asks the workers to finish their step, save and stop; its being there says it."""
        return self.launch / "stop"

    def worker_pid(self, rank: int) -> Path:
        """The process id of one worker, as text."""
        return self.launch / f"rank_{rank}.pid"

    def worker_pids(self) -> dict[int, Path]:
        """The process ids written so far, by rank."""
        return _by_number(self.launch.glob("rank_*.pid"))

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The final weights or adapter."""
        return self.path / "model"

    @property
    def evaluations(self) -> Path:
        """Measurements before and after."""
        return self.path / "eval"

    @property
    def report(self) -> Path:
        """The page of this run."""
        return self.path / "report.html"

    @property
    def trackers(self) -> Path:
        """Its runs in the trackers; absent where there are none."""
        return self.path / "trackers.json"

    @property
    def resumption(self) -> Path:
        """From which checkpoint the present attempt goes on; absent where it began anew."""
        return self.launch / "resume.json"

    def attempt(self, number: int) -> Path:
        """The logs of one attempt, from 1."""
        return self.path / "logs" / f"attempt_{number}"

    @property
    def attempts(self) -> int:
        """How often the run was started."""
        return max(_by_number((self.path / "logs").glob("attempt_*")), default=0)

    @property
    def log(self) -> Path:
        """What the workers of the present attempt say."""
        return self.attempt(self.attempts) / "worker.log"

    @property
    def server_log(self) -> Path:
        """What the vLLM server of the present attempt says."""
        return self.attempt(self.attempts) / "server.log"

    def failure(self, rank: int) -> Path:
        """Why one worker of the present attempt failed: when, its rank, reason and traceback."""
        return self.attempt(self.attempts) / f"failure_{rank}.json"

    def failures(self) -> dict[int, Path]:
        """The failures written so far in the present attempt, by rank."""
        return _by_number(self.attempt(self.attempts).glob("failure_*.json"))

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Writes what is launched, and accelerate's part of it as the file that it reads."""
        self.launch.mkdir(exist_ok=True)
        write_json(self.plan, dict(plan))
        if plan["accelerate"] is not None:
            # JSON is YAML, but people look at this one.
            write_text(self.accelerate, yaml.safe_dump(plan["accelerate"], sort_keys=False))

    def lock(self) -> AbstractContextManager[None]:
        """Keeps other commands from training into the same folder; see `runs/locking.py`."""
        return lock_folder(self.launch, "training")

    def read_plan(self) -> dict[str, Any]:
        """What was launched; nothing where it is not there, or damaged."""
        return read_object(self.plan)

    def read_manifest(self) -> dict[str, Any]:
        """What the run was made of; nothing where it is not there, or damaged."""
        told = read_object(self.manifest)
        return {
            name: part
            for name, part in told.items()
            if name not in _PARTS or isinstance(part, dict)
        }

    def read_resumption(self) -> dict[str, Any]:
        """From where the present attempt goes on; nothing where it began anew."""
        return read_object(self.resumption)

    def write_recipe(self, recipe: "Recipe") -> None:
        """Writes the resolved recipe."""
        resolved = {"schema_version": SCHEMA_VERSION, "recipe": recipe.model_dump(mode="json")}
        write_json(self.resolved, resolved)

    def read_recipe(self) -> "Recipe":
        """The resolved recipe.

        Raises:
            UsageError: This is not a run folder.
        """
        # A list of runs reads no recipe, and need not wait for the schema.
        from grpo_cli.recipe.recipe import Recipe

        try:
            told = parse_json(self.resolved.read_bytes())
            version = told["schema_version"]
            if version > SCHEMA_VERSION:
                raise UsageError(
                    f"{self.path} is of version {version}, and this grpo knows up to {SCHEMA_VERSION}. "
                    "Fix: use the grpo that wrote it, or a newer one"
                )
            # What an older version did not write down has its default. It held out by the recipe's seed.
            told["recipe"]["dataset"].setdefault("eval_seed", told["recipe"]["seed"])
            return Recipe.model_validate(told["recipe"])
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise UsageError(
                f"{self.path} is not a run folder: it has no resolved.json. "
                "Fix: name a folder under runs/<name>/"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"{self.resolved} is damaged, or another version's. "
                "Fix: use the grpo that wrote it, or train anew with recipe.yaml"
            ) from None


def _by_number(paths: Iterable[Path]) -> dict[int, Path]:
    numbered = [(path.stem.rpartition("_")[2], path) for path in paths]
    return {int(number): path for number, path in numbered if number.isdecimal()}


def create_run(root: Path, recipe: "Recipe", recipe_text: str) -> RunFolder:
    """Makes a fresh run folder that holds the recipe as given and as resolved.

    Args:
        root: Usually `runs`.
        recipe: The validated recipe.
        recipe_text: The YAML as the user wrote it.

    Raises:
        UsageError: The folder cannot be written.
    """
    folder = RunFolder(claim_folder(root / recipe.name))
    with removed_on_failure(folder):
        _fill(folder, recipe, recipe_text)
    return folder


def locate_run(root: Path, recipe: "Recipe", run_id: str) -> RunFolder:
    """This machine's part of the run with a name of the user's own, whether or not it is there.

    Args:
        root: Usually `runs`.
        recipe: Says the name, and which machine this is.
        run_id: What stands in the place of the time.

    Raises:
        UsageError: The name is none of a folder.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"{run_id!r} is no name of a run. Fix: give --run-id letters, digits, `-`, `_` and `.`, "
            "a letter or digit first"
        )
    run = RunFolder((root / recipe.name / run_id).absolute())
    return run.machine(recipe.launch.machine_rank)


def create_named_run(folder: RunFolder, recipe: "Recipe", recipe_text: str) -> None:
    """Makes the folder that `locate_run` gives, or what is lacking in one that was never finished.

    Args:
        folder: One without a resolved recipe. Other machines may be making theirs in it.
        recipe: The validated recipe.
        recipe_text: The YAML as the user wrote it.

    Raises:
        UsageError: The folder cannot be written.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if recipe.launch.machine_rank and not folder.shares_checkpoints:
            folder.checkpoints.symlink_to(_OF_MACHINE_0)
        # Machine 0 may be slower, and the link must lead somewhere.
        folder.main.checkpoints.mkdir(exist_ok=True)
        _fill(folder, recipe, recipe_text)
    except OSError as error:
        raise unwritable(folder.path, error) from None


def _fill(folder: RunFolder, recipe: "Recipe", recipe_text: str) -> None:
    for child in (folder.completions, folder.launch, folder.attempt(1)):
        child.mkdir(parents=True, exist_ok=True)
    if not folder.shares_checkpoints:
        folder.checkpoints.mkdir(exist_ok=True)
    write_text(folder.recipe, recipe_text)
    # Last: by it a run is known to be one.
    folder.write_recipe(recipe)


@contextmanager
def removed_on_failure(folder: RunFolder) -> Iterator[None]:
    """Takes a half-made run folder away where its files cannot be written (a full disk, say).

    Raises:
        UsageError: In the place of the `OSError`.
    """
    try:
        yield
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise unwritable(folder.path.parent, error) from None


def claim_folder(parent: Path, flag: str = "--runs DIR") -> Path:
    """Makes a folder that no other has, named after the time.

    Args:
        parent: Where it goes; made where it is missing.
        flag: What the command line gives another place with.

    Raises:
        UsageError: The parent cannot be written.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for count in range(1, 1000):
            path = (parent / (stamp if count == 1 else f"{stamp}-{count}")).absolute()
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise unwritable(parent, error, flag) from None
    raise SetupError(f"{parent} holds a thousand runs of this second. Fix: try again")


def check_writable(root: Path) -> None:
    """Refuses a run root that cannot be written, without leaving anything behind.

    Raises:
        UsageError: Neither the root nor, where it does not exist yet, its nearest parent is writable.
    """
    existing = root.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
    except OSError as error:
        raise unwritable(root, error) from None
    if not existing.is_dir():
        raise unwritable(root, NotADirectoryError(20, f"{existing} is a file"))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise unwritable(root, PermissionError(13, "Permission denied"))


def unwritable(path: Path, error: OSError, flag: str = "--runs DIR") -> UsageError:
    """The message for a folder that cannot be written; `flag` gives another."""
    return UsageError(
        f"{path} cannot be written ({error.strerror}). Fix: give another place with {flag}"
    )
