"""Checks of the data: columns, templates, conditions and gold answers on the first rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from grpo_cli.checks.context import SECTIONS, CheckContext, collect, kind_entries
from grpo_cli.checks.images import find_unused_images, look_at_images
from grpo_cli.checks.rows import (
    check_all_rows,
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
    count_missed,
    find_templates,
)
from grpo_cli.data.images import MARK, check_image_columns
from grpo_cli.data.preview import SAMPLE_ROWS, Preview, SplitPreview
from grpo_cli.data.prompts import Renderer, Style, is_conversation, is_plain, template_columns
from grpo_cli.data.rows import Row, RowNames, check_columns, place_issues
from grpo_cli.errors import ProblemsError, RewardError, nearest
from grpo_cli.issues import Issue, Level
from grpo_cli.recipe.dataset import IMAGES, SOURCE, MixtureDataset, SingleDataset
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import dotted
from grpo_cli.rewards.contract import EPISODE, Batch, Gold, RewardParams, gold_column
from grpo_cli.rewards.scoring import Condition
from grpo_cli.templating import is_unreadable

DATA = {"training": "data", "evaluation": "evaluation data"}
ADDED = frozenset({"prompt", "row_id"})
"""Columns that `grpo` adds to those of the data."""
_HOLDER = "<the column that holds it>"


def check_data(context: CheckContext) -> Iterator[Issue]:
    """Compare the data with what prompts, rewards and environments need."""
    loaded, dataset, parts = context.loaded, context.dataset, context.previews
    if not isinstance(dataset, MixtureDataset):
        for seen in parts:
            yield from _check_dataset(context, dataset, seen)
            yield from check_all_rows(loaded.recipe, dataset, seen)
        yield from count_missed(parts)
        return
    columns = [
        frozenset(source.columns).union(each.columns or ())
        for source, each in zip(dataset.sources, parts, strict=True)
    ]
    everywhere = frozenset().union(*columns)
    reported: set[tuple[str, str]] = set()
    for place, (source, each) in enumerate(zip(dataset.sources, parts, strict=True)):
        found = [
            *_check_dataset(context, source, each, everywhere),
            *check_source(loaded.recipe, source, each),
            *check_all_rows(loaded.recipe, source, each),
        ]
        # What is wrong with a tool, say, is the same for each source.
        news = [issue for issue in found if (issue.path, issue.seen) not in reported]
        reported |= {
            (issue.path, issue.seen) for issue in news if not issue.path.startswith("dataset")
        }
        yield from place_issues(news, place, source.name)
    yield from count_missed(parts)
    if context.preview is not None:
        # Those of the sources are reported.
        yield from context.preview.problems[sum(len(each.problems) for each in parts) :]


def _check_dataset(
    context: CheckContext,
    dataset: SingleDataset,
    seen: Preview,
    everywhere: frozenset[str] = frozenset(),
) -> list[Issue]:
    """Return the problems of a dataset; `everywhere` are the columns of all sources if it is one of several."""
    recipe = context.loaded.recipe
    configs = dict(enumerate(recipe.rewards if recipe else ()))
    rewards = {
        index: params
        for index, params in context.rewards.items()
        if index not in configs or configs[index].source in (None, dataset.source_name)
    }
    issues = [*seen.problems, *check_made_columns(dataset)]
    if seen.columns is None:
        for key, text in find_templates(dataset):
            with collect(issues):
                template_columns(text, f"dataset.prompt.{key}")
        with collect(issues):
            check_columns(dataset.columns, None)
        issues += _check_conditions(context, dataset, None, _make_batch([], frozenset()))
    else:
        issues += _check_training_rows(context, dataset, seen, rewards, everywhere)
    if seen.held is not None:
        paths = {issue.path for issue in issues}
        found = _check_held_out_rows(context, dataset, seen, rewards, everywhere)
        issues += [issue for issue in found if issue.path not in paths]
    return issues


def _check_training_rows(
    context: CheckContext,
    dataset: SingleDataset,
    seen: Preview,
    rewards: dict[int, RewardParams],
    everywhere: frozenset[str],
) -> list[Issue]:
    recipe, images, train = context.loaded.recipe, dataset.prompt.images, seen.train
    configs = dict(enumerate(recipe.rewards if recipe else ()))
    columns = seen.columns or frozenset()
    own = _available_columns(dataset, columns)
    available = own | everywhere
    names = train.names if train else RowNames("training")
    batch, issues = _check_split(dataset, columns, train, names, available)
    issues += check_files(dataset, seen, bool(issues or seen.problems))
    for index in list(rewards):
        # The rows that `when` leaves out need no column.
        is_narrow = index in configs and configs[index].when
        known = (available if is_narrow else own) | _added_by_episodes(recipe)
        kinds = {f"rewards.{index}": rewards[index]}
        if lacking := [*check_needed_columns(kinds, known, seen.sample)]:
            issues += lacking
            rewards = {other: params for other, params in rewards.items() if other != index}
    issues += check_needed_columns(context.kinds, available)
    issues += check_tasks(recipe, dataset, rewards, context.kinds)
    issues += _check_conditions(context, dataset, available, batch)
    issues += look_at_images(train.left_rows if train else {}, images, names)
    if recipe is not None and not images:
        issues += find_unused_images(recipe, seen.sample)
    golds = list(_check_golds(context, rewards, batch, "rows"))
    issues += [*check_shown_golds(dataset, rewards), *check_asked_place(dataset, rewards)]
    return [*issues, *(golds or check_empty(context.loaded, dataset, rewards, train))]


def _check_held_out_rows(
    context: CheckContext,
    dataset: SingleDataset,
    seen: Preview,
    rewards: dict[int, RewardParams],
    everywhere: frozenset[str],
) -> list[Issue]:
    held = seen.held
    if held is None:
        return []
    columns = seen.columns or frozenset()
    # A column that only one split has is empty in the other.
    available = _available_columns(dataset, held.columns | columns) | everywhere
    batch, issues = _check_split(dataset, held.columns, held, held.names, available)
    issues += look_at_images(held.left_rows, dataset.prompt.images, held.names)
    lacking = columns - held.columns
    issues += _check_golds(context, rewards, batch, "evaluation rows", lacking)
    return issues


def _available_columns(dataset: SingleDataset, columns: frozenset[str]) -> frozenset[str]:
    """Return the columns that rewards get of rows with `columns`: those with images are gathered in one."""
    made = frozenset(dataset.columns) | ADDED | ({SOURCE} if dataset.source_name else set())
    images = dataset.prompt.images
    return (columns | made).difference(images, (MARK, IMAGES)) | ({IMAGES} if images else set())


def _added_by_episodes(recipe: Recipe | None) -> frozenset[str]:
    """Return the columns that rewards get besides those of the data."""
    if recipe is None or not recipe.has_episodes:
        return frozenset()
    return frozenset({EPISODE, IMAGES} if recipe.has_images else {EPISODE})


def _check_split(
    dataset: Any,
    columns: frozenset[str],
    split: SplitPreview | None,
    names: RowNames,
    available: frozenset[str],
) -> tuple[Batch, list[Issue]]:
    """Check columns and prompts of a split; return its first rows as rewards will get them, unanswered."""
    rows: list[Row] = []
    found: list[Issue] = []
    sample = split.sample if split else ()
    with collect(found):
        check_columns(dataset.columns, sorted(columns), names.split)
    extracts = not found
    found += _check_prompt(dataset, columns, names.split, sample)
    known = columns | set(dataset.columns)
    with collect(found):
        check_image_columns(dataset.prompt.images, known, names.split)
    # Of reasoning-gym only the columns are known, and no row.
    if extracts and split:
        found += split.column_problems
        kept = islice(split.kept.items(), SAMPLE_ROWS)
        rows = [{**row, "row_id": place} for place, row in kept]
    if not found:
        with collect(found):
            _try_prompts(dataset, rows, names)
    issues = found or [
        *check_left_out(dataset, split.rows if split else (), rows, names),
        *check_texts_of_rows(dataset, rows, names.split),
    ]
    return _make_batch(rows, available - {"prompt"}), issues


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
    context: CheckContext, dataset: SingleDataset, available: frozenset[str] | None, batch: Batch
) -> Iterator[Issue]:
    """Check that each `when` can be read, names existing columns, and can be evaluated on the first rows."""
    known = available or frozenset()
    for path, when in _find_conditions(context.loaded, dataset) if context.loaded.recipe else ():
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
    for section in SECTIONS:
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
    context: CheckContext,
    params: dict[int, RewardParams],
    batch: Batch,
    rows_name: str,
    lacking: frozenset[str] = frozenset(),
) -> Iterator[Issue]:
    """Check that rewards can read the golds, or tests, of the first rows they apply to.

    `lacking` holds the columns that only the other split has.
    """
    for index, config in enumerate(context.loaded.recipe.rewards if context.loaded.recipe else ()):
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


def check_needed_columns(
    kinds: Mapping[str, Any], available: frozenset[str], rows: Sequence[Row] = ()
) -> Iterator[Issue]:
    """Find columns that rewards, tools or environments need and that are not there.

    Args:
        kinds: The parameters of each entry, by its path in the recipe.
        available: The columns that there are.
        rows: Of the data, whose mappings may hold what is missing.
    """
    inner = {
        key: f"{name}.{key}"
        for row in rows[:1]
        for name, value in row.items()
        for key in (value if isinstance(value, dict) else ())
    }
    for path, params in kinds.items():
        who = f"the {'reward' if path.startswith('rewards') else 'environment'} needs"
        needed: Sequence[str] = ()
        if isinstance(params, RewardParams):
            needed = params.columns().required
        elif not path.startswith("tools"):
            needed = params.required_columns()
        for name in needed:
            if name not in available:
                issue = missing_column(name, available - ADDED, path, who, inner=inner.get(name))
                if path.startswith("environment") and available - ADDED == {"seed"}:
                    # Nobody can add a column to `kind: environment`.
                    fix = f"give `{name}` a default in reset(), or draw it from the seed there"
                    issue = replace(issue, fix=fix)
                if params.kind == "reasoning_gym":
                    fix = "use `dataset: {kind: reasoning_gym}`, whose rows have it"
                    issue = replace(issue, fix=fix)
                if name in (MARK, IMAGES):
                    # TRL's names, which `dataset.columns` refuses.
                    seen = f"{who} `{name}`, and prompts have no images"
                    fix = "name the columns with images in `dataset.prompt.images`"
                    if IMAGES in available:
                        seen, fix = issue.seen, f"name the argument `{IMAGES}`"
                    issue = replace(issue, seen=seen, fix=fix)
                yield issue


def missing_column(
    name: str,
    known: frozenset[str],
    path: str,
    who: str,
    split: str = "training",
    inner: str | None = None,
) -> Issue:
    """Return the issue of a column that is missing.

    Args:
        name: The column.
        known: Those that there are.
        path: Where it is named in the recipe.
        who: What names it, with a verb: `the reward needs`.
        split: `training` or `evaluation`.
        inner: Where a mapping of the data has it, such as `reward_model.ground_truth`.
    """
    bare = name.strip("{} ")
    close = bare if bare in known else nearest(name, known)
    seen = (
        f"{who} the column `{name}`, which the {DATA[split]} lacks (columns: {list_columns(known)})"
    )
    # YAML drops white space around a text without quotes.
    holder = f'"{close}"' if close and close != close.strip() else close
    example = f"`{name}: {inner or holder or _HOLDER}`"
    fix = f"add it under `dataset.columns`, such as {example}"
    return Issue(seen, f"use `{close}`, or {fix}" if close else fix, path)


def list_columns(names: frozenset[str]) -> str:
    """Return the names as messages list them."""
    return ", ".join(sorted(names)) or "none"


def rename_fix(name: str, close: str | None, split: str) -> str:
    """Return the fix of a template that names a missing column."""
    if split == "evaluation":
        # The recipe's templates and columns are the training data's too.
        return f"rename the column that holds it to `{name}` in the {DATA[split]}"
    other = f"`{close}`" if close else "a column of the data"
    add = f"add it under `dataset.columns`, such as `{name}: {close or _HOLDER}`"
    return f"rename it to {other} in the template, or {add}"
