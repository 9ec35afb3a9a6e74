"""Data and rewards: their columns, templates, conditions and gold answers on the first rows."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from grpo_cli.checks.all_rows import check_all_rows, count_missed
from grpo_cli.checks.columns import (
    ADDED,
    DATA,
    check_needed_columns,
    list_columns,
    missing_column,
    rename_fix,
)
from grpo_cli.checks.images import find_unused_images, look_at_images
from grpo_cli.checks.rows import (
    check_asked_place,
    check_empty,
    check_files,
    check_fixed,
    check_left_out,
    check_made_columns,
    check_shown_golds,
    check_source,
    check_tasks,
    check_texts_of_rows,
    find_templates,
)
from grpo_cli.checks.settings import check_repeated
from grpo_cli.data.columns import check_columns
from grpo_cli.data.images import MARK, check_image_columns
from grpo_cli.data.mixing import SOURCE, place_issues
from grpo_cli.data.preview import SAMPLE_ROWS, Preview, SplitPreview, join_previews, preview
from grpo_cli.data.prompts import Renderer, Style, is_conversation, is_plain, template_columns
from grpo_cli.data.rows import Row, RowNames, suggest
from grpo_cli.errors import ProblemsError, RewardError, RunError, nearest
from grpo_cli.issues import Issue, Level
from grpo_cli.recipe.base import Section
from grpo_cli.recipe.dataset import IMAGES, DatasetConfig, MixtureDataset, SingleDataset
from grpo_cli.recipe.explanation import Path, dotted, explain, split_path, unknown_key
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import name_rewards
from grpo_cli.rewards.contract import EPISODE, Batch, Gold, RewardContext, RewardParams, gold_column
from grpo_cli.rewards.registry import find_kind, kind_names
from grpo_cli.rewards.scoring import Condition, clip_score
from grpo_cli.templating import is_unreadable


def collect(check: Callable[[], object]) -> list[Issue]:
    """Return the problems that a check raises; none if it passes."""
    try:
        check()
    except ProblemsError as error:
        return error.problems
    return []


# --- kinds -------------------------------------------------------------------------------------


class KindRegistry(NamedTuple):
    """The kinds that a section of the recipe may name."""

    noun: str
    """What messages call a kind."""
    common: type[Section]
    """The keys that entries of every kind have."""
    find: Callable[[str], Any]
    """Returns the parameters' class of a kind; None if there is none."""
    names: Callable[[], list[str]]


def kind_entries(loaded: LoadedRecipe, section: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the entries of a section that name their kind, each with its path: of a list, or a single one."""
    node = loaded.tree.child(section)
    if node is None:
        return
    listed = isinstance(node.value, list)
    for index, entry in enumerate(node.plain() if listed else [node.plain()]):
        if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
            yield (section, index) if listed else (section,), entry


def read_params(
    loaded: LoadedRecipe,
    at: Path,
    entry: dict[str, Any],
    registry: KindRegistry,
    problems: list[Issue],
) -> Any:
    """Return the parameters of an entry, validated by its kind; None, with problems, if they are wrong."""
    kind, path = entry["kind"], dotted(at)
    try:
        schema = registry.find(kind)
    except RunError as error:
        problems.append(error.as_issue(f"{path}.kind"))
        return None
    if schema is None:
        names = registry.names()
        fix = suggest(kind, names, f"write one of {', '.join(names)}")
        problems.append(Issue(f"there is no {registry.noun} `{kind}`", fix, f"{path}.kind"))
        return None
    common = registry.common.model_fields
    values = {key: each for key, each in entry.items() if key not in common}
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        found = explain(error, schema, loaded.tree, at)
        wrong = {split_path(problem.path)[len(at) :][:1] for problem in found}
        with suppress(ValidationError):
            # What it needs to be installed does not depend on them.
            rest = {key: each for key, each in values.items() if (key,) not in wrong}
            others = schema.model_validate(rest).problems()
            problems += [
                replace(issue, path=f"{path}.{issue.path}".rstrip("."))
                for issue in others
                if issue.package
            ]
        for problem in found:
            # An unknown parameter may also be a misspelt key that every entry has.
            unknown = problem.seen.startswith("unknown key")
            steps, keys = split_path(problem.path), [*schema.model_fields, *common]
            problems.append(unknown_key(loaded.tree, steps, keys) if unknown else problem)
        return None


# --- rewards -----------------------------------------------------------------------------------

_REWARDS = KindRegistry("reward kind", RewardConfig, find_kind, kind_names)


def check_rewards(loaded: LoadedRecipe, problems: list[Issue]) -> dict[int, RewardParams]:
    """Validate each reward's parameters against its kind; return those that are right, by index."""
    valid: dict[int, RewardParams] = {}
    context = None
    if loaded.recipe is not None:
        context = RewardContext(loaded.recipe.generation.max_completion_length)
    for at, entry in kind_entries(loaded, "rewards"):
        params = read_params(loaded, at, entry, _REWARDS, problems)
        if params is not None and len(at) == 2:
            valid[int(at[1])] = params
            found = params.problems(context)
            problems += [replace(issue, path=f"{dotted(at)}.{issue.path}") for issue in found]
    if loaded.recipe is not None:
        for index, config in enumerate(loaded.recipe.rewards):
            if index in valid:
                problems += _check_range(config, valid[index], f"rewards.{index}")
        problems += check_repeated(loaded.recipe.rewards, valid)
        try:
            name_rewards(loaded.recipe.rewards)
        except RewardError as error:
            issue = error.as_issue("rewards")
            problems += [issue] * all(each.seen != issue.seen for each in problems)
    return valid


def _check_range(config: RewardConfig, params: RewardParams, path: str) -> Iterator[Issue]:
    """Find rewards whose parameters or `clip` leave a single score."""
    low, high = params.details().range
    if clip_score(low, config.clip) == clip_score(high, config.clip):
        clip = f"with `clip: {list(config.clip)}` " if config.clip else ""
        yield Issue(
            f"{clip}every score is {clip_score(high, config.clip):g}, so the reward teaches nothing "
            f"(`{config.kind}` gives {low:g} to {high:g})",
            "choose bounds within that range, or remove `clip`"
            if clip
            else "correct its parameters",
            f"{path}.clip" if clip else path,
        )
    elif high <= 0 and config.weight < 0:
        yield Issue(
            f"`{config.kind}` gives {low:g} to {high:g}, so a negative weight rewards what it is a penalty for",
            f"write `weight: {-config.weight:g}`",
            f"{path}.weight",
            level="warning",
        )


# --- data --------------------------------------------------------------------------------------


def check_data(
    loaded: LoadedRecipe,
    params: dict[int, RewardParams],
    kinds: Mapping[str, Any],
    problems: list[Issue],
) -> Preview | None:
    """Look at the data, and compare its columns with what prompts, rewards and environments need.

    Args:
        loaded: The recipe.
        params: Of rewards, by index.
        kinds: Parameters of tools and environments, by path.
        problems: What is wrong is added to them.
    """
    dataset = loaded.recipe.dataset if loaded.recipe else _dataset_alone(loaded)
    if dataset is None:
        return None
    seed = loaded.recipe.seed if loaded.recipe else 0
    if not isinstance(dataset, MixtureDataset):
        seen = preview(dataset, seed)
        _check_seen(loaded, dataset, seen, params, kinds, problems)
        problems += [*check_all_rows(loaded.recipe, dataset, seen), *count_missed([seen])]
        return seen
    parts = [preview(source, seed) for source in dataset.sources]
    columns = [
        frozenset(source.columns).union(each.columns or ())
        for source, each in zip(dataset.sources, parts, strict=True)
    ]
    everywhere = frozenset().union(*columns)
    known: set[tuple[str, str]] = set()
    for place, (source, each) in enumerate(zip(dataset.sources, parts, strict=True)):
        found: list[Issue] = []
        _check_seen(loaded, source, each, params, kinds, found, everywhere)
        found += check_source(loaded.recipe, source, each)
        found += check_all_rows(loaded.recipe, source, each)
        # What is wrong with a tool, say, is the same for each source.
        news = [issue for issue in found if (issue.path, issue.seen) not in known]
        known |= {
            (issue.path, issue.seen) for issue in news if not issue.path.startswith("dataset")
        }
        problems += place_issues(news, place, source.name)
    problems += count_missed(parts)
    seen = join_previews(dataset, parts)
    # Those of the sources are told.
    problems += seen.problems[sum(len(each.problems) for each in parts) :]
    return seen


def _check_seen(
    loaded: LoadedRecipe,
    dataset: SingleDataset,
    seen: Preview,
    params: dict[int, RewardParams],
    kinds: Mapping[str, Any],
    problems: list[Issue],
    everywhere: frozenset[str] = frozenset(),
) -> None:
    """Check a dataset; `everywhere` are the columns of all sources if it is one of several."""
    problems += [*seen.problems, *check_made_columns(dataset)]
    images, rows = dataset.prompt.images, seen.sample
    gathered = frozenset({IMAGES} if images else ())
    own = frozenset(dataset.columns) | ADDED | ({SOURCE} if dataset.source_name else set())
    configs = dict(enumerate(loaded.recipe.rewards)) if loaded.recipe else {}
    params = {
        index: reward
        for index, reward in params.items()
        if index not in configs or configs[index].source in (None, dataset.source_name)
    }
    if seen.columns is None:
        for key, text in find_templates(dataset):
            problems += collect(partial(template_columns, text, f"dataset.prompt.{key}"))
        problems += collect(lambda: check_columns(dataset.columns, None))
        problems += _check_conditions(loaded, dataset, None, _make_batch([], frozenset()))
    else:
        available = (seen.columns | own).difference(images, (MARK, IMAGES)) | gathered
        names = seen.train.names if seen.train else RowNames("training")
        batch = _check_split(
            dataset, seen.columns, seen.train, names, available | everywhere, problems
        )
        problems += check_files(dataset, seen, bool(problems))
        added = _added_by_episodes(loaded.recipe)
        for index, reward in list(params.items()):
            # The rows that `when` leaves out need no column.
            more = everywhere if index in configs and configs[index].when else frozenset[str]()
            known = available | more | added
            if lacking := [*check_needed_columns({f"rewards.{index}": reward}, known, rows)]:
                problems += lacking
                del params[index]
        problems += check_needed_columns(kinds, available | everywhere)
        problems += check_tasks(loaded.recipe, dataset, params, kinds)
        problems += _check_conditions(loaded, dataset, available | everywhere, batch)
        problems += look_at_images(seen.train.left_rows if seen.train else {}, images, names)
        if loaded.recipe is not None and not images:
            problems += find_unused_images(loaded.recipe, seen.sample)
        golds = list(_check_golds(loaded, params, batch, "rows"))
        problems += [*check_shown_golds(dataset, params), *check_asked_place(dataset, params)]
        problems += golds or check_empty(loaded, dataset, params, seen.train)
    if (held := seen.held) is not None:
        # A column that only one split has is empty in the other.
        available = held.columns | (seen.columns or frozenset()) | own | everywhere
        available = available.difference(images) | gathered
        found: list[Issue] = []
        batch = _check_split(dataset, held.columns, held, held.names, available, found)
        found += look_at_images(held.left_rows, images, held.names)
        lacking_columns = (seen.columns or frozenset()) - held.columns
        found += _check_golds(loaded, params, batch, "evaluation rows", lacking_columns)
        known_paths = {problem.path for problem in problems}
        problems += [problem for problem in found if problem.path not in known_paths]


def _added_by_episodes(recipe: Recipe | None) -> frozenset[str]:
    """Return the columns that rewards get besides those of the data."""
    if recipe is None or not recipe.has_episodes:
        return frozenset()
    return frozenset({EPISODE, IMAGES} if recipe.has_images else {EPISODE})


def _dataset_alone(loaded: LoadedRecipe) -> Any:
    node = loaded.tree.child("dataset")
    try:
        return TypeAdapter(DatasetConfig).validate_python(node.plain()) if node else None
    except ValidationError:
        return None


def _check_split(
    dataset: Any,
    columns: frozenset[str],
    split: SplitPreview | None,
    names: RowNames,
    available: frozenset[str],
    problems: list[Issue],
) -> Batch:
    """Check columns and prompts of a split; return its first rows as rewards will get them, unanswered."""
    rows: list[Row] = []
    sample = split.sample if split else ()
    found = collect(lambda: check_columns(dataset.columns, sorted(columns), names.split))
    extracts = not found
    found += _check_prompt(dataset, columns, names.split, sample)
    known = columns | set(dataset.columns)
    found += collect(partial(check_image_columns, dataset.prompt.images, known, names.split))
    # Of reasoning-gym only the columns are known, and no row.
    if extracts and split:
        found += split.column_problems
        kept = islice(split.kept.items(), SAMPLE_ROWS)
        rows = [{**row, "row_id": place} for place, row in kept]
    found = found or collect(partial(_try_prompts, dataset, rows, names))
    problems += found or [
        *check_left_out(dataset, split.rows if split else (), rows, names),
        *check_texts_of_rows(dataset, rows, names.split),
    ]
    return _make_batch(rows, available - {"prompt"})


def _make_batch(rows: list[Row], columns: frozenset[str]) -> Batch:
    named = {name: [row.get(name) for row in rows] for name in sorted(columns)}
    return Batch([""] * len(rows), [""] * len(rows), columns=named)


def _try_prompts(dataset: Any, rows: list[Row], names: RowNames) -> None:
    """Fill the templates with the first rows.

    Raises:
        RecipeError: A template fails on a row.
    """
    has_images = bool(dataset.prompt.images)
    style: Style = "text" if dataset.prompt.style == "text" else "chat"
    renderer = Renderer(dataset.prompt, style, in_parts=has_images)
    templates = [text for _, text in find_templates(dataset)]
    named = frozenset().union(*map(template_columns, templates))
    # A template that only names columns fails on such values alone, and Jinja's import is slow.
    simple = dataset.prompt.user is not None and all(map(is_plain, templates)) and not has_images
    for row in rows:
        if not simple or any(is_unreadable(row.get(name, "")) for name in named):
            renderer.render(row, names(row["row_id"]))


def _check_prompt(
    dataset: Any, columns: frozenset[str], split: str, sample: Sequence[Row]
) -> Iterator[Issue]:
    known = columns | set(dataset.columns) | ({SOURCE} if dataset.source_name else set())
    for key, text in find_templates(dataset):
        path = f"dataset.prompt.{key}"
        marks = {MARK} if dataset.prompt.images else set()
        try:
            missing = template_columns(text, path) - known - (marks if key == "user" else set())
        except ProblemsError as error:
            yield from error.problems
            continue
        for name in sorted(missing):
            issue = missing_column(name, known, path, "the template names", split)
            fix = rename_fix(name, nearest(name, known), split)
            fix = "images go into `dataset.prompt.user`" if name in marks else fix
            yield replace(issue, fix=fix)
        # A prompt may well be the same for all rows, as with an environment.
        if key == "user" and any(f"{{{name}}}" in text for name in known):
            yield from check_fixed([text], known, path)
        for name in sorted(template_columns(text).intersection(dataset.prompt.images) - {MARK}):
            seen = f"`{{{{ {name} }}}}` writes where the image is stored into the prompt, not the image"
            yield Issue(seen, "write `{{ image }}` where it goes", path, level="warning")
    if response := getattr(dataset, "response", None):
        yield from check_fixed([response], known, "dataset.response")
    if dataset.prompt.user is None and "prompt" not in known:
        seen = f"no `user` template is given and the {DATA[split]} has no column `prompt` "
        fix = 'add `dataset.prompt.user`, such as `user: "{{ question }}"`'
        messages = [
            name for name in sorted(columns) if sample and is_conversation(sample[0].get(name))
        ]
        if messages:
            fix = f"write `columns: {{prompt: {messages[0]}}}`: its messages become the prompt"
        yield Issue(f"{seen}(columns: {list_columns(columns)})", fix, "dataset.prompt")


def _check_conditions(
    loaded: LoadedRecipe, dataset: SingleDataset, available: frozenset[str] | None, batch: Batch
) -> Iterator[Issue]:
    """Check that each `when` can be read, names existing columns, and can be evaluated on the first rows."""
    known = available or frozenset()
    for path, when in _find_conditions(loaded, dataset) if loaded.recipe else ():
        condition = Condition(when)
        problems: list[Issue] = []
        try:
            unknown = condition.columns() - known if available else frozenset()
            who = "the expression names"
            problems = [missing_column(name, known, path, who) for name in sorted(unknown)]
            for place, name in enumerate(sorted(unknown)):
                if re.search(rf"[=!]=\s*{name}\b", when):
                    fix = f'if `{name}` is a value, put it in quotes: "{name}"; otherwise {problems[place].fix}'
                    problems[place] = replace(problems[place], fix=fix)
            if not problems:
                _applying(condition, batch)
        except RewardError as error:
            problems = [error.as_issue(path)]
        yield from problems


def _find_conditions(loaded: LoadedRecipe, dataset: SingleDataset) -> Iterator[tuple[str, str]]:
    """Yield each `when` of rewards, tools and environments with its path; not of other sources' rewards."""
    for section in ("rewards", "tools", "environment"):
        for at, entry in kind_entries(loaded, section):
            own = entry.get("source") in (None, dataset.source_name)
            if own and isinstance(when := entry.get("when"), str):
                yield f"{dotted(at)}.when", when


def _applying(condition: Condition | None, batch: Batch) -> list[int]:
    """Return the rows a reward applies to.

    Raises:
        RewardError: Its condition fails.
    """
    rows = range(len(batch.completions))
    return [row for row in rows if condition is None or condition.holds(batch, row)]


def _check_golds(
    loaded: LoadedRecipe,
    params: dict[int, RewardParams],
    batch: Batch,
    rows_name: str,
    lacking: frozenset[str] = frozenset(),
) -> Iterator[Issue]:
    """Check that rewards can read the golds, or tests, of the first rows they apply to.

    `lacking` holds the columns that only the other split has.
    """
    for index, config in enumerate(loaded.recipe.rewards if loaded.recipe else ()):
        reward = params.get(index)
        if reward is None or set(reward.columns().required) - batch.columns.keys():
            continue
        try:
            rows = _applying(Condition(config.condition) if config.condition else None, batch)
        except RewardError:
            continue  # `_check_conditions` tells
        golds = {row: reward.gold(batch, row) for row in rows}
        issues = {row: g.issue if isinstance(g, Gold) else g for row, g in golds.items()}
        faults = {row: issue for row, issue in issues.items() if issue}
        key, column = gold_column(reward)
        if faults and column in lacking:
            own = frozenset(name for name in batch.columns if name not in lacking | ADDED)
            seen = (
                f"the evaluation data lacks the column `{column}`, which the training data has and the reward "
                f"needs (columns: {list_columns(own)})"
            )
            fix = rename_fix(column, None, "evaluation")
            yield Issue(seen, fix, f"rewards.{index}.{key}")
        elif faults:
            row, fault = next(iter(faults.items()))
            every = len(faults) == len(rows)
            count = f"all {len(rows)}" if every else f"{len(faults)} of the {len(rows)}"
            where = f"{batch.row_name(row)}; so it is in {count} {rows_name} looked at"
            # A gold that can be read after all is right if it is written alike.
            level: Level = fault.level if not every or isinstance(golds[row], Gold) else "error"
            path, seen = f"rewards.{index}.{fault.path}", f"{fault.seen} ({where})"
            yield replace(fault, seen=seen, path=path, level=level)
