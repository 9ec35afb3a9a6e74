"""A run of another tool, read from its log: a `RunReport` whose records and recipe are as far as the log tells."""

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from grpo_cli.analysis.diagnosis.advice import Advice
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.errors import RunError, UsageError
from grpo_cli.logs.files import LogFile
from grpo_cli.logs.names import find_tool, read_table
from grpo_cli.logs.records import Reader
from grpo_cli.logs.settings import (
    LIMIT,
    LORA,
    RATE,
    estimate_clipped,
    find_limit,
    find_settings,
    make_recipe,
    read_config,
)
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.summary import RunReport
from grpo_cli.runs.folder import Life, RunFolder, State, Status
from grpo_cli.runs.metrics import read_rewards
from grpo_cli.runs.selection import find_run, is_run
from grpo_cli.units import count_noun

_FEWEST = 20
"""Records with a reward below which a run is too short to be judged."""
_IN_FOLDER = (
    "trainer_state.json",
    "checkpoint-*/trainer_state.json",
    "*/checkpoint-*/trainer_state.json",
    "logging.jsonl",
    "*/logging.jsonl",
    "metrics.jsonl",
    "events.out.tfevents*",
    "*/events.out.tfevents*",
    "run-*.wandb",
    "offline-run-*/run-*.wandb",
    "*.parquet",
    "*.db",
    "*.log",
)
"""What is looked for in a folder, in this order; the newest of several is read."""
STDIN = "-"
_RUNNING_S = 600.0
"""How long ago a log was written to at most while the run goes on."""


@dataclass(frozen=True)
class Known:
    """What a person says of a run beside its log."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's keys → values."""
    config: Path | None = None
    """The config of the tool, or a recipe."""


NOTHING_KNOWN = Known()


class LogRun(RunReport):
    """A run of another tool; raises `RunError` if the log is of another training, `UsageError` if it is none."""

    def __init__(self, path: Path, known: Known = NOTHING_KNOWN) -> None:
        self.log = find_log(path)
        super().__init__(RunFolder(path), str(self.log if path.is_dir() else path))
        self._known = known
        self._shown = 0
        """The newest step that `refresh` has returned."""
        self._read()

    def _read(self) -> None:
        began = time.monotonic()
        self._size = self.log.stat().st_size
        file = LogFile(self.log)
        self.reader = reader = Reader()
        reader.read(file.read())
        self.kind, self._notes, self._facts = file.kind, file.notes, file.facts
        self._refuse()
        self.tool = find_tool(reader.names) or "TRL"
        self.metrics = reader.metrics
        self.recipe, self.unknown = self._set_up()
        # While it grows, reading takes at most a part of the time.
        self.wait_until = time.monotonic() + 5 * (time.monotonic() - began)

    def _refuse(self) -> None:
        """Refuse what is not the log of a GRPO training."""
        reader, name = self.reader, self.log
        if reader.records:
            return
        fix = "name the log of a GRPO training: its records have a reward"
        if reader.preferences:
            raise RunError(f"{name} is a log of preference training, not of GRPO", fix)
        if reader.supervised:
            count = count_noun(reader.supervised, "record")
            raise RunError(
                f"{name} is a log of supervised training, not of GRPO: {count} with a loss and none with a reward",
                fix,
            )
        raise UsageError(f"{name} holds no records of a training", fix)

    def _set_up(self) -> tuple[Recipe, frozenset[str]]:
        """Return the recipe as far as it is known, and the keys that are not."""
        table = read_table()["tools"][self.tool]["settings"]
        others = (f"{name}={value}" for each in self.reader.others for name, value in each.items())
        texts = [*self._notes, *others]
        config = read_config(self.log, self._known.config)
        named = find_settings(self.tool, texts, config, self._facts) | dict(self._known.settings)
        if total := self.metrics.total_steps:
            named.setdefault("training.max_steps", total)
        self.metrics.total_steps = named.get("training.max_steps")
        self.remarks = dict(self.reader.remarks)
        if LIMIT not in named and (limit := find_limit(self.metrics)):
            named[LIMIT] = limit
            self.remarks[LIMIT] = (
                f"{table.get(LIMIT, LIMIT)} is taken to be {limit}, which lengths do not exceed"
            )
        if LIMIT in named and estimate_clipped(self.metrics, int(named[LIMIT])):
            text = "the share of completions that were cut off is estimated from their mean length"
            self.remarks["completions/clipped_ratio"] = text
        rates = self.metrics.values("learning_rate")
        if rates and max(rates) > 0:
            named[RATE] = max(rates)
        self.known_settings = frozenset(named)
        unknown = frozenset(key for key in (*table, LORA) if key not in named)
        while True:
            try:
                return make_recipe(named, self.metrics), unknown
            except ValidationError as error:
                wrong = {".".join(map(str, each["loc"][:2])) for each in error.errors()}
                if not wrong & named.keys():
                    raise
                named = {key: value for key, value in named.items() if key not in wrong}
                unknown |= wrong

    @property
    def weights(self) -> dict[str, float]:
        """Each reward by its name; a log does not tell their weights."""
        names = [*read_rewards(dict.fromkeys(self.series, 0.0))] or ["reward"]
        return dict.fromkeys(names, 1.0)

    def history(self) -> History:
        """Return what rules read."""
        tool = read_table()["tools"][self.tool]
        advice = Advice(tool["settings"], tool["form"], self.unknown)
        return History(self.recipe, self.metrics, run=str(self.log), advice=advice)

    def brief_history(self) -> History:
        """Return the same: all that is known is in the records."""
        return self.history()

    @property
    def is_short(self) -> bool:
        """True if there are too few records for most rules."""
        return len(self.values("reward")) < _FEWEST

    def skim(self) -> Self:
        """Return the run: a log is read whole."""
        return self

    def refresh(self) -> list[dict[str, Any]]:
        """Read the log again if it has grown; return the records that came since the last call."""
        size = self.log.stat().st_size
        if size != self._size and time.monotonic() > self.wait_until:
            self._read()
        new = [each for each in self.metrics.steps if each["step"] > self._shown]
        self._shown = self.metrics.step
        return [{"event": "train", **each} for each in new]

    @property
    def status(self) -> Status:
        """The steps that were logged; a log that was written to lately is that of a run in progress."""
        stat = self.log.stat()
        state: State = "running" if time.time() - stat.st_mtime < _RUNNING_S else "completed"
        return Status(
            state=state,
            phase="training",
            step=self.metrics.step,
            total_steps=self.metrics.total_steps,
            started_at=stat.st_mtime,
            updated_at=stat.st_mtime,
        )

    @status.setter
    def status(self, status: Status) -> None:
        """A log has none that could be read again."""

    @property
    def life(self) -> Life:
        """Its state."""
        return Life(self.status.state, 0.0, None)

    @property
    def described(self) -> str:
        """What was read, in a few words."""
        steps = [step for step, _ in self.metrics.series.get("reward", ())] or [self.metrics.step]
        span = f"steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"step {steps[0]:,}"
        if self.reader.counted:
            span = "numbered here, as no step is logged"
        total = f" of {self.metrics.total_steps:,}" if self.metrics.total_steps else ""
        if self.reader.completions:
            steps_told = span if len(steps) > 1 else f"{span}: {self.reader.completions}"
            return f"Completions ({self.kind}), {steps_told}"
        return f"Log of {self.tool} ({self.kind}), {count_noun(self.reader.records, 'record')}, {span}{total}"

    @property
    def newest(self) -> dict[str, float]:
        """The main metrics of the newest record with a reward."""
        names = read_table()["metrics"]
        shown = [name for name in self.series if name in names or name.startswith("rewards/")]
        return {
            name: values[-1]
            for name in (*names, *shown)
            if name in shown and not name.endswith("/std") and (values := self.values(name))
        }

    @property
    def left_out(self) -> list[str]:
        """What of the log is not looked at, in words."""
        reader = self.reader
        words = []
        if reader.supervised:
            words.append(f"{count_noun(reader.supervised, 'record')} of supervised training")
        if reader.copies:
            words.append(f"{count_noun(reader.copies, 'record')} that stood there already")
        if reader.attempts > 1:
            words.append(
                f"{count_noun(reader.superseded, 'record')} of earlier attempts ({reader.attempts} in all)"
            )
        return words

    def log_json(self) -> dict[str, Any]:
        """Return what was read, as plain values."""
        return {
            "file": str(self.log),
            "kind": self.kind,
            "tool": self.tool,
            "records": self.reader.records,
            "evaluations": self.reader.evaluations,
            "attempts": self.reader.attempts,
            "superseded": self.reader.superseded,
            "copies": self.reader.copies,
            "supervised": self.reader.supervised,
            "steps_logged": not self.reader.counted,
            "too_short": self.is_short,
            "remarks": self.remarks,
            "unknown": sorted(self.unknown),
        }


def find_log(path: Path) -> Path:
    """Return the log that a path means; of a folder, the one in it."""
    if str(path) == STDIN:
        return _copy_stdin()
    if not path.is_dir():
        return path
    for pattern in _IN_FOLDER:
        if files := [each for each in path.glob(pattern) if each.is_file()]:
            # The copy of a checkpoint has the time at which it was made, so its number comes first.
            return max(files, key=lambda each: (_number(each.parent), each.stat().st_mtime, each))
    raise UsageError(f"{path} is neither a run folder nor a folder with a log", "name the file")


def _number(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _copy_stdin() -> Path:
    import atexit

    with tempfile.NamedTemporaryFile(prefix="log-", delete=False) as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    path = Path(file.name)
    atexit.register(path.unlink, missing_ok=True)
    return path


def open_run(root: Path, name: str, known: Known = NOTHING_KNOWN) -> RunReport:
    """Return the run that is meant: one of ours, by path or name, or that of another tool by its log."""
    path = Path(name).expanduser()
    if name == STDIN or path.is_file() or (path.is_dir() and not is_run(path) and _has_log(path)):
        return LogRun(path, known)
    return RunReport(find_run(root, name))


def _has_log(path: Path) -> bool:
    with suppress(UsageError):
        return find_log(path).is_file()
    return False
