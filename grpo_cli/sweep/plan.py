"""A sweep before it runs: its cells from `--grid` and `--seeds`, their checks, and `sweep.json`."""

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from grpo_cli.checks.recipe import CheckedRecipe
from grpo_cli.data.sources import has_eval
from grpo_cli.errors import ProblemsError, RecipeError, UsageError
from grpo_cli.issues import Issue, Location
from grpo_cli.machine import Hardware, is_on_cpu
from grpo_cli.recipe.loading import load_tree
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import SCHEMA_VERSION, read_file, write_json
from grpo_cli.runs.folder import RunFolder, claim_folder

SWEEPS = "sweeps"
"""Beside the runs of a name: the folder of its sweeps."""
Settings = dict[str, str]
"""Dotted path → its value, as `--set` takes it."""
_OWN = {"seed": "--seeds", "name": "--set name=…", "extends": "the recipe"}
"""Keys that a sweep does not vary, and where they are set instead."""
_MOST_NAMED = 3
_MOST_SEEDS = 20
"""By number: `--seeds 42` most likely means the seed 42."""


@dataclass(frozen=True)
class SweepRequest:
    """What the command line asks for; all of it stands in `sweep.json`."""

    recipe: str
    cwd: str
    """Where the command was given: paths in `--set` are relative to it."""
    overrides: tuple[str, ...]
    grid: tuple[str, ...]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    probe: bool = True
    """Whether the first run of each cell is probed."""

    @property
    def command(self) -> str:
        """The command line, with the seeds in full."""
        flags = [("--grid", each) for each in self.grid]
        flags += [("--seeds", ",".join(map(str, self.seeds)) + "," * (len(self.seeds) == 1))]
        flags += [("--set", each) for each in self.overrides]
        return shlex.join(
            ["grpo", "sweep", self.recipe, *(word for pair in flags for word in pair)]
        )

    def choices(self) -> dict[str, tuple[str, ...]]:
        """Return the values of each grid; raises `UsageError` if one cannot be read."""
        return {key: tuple(split_values(raw)) for key, raw in _read_grids(self.grid)}

    def points(self) -> list[Settings]:
        """Return the settings of all cells."""
        choices = self.choices()
        return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


@dataclass
class CellRun:
    """One cell with one seed: an ordinary run."""

    seed: int
    run_id: str
    state: str = "waiting"
    """`waiting`, `skipped` if its cell was refused, or the run's own state."""
    reason: str | None = None


@dataclass
class Cell:
    """Settings that are trained with every seed."""

    number: int
    settings: Settings
    runs: list[CellRun]

    @property
    def label(self) -> str:
        """The settings in short."""
        return say_settings(self.settings)


@dataclass
class Sweep:
    """A sweep and its folder; `save` after each change."""

    folder: Path
    request: SweepRequest
    resolved: Recipe
    """The first cell as it was checked, by which a changed recipe is known."""
    cells: list[Cell] = field(default_factory=list)
    job: str | None = None
    """The Slurm job array that runs it; None if this machine does."""

    @property
    def logs(self) -> Path:
        """The output of each run's command."""
        return self.folder / "logs"

    def run_folder(self, run: CellRun) -> RunFolder:
        """Return the folder of a run, which need not exist."""
        return RunFolder(self.folder.parent.parent / run.run_id)

    def add_cell(self, settings: Settings) -> Cell:
        """Add a cell that no run was started of."""
        number, seeds = len(self.cells) + 1, self.request.seeds
        runs = [CellRun(seed, f"{self.folder.name}-{number}-seed-{seed}") for seed in seeds]
        self.cells.append(Cell(number, settings, runs))
        return self.cells[-1]

    def in_order(self) -> list[tuple[Cell, CellRun]]:
        """Return all runs as they are started: all cells with one seed, then with the next."""
        pairs = [(cell, run) for cell in self.cells for run in cell.runs]
        return sorted(pairs, key=lambda pair: pair[0].runs.index(pair[1]))

    def save(self) -> None:
        """Write `sweep.json`, whole or not at all."""
        write_json(
            self.folder / "sweep.json",
            {
                "schema_version": SCHEMA_VERSION,
                "kind": "grpo-sweep",
                "request": asdict(self.request),
                "job": self.job,
                "cells": [asdict(each) for each in self.cells],
                "resolved": self.resolved.model_dump(mode="json"),
            },
        )


class _Written(TypedDict):
    request: SweepRequest
    cells: list[Cell]
    resolved: Recipe
    job: NotRequired[str | None]


def split_values(text: str) -> list[str]:
    """Split at commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in "[{(") - (letter in ")}]") if not quote else 0
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _read_grids(texts: Iterable[str]) -> list[tuple[str, str]]:
    read: dict[str, str] = {}
    for text in texts:
        key, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or not key or not raw:
            raise UsageError(
                f"--grid {text} is not `path=values`",
                "write --grid training.learning_rate=1e-5,1e-4",
            )
        if key in _OWN:
            raise UsageError(
                f"--grid {text}: a sweep does not vary `{key}`", f"it is set with {_OWN[key]}"
            )
        if key in read:
            raise UsageError(f"--grid {key} is given twice", "write all its values in one --grid")
        read[key] = raw
    return list(read.items())


def read_seeds(text: str, first: int) -> tuple[int, ...]:
    """Return the seeds of `--seeds`: a number of them from the recipe's own on, or those of a list."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise UsageError(
            f"--seeds {text} is neither a number nor a list", "write --seeds 3, or --seeds 1,2,7"
        )
    numbers = tuple(map(int, parts))
    if len(numbers) == 1 and "," not in text:
        if numbers[0] > _MOST_SEEDS:
            raise UsageError(
                f"--seeds {text} is {text} seeds, and more than {_MOST_SEEDS} are taken only as a list",
                f"for the seed {text} alone, write --seeds {text},",
            )
        numbers = tuple(range(first, first + numbers[0]))
    if not numbers or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--seeds {text} names {'one twice' if numbers else 'none'}", "write different seeds"
        )
    return numbers


def say_settings(settings: Mapping[str, str]) -> str:
    """Return settings with only the last part of their keys, if that is clear."""
    short = [key.rpartition(".")[2] for key in settings]
    names = short if len(set(short)) == len(short) else list(settings)
    pairs = zip(names, settings.values(), strict=True)
    return ", ".join(f"{name}={value}" for name, value in pairs)


def as_flags(request: SweepRequest, settings: Mapping[str, str], seed: int) -> list[str]:
    """Return the `--set` texts of a run."""
    own = [f"{key}={value}" for key, value in settings.items()]
    return [*request.overrides, *own, f"seed={seed}"]


def check_points(
    request: SweepRequest,
    points: Sequence[Settings],
    check: Callable[[Path, list[str]], CheckedRecipe],
) -> CheckedRecipe:
    """Check the recipe with every point's settings; return the first, with what it says of the comparison.

    Raises:
        ProblemsError: With the problems of all points, each once, and where it is.
    """
    seen: dict[tuple[str, ...], tuple[Issue, list[Settings]]] = {}
    first: CheckedRecipe | None = None
    recipes: list[Recipe] = []
    with contextlib.chdir(request.cwd):
        for settings in points:
            flags = as_flags(request, settings, request.seeds[0])
            try:
                checked = check(Path(request.recipe), flags)
                first, issues = first or checked, checked.errors
                if not issues:
                    if checked.recipe in recipes:
                        same = say_settings(points[recipes.index(checked.recipe)])
                        raise UsageError(
                            f"--grid: {same} and {say_settings(settings)} are the same recipe",
                            "leave one out",
                        )
                    recipes.append(checked.recipe)
            except RecipeError as error:
                issues = error.problems
            for issue in issues:
                key = issue.path, issue.seen, issue.fix
                seen.setdefault(key, (issue, []))[1].append(settings)
    if seen or first is None:
        raise ProblemsError(_place(issue, where, points) for issue, where in seen.values())
    problems = map(first.loaded.place, _check_ranking(first.recipe))
    return replace(first, problems=(*first.problems, *problems))


def _check_ranking(recipe: Recipe) -> Iterator[Issue]:
    """Find cells that are not measured on held-out rows."""
    fix, path = "hold rows out, such as `dataset.eval_fraction: 0.1`", "dataset"
    if has_eval(recipe.dataset):
        fix, path = "remove it, or set it to the number of prompts", "evaluation.limit"
    if path == "dataset" or recipe.evaluation.limit == 0:
        seen = "nothing is held out, so cells are ranked by the reward of the last steps, on trained prompts"
        yield Issue(seen, fix, path, level="warning")


def _place(issue: Issue, where: Sequence[Settings], points: Sequence[Settings]) -> Issue:
    """Return an issue with the flag that it comes from, or with the cells that have it."""
    flags = {f"--set {key}={value}": (key, value) for each in points for key, value in each.items()}
    swept = flags.get(issue.location.source) if issue.location else None
    by_value = swept and list(where) == [each for each in points if each[swept[0]] == swept[1]]
    if swept:
        issue = replace(
            issue, location=Location(f"--grid {'='.join(swept if by_value else swept[:1])}")
        )
    if by_value or list(where) == list(points):
        return issue
    named = "; ".join(map(say_settings, where[:_MOST_NAMED]))
    more = f" and {len(where) - _MOST_NAMED} more" if len(where) > _MOST_NAMED else ""
    return replace(issue, seen=f"{issue.seen.rstrip('.')} (with {named}{more})")


def check_unchanged(sweep: Sweep, recipe: Recipe) -> None:
    """Raise `UsageError` if the recipe is another one than the sweep began with."""
    from grpo_cli.recipe.comparison import list_training_differences

    if changed := list_training_differences(sweep.resolved, recipe):
        raise UsageError(
            f"{sweep.request.recipe} has changed since this sweep began",
            "undo these changes, or start a sweep of its own without --resume",
            details=[f"  {each}" for each in changed],
        )


def create_sweep(root: Path, request: SweepRequest, recipe: Recipe) -> Sweep:
    """Make the folder of a sweep, with all cells of a grid."""
    folder = claim_folder(Path(os.path.abspath(root)) / recipe.name / SWEEPS)
    sweep = plan_sweep(folder, request, recipe)
    sweep.logs.mkdir()
    sweep.save()
    return sweep


def plan_sweep(folder: Path, request: SweepRequest, recipe: Recipe) -> Sweep:
    """Return a sweep with all cells of a grid; nothing is written."""
    sweep = Sweep(folder, request, recipe)
    for settings in request.points():
        sweep.add_cell(settings)
    return sweep


def read_sweep(path: Path) -> Sweep:
    """Read a sweep from its folder; raises `UsageError` if it is none, or its `sweep.json` is damaged."""
    again = "start the sweep again, without --resume; the runs stay as they are"
    if (written := read_file(path / "sweep.json", _Written, fix=again)) is None:
        fix = f"name a folder of runs/NAME/{SWEEPS}/, or latest"
        raise UsageError(f"{path} is not a sweep: it has no sweep.json", fix)
    folder, request = Path(os.path.abspath(path)), written["request"]
    if not os.path.isdir(request.cwd):
        gone = f"{request.cwd}, the folder in which the sweep was started, does not exist"
        raise UsageError(gone, f"move it back, or {again}")
    return Sweep(folder, request, written["resolved"], written["cells"], written.get("job"))


def find_sweep(root: Path, name: str, recipe: str = "*") -> Sweep:
    """Return the sweep that is meant: a folder, or `latest`."""
    if name != "latest":
        return read_sweep(Path(name))
    known = sorted(root.glob(f"{recipe}/{SWEEPS}/*/sweep.json"), key=lambda path: path.parent.name)
    if not known:
        raise UsageError(
            f"no sweep is in {root.absolute()}",
            "start one with --grid, or say where runs are with --runs DIR",
        )
    return read_sweep(known[-1].parent)


def check_vllm_server(recipe: Recipe, parallel: int | None) -> None:
    """Raise `UsageError` for runs side by side that would send their weights to one vLLM server."""
    address = recipe.generation.vllm.address
    if recipe.generation.backend == "vllm" and address is not None and parallel != 1:
        raise UsageError(
            f"runs side by side cannot share the vLLM server at {address}: each sends it its weights",
            "--parallel 1, or remove the address, and each run starts its own",
        )


def plan_slots(
    request: SweepRequest, point: Settings, hardware: Hardware, parallel: int | None
) -> tuple[Hardware, list[dict[str, str]]]:
    """Return what one run sees of this machine, and the variables of each run that goes on beside others.

    `parallel` are the runs at a time; None is one for each GPU, or one on a CPU.
    """
    with contextlib.chdir(request.cwd):
        recipe = load_tree(Path(request.recipe), as_flags(request, point, request.seeds[0])).recipe
    if recipe is None or is_on_cpu(recipe.launch, hardware):
        count = parallel or 1
        if recipe is not None:
            check_vllm_server(recipe, count)
        threads = {"OMP_NUM_THREADS": str(max(hardware.cpus // count, 1))} if count > 1 else {}
        return hardware, [threads] * count
    processes, managed = recipe.launch.num_processes, recipe.generation.managed_gpus
    least = managed + (1 if processes == "auto" else processes)
    count = parallel or max(hardware.gpus // least, 1)
    check_vllm_server(recipe, count)
    if count > 1 and count * least > hardware.gpus:
        raise UsageError(
            f"--parallel {count}: each run takes {least} of the {hardware.gpus} GPUs",
            f"--parallel {max(hardware.gpus // least, 1)}",
        )
    width = (
        hardware.gpus // count if processes == "auto" and parallel else min(least, hardware.gpus)
    )
    shares = [hardware.devices[place * width : (place + 1) * width] for place in range(count)]
    seen = replace(hardware, gpus=width, names=shares[0])
    return seen, [hardware.select(share) for share in shares]
