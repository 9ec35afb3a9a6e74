"""Rows drawn from reasoning-gym's procedural tasks, whose checks do not import it (1.3 s)."""

import ast
import hashlib
import importlib.util
import io
import itertools
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path

from grpo_cli.data.rows import Row, suggest
from grpo_cli.errors import RecipeError, install_extra, recipe_error
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import ReasoningGymDataset

COLUMNS = frozenset({"question", "answer", "metadata"})
LEVEL = "level"
"""The column that rows of a dataset with levels have besides."""
CHUNK_ROWS = 512
"""Rows drawn from one seed. Constant: what is held out must not depend on how many are wanted."""
DRAWS_PER_ROW = 50
FEWEST_DRAWS = 1000
_REGISTRATION = re.compile(r"""^register_dataset\(\s*(["']?)(\w+)""", re.MULTILINE)


@lru_cache(maxsize=1)
def find_tasks() -> dict[str, Path]:
    """Return every task's name and the source file that registers it; empty without reasoning-gym."""
    return _read_tasks("*.py")


def _read_tasks(pattern: str) -> dict[str, Path]:
    spec = importlib.util.find_spec("reasoning_gym")
    folders = spec.submodule_search_locations if spec else None
    tasks = {}
    for folder in folders or ():
        for path in sorted(Path(folder).rglob(pattern)):
            source = path.read_text(encoding="utf-8")
            named = _REGISTRATION.search(source)
            if named and not named[1]:
                constant = rf"""^{named[2]}\s*=\s*(["'])(\w+)["']"""
                named = re.search(constant, source, re.MULTILINE)
            if named:
                tasks[named[2]] = path
    return tasks


def check_task(dataset: ReasoningGymDataset) -> None:
    """Check the task's name and the names of its parameters, without importing reasoning-gym.

    Raises `RecipeError` if reasoning-gym is not installed, or a name is unknown.
    """
    name = dataset.task
    # Most tasks' files bear their names: those come first.
    quick = _read_tasks(f"{name}.py") if name.isidentifier() else {}
    path = quick.get(name) or find_tasks().get(name)
    if path is None:
        tasks = find_tasks()
        if not tasks:
            fix = install_extra("reasoning-gym")
            seen = "reasoning-gym is not installed"
            raise recipe_error(seen, fix, "dataset.kind", package="reasoning-gym")
        message = f"`{dataset.task}` is not one of reasoning-gym's {len(tasks)} tasks"
        fix = suggest(dataset.task, tasks, f"choose one of {', '.join(sorted(tasks))}")
        raise recipe_error(message, fix, "dataset.task")
    places = {"dataset.params": dataset.params}
    places |= {f"dataset.levels.{place}": level for place, level in enumerate(dataset.levels)}
    problems, valid = [], read_parameters(path)
    for field, name in ((field, name) for field, params in places.items() for name in params):
        if name in ("seed", "size"):
            home = "`dataset.size`" if name == "size" else "`seed:` at the top of the recipe"
            seen, fix = f"`{name}` has its place elsewhere", f"set {home} instead"
            problems.append(Issue(seen, fix, f"{field}.{name}"))
        elif valid and name not in valid:
            fix = suggest(name, valid, f"choose one of {', '.join(sorted(valid))}")
            seen = f"`{dataset.task}` has no parameter `{name}`"
            problems.append(Issue(seen, fix, f"{field}.{name}"))
    if problems:
        raise RecipeError(problems)


@lru_cache(maxsize=8)
def read_parameters(path: Path) -> frozenset[str]:
    """Fields of the configuration class a task's file registers; empty where there is none."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = (node.value for node in tree.body if isinstance(node, ast.Expr))
    registrations = (
        call.args[2].id
        for call in calls
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "register_dataset"
        and isinstance(call.args[2], ast.Name)
    )
    registered = next(registrations, None)
    fields = {
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == registered
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return frozenset(fields - {"seed", "size"})


def draw_rows(
    dataset: ReasoningGymDataset, seed: int, limit: int | None = None
) -> tuple[list[Row], list[Row] | None]:
    """Draw rows to hold out, with distinct questions, then at most `limit` training rows that ask none of them.

    What is held out depends on `dataset.eval_seed` alone. Returns training rows and held-out rows, None if
    `eval_size` is 0.

    Raises `RecipeError` if the task refuses its parameters, or has too few distinct questions.
    """
    check_task(dataset)
    size = min(dataset.size, limit or dataset.size)
    parts = dataset.model_copy(update={"size": size}).by_level
    paths = [f"dataset.levels.{place}" for place in range(len(dataset.levels))] or [
        "dataset.params"
    ]
    seen: list[set[str]] = [set() for _ in parts]
    questions: set[str] = set()
    held, train = [], []
    with redirect_stdout(io.StringIO()):  # some tasks print dots, which would break --json
        for place, (part, own) in enumerate(zip(parts, seen, strict=True)):
            held.append(_hold_out(part, own, questions, paths[place]))
            questions.update(row["question"] for row in held[-1])
        # No level asks what another one holds out.
        for place, (part, own) in enumerate(zip(parts, seen, strict=True)):
            rows = _draw(part, seed, "train", part.size, own, paths[place])
            new = (row for row in rows if row["question"] not in questions)
            train.append(list(itertools.islice(new, part.size)))
            _check_enough(part, "size", len(train[-1]), part.size, own)
    if dataset.levels:
        held, train = _number(held), _number(train)
    return _interleave(train), _interleave(held) if dataset.eval_size else None


def _hold_out(part: ReasoningGymDataset, seen: set[str], others: set[str], path: str) -> list[Row]:
    """Return rows with distinct questions that no other level holds out."""
    held: dict[str, Row] = {}
    for row in _draw(part, part.eval_seed, "eval", part.eval_size, seen, path):
        if row["question"] not in others:
            held.setdefault(row["question"], row)
        if len(held) == part.eval_size:
            break
    _check_enough(part, "eval_size", len(held), part.eval_size, seen)
    return list(held.values())


def _number(levels: list[list[Row]]) -> list[list[Row]]:
    return [[{**row, LEVEL: level} for row in rows] for level, rows in enumerate(levels, start=1)]


def _interleave(levels: list[list[Row]]) -> list[Row]:
    """Return all rows so that the first ones are of all levels."""
    return [row for rows in itertools.zip_longest(*levels) for row in rows if row is not None]


def _draw(
    dataset: ReasoningGymDataset, seed: int, stream: str, wanted: int, seen: set[str], path: str
) -> Iterator[Row]:
    """Rows of one stream, up to the cap; notes every question in `seen`."""
    draws = max(wanted * DRAWS_PER_ROW, FEWEST_DRAWS) if wanted else 0
    for row in itertools.islice(_endless(dataset, f"{seed}:{stream}", path), draws):
        seen.add(row["question"])
        yield row


def _endless(dataset: ReasoningGymDataset, key: str, path: str) -> Iterator[Row]:
    """Row after row; tasks seed row `i` with `seed + i`, so chunks take seeds far apart."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import create_dataset

    try:
        params = dict(dataset.params)
        if dataset.task == "composite":
            params["datasets"] = [DatasetSpec(**part) for part in params.get("datasets", [])]
        for chunk in itertools.count():
            digest = hashlib.sha256(f"{key}:{chunk}".encode()).digest()
            seed = int.from_bytes(digest[:4]) >> 1
            task = create_dataset(dataset.task, seed=seed, size=CHUNK_ROWS, **params)
            for index in range(CHUNK_ROWS):
                item = task[index]
                yield {name: item[name] for name in ("question", "answer", "metadata")}
    except Exception as error:  # a task's own checks raise anything, assertions above all
        reason = str(error) or type(error).__name__
        message = f"`{dataset.task}` with {dataset.params or 'its defaults'} fails: {reason}"
        fix = "correct the parameters"
        raise recipe_error(message, fix, path) from error


def _check_enough(
    dataset: ReasoningGymDataset, field: str, found: int, wanted: int, seen: set[str]
) -> None:
    if found >= wanted:
        return
    message = (
        f"{wanted} rows are wanted and {found} were found: `{dataset.task}` with "
        f"{dataset.params or 'its defaults'} asks only {len(seen)} distinct questions, of which "
        f"{dataset.eval_size} are to be held out"
    )
    fix = "lower dataset.eval_size, or widen dataset.params so that more questions exist"
    raise recipe_error(message, fix, f"dataset.{field}")
