"""What a recipe says about data and rewards, against the data and the rewards themselves.

Owns the comparison of columns, and of the first rows, with the templates and rewards that read them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_cli.data.columns import check_columns, extract_columns
from grpo_cli.data.preview import Preview, preview
from grpo_cli.data.prompts import Renderer, is_plain, template_columns
from grpo_cli.data.rows import Row
from grpo_cli.errors import Problem, ProblemsError, RewardError, nearest
from grpo_cli.recipe.dataset import DatasetConfig
from grpo_cli.recipe.explanation import explain, split_path, unknown_key
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import name_rewards
from grpo_cli.rewards.conditions import Condition
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams
from grpo_cli.rewards.registry import KINDS
from grpo_cli.templating import is_unreadable

_NAMES = {"training": "data", "evaluation": "evaluation data"}


def collect(check: Callable[[], object]) -> list[Problem]:
    """The problems that a check raises; none where it passes."""
    try:
        check()
    except ProblemsError as error:
        return error.problems
    return []


def check_rewards(loaded: LoadedRecipe, problems: list[Problem]) -> dict[int, RewardParams]:
    """Validates each reward's parameters against its kind; gives those that are right, by index."""
    node = loaded.tree.child("rewards")
    valid: dict[int, RewardParams] = {}
    entries = node.plain() if node is not None and isinstance(node.value, list) else []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            continue
        path = ("rewards", index)
        schema = KINDS.get(entry["kind"])
        if schema is None:
            problems.append(_unknown_kind(entry["kind"], index))
            continue
        own = {key: value for key, value in entry.items() if key not in RewardConfig.model_fields}
        try:
            valid[index] = schema.model_validate(own)
        except ValidationError as error:
            problems += [
                _name_reward_keys(problem, loaded, schema)
                for problem in explain(error, schema, loaded.tree, path)
            ]
            continue
        found = valid[index].problems()
        if loaded.recipe is not None:
            found += valid[index].conflicts(reward_context(loaded.recipe))
        problems += [
            Problem(message, fix, path=f"rewards.{index}.{name}") for name, message, fix in found
        ]
    problems += _check_names(loaded)
    return valid


def reward_context(recipe: Recipe, device: str = "cpu") -> RewardContext:
    """What rewards may know about a recipe."""
    return RewardContext(recipe.generation.max_completion_length, device)


def _check_names(loaded: LoadedRecipe) -> Iterator[Problem]:
    if loaded.recipe is None:
        return
    try:
        name_rewards(loaded.recipe.rewards)
    except RewardError as error:
        message, _, fix = str(error).partition(". Fix: ")
        yield Problem(message, fix, path="rewards")


def _unknown_kind(kind: str, index: int) -> Problem:
    close = nearest(kind, KINDS)
    fix = f"write `{close}`" if close else f"write one of {', '.join(KINDS)}"
    return Problem(f"there is no reward kind `{kind}`", fix, path=f"rewards.{index}.kind")


def _name_reward_keys(
    problem: Problem, loaded: LoadedRecipe, schema: type[RewardParams]
) -> Problem:
    """An unknown parameter may also be a misspelt key that every reward has."""
    if not problem.message.startswith("unknown key"):
        return problem
    steps = split_path(problem.path)
    valid = [*schema.model_fields, *RewardConfig.model_fields]
    return unknown_key(loaded.tree, steps, valid)


def check_data(
    loaded: LoadedRecipe, params: dict[int, RewardParams], problems: list[Problem]
) -> Preview | None:
    """Looks at the data, and compares its columns with what prompts and rewards want."""
    dataset = loaded.recipe.dataset if loaded.recipe else _dataset_alone(loaded)
    if dataset is None:
        return None
    seen = preview(dataset, loaded.recipe.seed if loaded.recipe else 0)
    problems += seen.problems
    if seen.columns is None:
        problems += _check_templates(dataset)
        problems += collect(lambda: check_columns(dataset.columns, None))
        problems += _check_conditions(loaded, None, _make_batch([], frozenset()))
    else:
        found, sample = _look_at_split(dataset, seen.columns, seen.sample, "training")
        problems += found
        available = seen.columns | set(dataset.columns) | {"prompt", "row_id"}
        problems += _check_reward_columns(params, available)
        batch = _make_batch(sample, available - {"prompt"})
        problems += _check_conditions(loaded, available, batch)
        problems += _check_golds(loaded, params, batch)
    if seen.eval_columns is not None:
        _check_evaluation_rows(loaded, dataset, seen, params, problems)
    return seen


def _check_evaluation_rows(
    loaded: LoadedRecipe,
    dataset: Any,
    seen: Preview,
    params: dict[int, RewardParams],
    problems: list[Problem],
) -> None:
    """Look at the evaluation rows, which may lack what the training rows have."""
    known = {problem.path for problem in problems}
    columns = seen.eval_columns or frozenset()
    found, sample = _look_at_split(dataset, columns, seen.eval_sample, "evaluation")
    # A column that only one split has is empty in the other.
    every = columns | (seen.columns or frozenset()) | set(dataset.columns) | {"row_id"}
    found += _check_golds(loaded, params, _make_batch(sample, every), "evaluation")
    problems += [problem for problem in found if problem.path not in known]


def _dataset_alone(loaded: LoadedRecipe) -> Any:
    """The dataset section of a recipe whose other parts are wrong."""
    node = loaded.tree.child("dataset")
    try:
        return TypeAdapter(DatasetConfig).validate_python(node.plain()) if node else None
    except ValidationError:
        return None


def _look_at_split(
    dataset: Any, columns: frozenset[str], sample: Sequence[Row], split: str
) -> tuple[list[Problem], list[Row]]:
    """Check columns and prompts of a split, and make its first rows with `row_id`, as training will."""
    bad_columns = collect(lambda: check_columns(dataset.columns, sorted(columns), split))
    problems = [*bad_columns, *_check_prompt(dataset, columns, split)]
    rows: list[Row] = []
    if not bad_columns:
        problems += collect(lambda: rows.extend(_make_rows(dataset, sample, split)))
    if not problems:
        problems += collect(partial(_try_prompts, dataset, rows, split))
    return problems, rows


def _make_rows(dataset: Any, sample: Sequence[Row], split: str) -> list[Row]:
    rows = extract_columns(sample, dataset.columns, split=split)
    return [{**row, "row_id": place} for place, row in enumerate(rows) if row is not None]


def _try_prompts(dataset: Any, rows: list[Row], split: str) -> None:
    """Fill the templates with the first rows.

    Raises:
        RecipeError: A template fails on a row.
    """
    renderer = Renderer(dataset.prompt, "text" if dataset.prompt.style == "text" else "chat")
    templates = [text for _, text in _templates(dataset)]
    named = frozenset().union(*map(template_columns, templates))
    # A template that only names columns fails on such values alone, and Jinja's import is slow.
    simple = dataset.prompt.user is not None and all(map(is_plain, templates))
    for row in rows:
        if not simple or any(is_unreadable(row.get(name, "")) for name in named):
            renderer.render(row, f"{split} row {row['row_id'] + 1}")


def _check_templates(dataset: Any) -> Iterator[Problem]:
    """Whether the templates can be read, where the columns they may name are not known."""
    for key, text in _templates(dataset):
        yield from collect(partial(template_columns, text, f"dataset.prompt.{key}"))


def _check_prompt(dataset: Any, columns: frozenset[str], split: str) -> Iterator[Problem]:
    known = columns | set(dataset.columns)
    for key, text in _templates(dataset):
        path = f"dataset.prompt.{key}"
        try:
            wanted = template_columns(text, path)
        except ProblemsError as error:
            yield from error.problems
            continue
        for name in sorted(wanted - known):
            yield _missing_column(name, known, path, "the template names", split)
    if dataset.prompt.user is None and "prompt" not in known:
        yield Problem(
            f"no `user` template is given and the {_NAMES[split]} has no column `prompt` "
            f"(columns: {_list(columns)})",
            'add `dataset.prompt.user`, such as `user: "{{ question }}"`',
            path="dataset.prompt",
        )


def _templates(dataset: Any) -> Iterator[tuple[str, str]]:
    for key in ("user", "system"):
        text = getattr(dataset.prompt, key)
        if text is not None:
            yield key, text


def _check_reward_columns(
    params: dict[int, RewardParams], available: frozenset[str]
) -> Iterator[Problem]:
    for index, reward in params.items():
        for name in reward.required_columns():
            if name not in available:
                path = f"rewards.{index}"
                yield _missing_column(
                    name, available - {"prompt", "row_id"}, path, "the reward needs"
                )


def _make_batch(rows: list[Row], columns: frozenset[str]) -> Batch:
    """The first rows as rewards will get them, with nothing answered yet."""
    empty = [""] * len(rows)
    named = {name: [row.get(name) for row in rows] for name in sorted(columns)}
    return Batch(empty, empty, columns=named)


def _check_conditions(
    loaded: LoadedRecipe, available: frozenset[str] | None, batch: Batch
) -> Iterator[Problem]:
    """Whether each `when` can be read, names columns that exist, and holds or not on the first rows."""
    for index, reward in enumerate(loaded.recipe.rewards if loaded.recipe else ()):
        if reward.when is None:
            continue
        path = f"rewards.{index}.when"
        condition = Condition(reward.when)
        try:
            unknown = condition.columns() - (available or condition.columns())
            if not unknown:
                _rows_it_holds_on(condition, batch)
        except RewardError as error:
            message, _, fix = str(error).partition(". Fix: ")
            problems = [Problem(message, fix, path=path)]
        else:
            known = available or frozenset()
            who = "the expression names"
            problems = [_missing_column(name, known, path, who) for name in sorted(unknown)]
        unnamable = condition.unnamable(available or ()) if problems else []
        yield from [_unnamable_column(name, path) for name in unnamable] or problems


def _unnamable_column(name: str, path: str) -> Problem:
    proper = re.sub(r"\W", "_", f"_{name}" if name[0].isdigit() else name)
    return Problem(
        f"an expression cannot name the column `{name}`: names are letters, digits and `_`",
        f"rename it under `dataset.columns` (`{proper}: {name}`), and write `{proper}` here",
        path=path,
    )


def _rows_it_holds_on(condition: Condition | None, batch: Batch) -> list[int]:
    """The rows a reward applies to; raises `RewardError` where its condition fails."""
    rows = range(len(batch.completions))
    return [row for row in rows if condition is None or condition.holds(batch, row)]


def _check_golds(
    loaded: LoadedRecipe,
    params: dict[int, RewardParams],
    batch: Batch,
    split: str = "training",
) -> Iterator[Problem]:
    """Whether rewards can read the golds, or tests, of the first rows they apply to."""
    for index, config in enumerate(loaded.recipe.rewards if loaded.recipe else ()):
        reward = params.get(index)
        source = reward.gold_source() if reward is not None else None
        if (
            reward is None
            or source is None
            or set(reward.required_columns()) - batch.columns.keys()
        ):
            continue
        try:
            rows = _rows_it_holds_on(Condition(config.when) if config.when else None, batch)
        except RewardError:
            continue  # `_check_conditions` tells
        found = [(row, reward.gold_fault(batch, row)) for row in rows]
        faults = [(batch.row_name(row), *fault) for row, fault in found if fault is not None]
        if faults:
            where, message, fix = faults[0]
            every = len(faults) == len(rows)
            rows_name = "rows" if split == "training" else f"{split} rows"
            count = f"all {len(rows)}" if every else f"{len(faults)} of the {len(rows)}"
            yield Problem(
                f"{message} ({where}; so it is in {count} {rows_name} looked at)",
                fix,
                path=f"rewards.{index}.{source[0]}",
                level="error" if every else "warning",
            )


def _missing_column(
    name: str, known: frozenset[str], path: str, who: str, split: str = "training"
) -> Problem:
    bare = name.strip("{} ")
    close = bare if bare in known else nearest(name, known)
    fix = f"use `{close}`, or " if close else ""
    return Problem(
        f"{who} the column `{name}`, which the {_NAMES[split]} lacks (columns: {_list(known)})",
        f"{fix}add it under `dataset.columns`, such as `{name}: {close or '<the column that holds it>'}`",
        path=path,
    )


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"
