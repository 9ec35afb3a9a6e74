"""Checks of rows and their files: of the first rows, and of all."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from os.path import basename
from typing import Any

from grpo_cli.data.files import WHOLE_ROWS, RowFile, iterate_lines, iterate_rows, parse_line
from grpo_cli.data.mixing import SOURCE
from grpo_cli.data.preview import Preview, SplitPreview
from grpo_cli.data.prompts import SYSTEM, SYSTEM_ROLES, is_plain, template_columns
from grpo_cli.data.rows import (
    Row,
    RowNames,
    canonical_json,
    check_dropped,
    count_dropped,
    read_column,
    show_names,
)
from grpo_cli.data.tasks import LEVEL
from grpo_cli.errors import RecipeError, RewardError
from grpo_cli.issues import Issue, Level
from grpo_cli.recipe.dataset import HubDataset, ReasoningGymDataset, ScoredDataset, SingleDataset
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.contract import Batch, RewardParams, gold_column
from grpo_cli.rewards.scoring import Condition

_ASKED = {"boxed": "\\boxed", "hashes": "####", "answer_tag": "<answer>"}
"""How a prompt asks for an answer in each place that `extract` names."""
_MARK = re.compile(r"#+|\w+:")
"""The beginning of a pattern that is no part of an answer."""
_SENTENCE = re.compile(r"\n|(\S+\s+){5}")
"""What the name of a column hardly ever holds."""
_LOOP = re.compile(r"\{%-?\s*for\s[^%]*?\sin\s+(\w+)\s*-?%}")
_SPOILT = (
    (
        re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>"),
        0.5,
        "marks of a chat template, which is applied to it once more",
        "set `dataset.prompt.style: text`, or take a column without them",
    ),
    (
        re.compile(r"\A[^\n]*\\n(?![a-z])[^\n]*\Z"),
        0.9,
        "a backslash and an n for each line break",
        "write the data with one level of escapes",
    ),
)
"""What spoils a text on its way; the share of rows from which on it is no chance; what is said, and the fix."""
_SKIP_EMPTY = {"code", "judge"}
"""Kinds for which a row with an empty column is not a fault."""
_MOST_ROWS = 200_000
"""Rows of other files that are read whole for empty values."""


def find_templates(dataset: Any) -> list[tuple[str, str]]:
    """Return the templates of a dataset's prompts by their keys."""
    keyed = [(key, getattr(dataset.prompt, key)) for key in ("user", "system")]
    return [(key, text) for key, text in keyed if text is not None]


def check_files(dataset: SingleDataset, seen: Preview, is_wrong: bool) -> Iterator[Issue]:
    """Find files without what the templates name, and tables whose first row was taken for their header."""
    files = seen.train.by_file if seen.train else {}
    templates = [text for _, text in find_templates(dataset) if is_plain(text)]
    needed = frozenset().union(*map(template_columns, templates)) - dataset.columns.keys()
    for place, (file, columns) in enumerate(files.items()):
        path, file = f"dataset.train.{place}" if len(files) > 1 else "dataset.train", basename(file)
        if is_wrong and ".csv" in file and any(map(_SENTENCE.search, columns)):
            shown = next(filter(_SENTENCE.search, sorted(columns)))
            seen_names = (
                f"the first line of {file} is taken for the names of the columns: {shown!r:.60}"
            )
            yield Issue(seen_names, "put a line of names first, such as `question,answer`", path)
        elif lacking := sorted(needed & (seen.columns or needed) - columns):
            seen_names = f"{file} has no column `{lacking[0]}`, which another file has and the template names"
            known = show_names(sorted(columns))
            yield Issue(
                f"{seen_names} (columns: {known})", f"rename it to `{lacking[0]}` there", path
            )


def check_left_out(
    dataset: Any, sample: Sequence[Row], rows: Sequence[Row], names: RowNames
) -> Iterator[Issue]:
    """Find patterns that keep what marks the answer, and a system message that rows override."""
    for key, column in dataset.columns.items():
        mark = _MARK.match(column.regex or "")
        if mark and rows and not re.compile(column.regex).groups:
            seen = (
                f"has no group, so {mark[0]!r} stays in every value, such as {rows[0][key]!r:.40}"
            )
            fix = f"put what is wanted in brackets: '{mark[0]}\\s*(.+)$'"
            yield Issue(seen, fix, f"dataset.columns.{key}.regex", level="warning")
        texts = [str(read_column(sample[row["row_id"]], column.from_)) for row in rows]
        if column.regex is not None and (found := _find_cut(column.regex, texts)):
            yield Issue(*found, f"dataset.columns.{key}.regex", level="warning")
    if dataset.prompt.system is not None and dataset.prompt.user is None:
        prompts = [row["prompt"] for row in rows if isinstance(row.get("prompt"), list)]
        own = sum(each[0]["role"] in SYSTEM_ROLES for each in prompts)
        if own:
            seen = f"has no effect on {own} of the first {len(rows)} {names.split} rows: they have their own"
            yield Issue(seen, "remove it, or those of the rows", SYSTEM, level="warning")


def _find_cut(regex: str, texts: Sequence[str]) -> tuple[str, str] | None:
    """Find a pattern that takes the mark of an answer, or a part of a number or of a pair of braces."""
    pattern = re.compile(regex)
    matches = [match for match in map(pattern.search, texts) if match]
    if pattern.groups > 1:
        first, second = ({str(match[group]) for match in matches} for group in (1, 2))
        if len(second) > 1 and (len(first) == 1 or all(map(_MARK.fullmatch, first))):
            seen = f"takes the first of its {pattern.groups} groups, which is {min(first)!r:.40}"
            return seen, "write (?:…) for a group that is not wanted"
    group = min(pattern.groups, 1)
    for taken, left, fix in (
        (r".*\d", r"[.,]?\d+", r"let it take the whole number, such as ([\d.,]+)"),
        (r"[^}]*\{[^}]*", r"\s*\}", "let it go on to the last brace: write `.+` for `.+?`"),
        (r"[-\d.,$%/]+", r".*(?s:.)*?(####\s*\S.*)", "take what follows the mark: '#### (.+)$'"),
    ):
        cut = [
            (match[group], rest[rest.re.groups])
            for match in matches
            if re.fullmatch(taken, match[group] or "", re.DOTALL)
            and (rest := re.compile(left).match(match.string, match.end(group)))
        ]
        if len(cut) > len(matches) / 10:
            seen = f"takes {cut[0][0]!r:.40} and leaves {cut[0][1]!r:.40} behind it"
            return f"{seen}, in {len(cut)} of the {len(texts)} rows looked at", fix
    return None


def check_empty(
    loaded: LoadedRecipe,
    dataset: SingleDataset,
    params: dict[int, RewardParams],
    train: SplitPreview | None,
) -> Iterator[Issue]:
    """Find rows without a value in a column that a reward needs."""
    if train is None or loaded.recipe is None:
        return
    for index, config in enumerate(loaded.recipe.rewards):
        # A Python function may well take empty values, and a condition may leave such rows out.
        if index not in params or config.kind == "python" or config.when:
            continue
        for name in params[index].columns().required:
            column = dataset.columns.get(name)
            key = column.from_ if column else name
            is_there = key.partition(".")[0] in train.columns
            known = train.kept.items() if is_there else ()
            places = [place for place, row in known if read_column(row, name) in ("", None)]
            # A pattern finds nothing in an empty value: such a row is dropped, or refused.
            later = later_rows(train, key) if not (column and column.regex) else ()
            places += [place for place, row in later if read_column(row, key) in ("", None)]
            count = train.left
            every = len(places) == count
            if places and (every or config.kind not in _SKIP_EMPTY):
                seen = (
                    f"the reward needs the column `{name}`, which is empty in {len(places)} of "
                    f"{count} rows; the first is {train.names(places[0])}"
                )
                fix = f"fill it, drop these rows, or leave them out of this reward with `when: {name}`"
                level: Level = "error" if every else "warning"
                yield Issue(seen, fix, f"rewards.{index}", level=level)


def check_shown_golds(dataset: SingleDataset, params: dict[int, RewardParams]) -> Iterator[Issue]:
    """Find prompts that hold the answer they ask for."""
    for key, text in find_templates(dataset):
        named = template_columns(text) if is_plain(text) else frozenset[str]()
        for reward in params.values():
            column = gold_column(reward)[1]
            origin = dataset.columns[column].from_ if column in dataset.columns else column
            copies = {name for name in named if _copied_from(dataset, name) == origin}
            if shown := sorted(named & {column}) or sorted(copies):
                name, is_copy = shown[0], shown[0] not in (column, origin)
                seen = (
                    f"shows the model the column `{name}`, which holds the gold of `{reward.kind}`"
                )
                fix = f"remove `{{{{ {name} }}}}`, unless answers are to repeat it"
                if is_copy:
                    seen = f"{seen}: it is a copy of `{origin}`"
                    fix = f"remove `dataset.columns.{name}`, or name another column there"
                yield Issue(seen, fix, f"dataset.prompt.{key}", level="warning")
                break


def check_asked_place(dataset: SingleDataset, params: dict[int, RewardParams]) -> Iterator[Issue]:
    """Find rewards that read answers only from other places than the prompt asks for."""
    text = "\n".join(text for _, text in find_templates(dataset))
    asked = [place for place, mark in _ASKED.items() if mark in text]
    for index, reward in params.items():
        places = getattr(reward, "extract", ())
        if asked and places and {*places} <= _ASKED.keys() and {*asked}.isdisjoint(places):
            marks = ", ".join(_ASKED[place] for place in asked)
            seen = f"reads answers from {', '.join(places)} alone, and the prompt asks for {marks}"
            fix = f"write `extract: [{', '.join((*asked, *places))}]`, or correct the prompt"
            yield Issue(seen, fix, f"rewards.{index}.extract", level="warning")


def _copied_from(dataset: SingleDataset, name: str) -> str:
    """Return the column of the data that a column is a copy of."""
    column = dataset.columns.get(name)
    return name if column is None or column.regex else column.from_


def check_texts_of_rows(dataset: Any, rows: Sequence[Row], split: str) -> Iterator[Issue]:
    """Find texts that something has spoilt on their way, and loops over text instead of a list."""
    templates = [text for _, text in find_templates(dataset) if is_plain(text)]
    named = {"prompt"} if dataset.prompt.user is None else set[str]()
    for name in sorted(named.union(*map(template_columns, templates))):
        texts = [value for value in _values(rows, name) if isinstance(value, str)]
        for pattern, share, seen, fix in _SPOILT:
            found = [match for text in texts if (match := pattern.search(text))]
            if len(found) > len(texts) * share and (
                dataset.prompt.style != "text" or "<" not in found[0][0]
            ):
                seen = (
                    f"`{name}` has {seen}, such as {found[0][0]!r:.40}, in {len(found)} of the {len(texts)} "
                    f"{split} rows looked at"
                )
                yield Issue(seen, fix, "dataset.prompt", level="warning")
    for key, text in find_templates(dataset):
        for name in _LOOP.findall(text):
            letters = [value for value in _values(rows, name) if isinstance(value, str)]
            if letters:
                seen = f"goes through the letters of `{name}`, which is text: {letters[0]!r:.40}"
                fix = f"make it a list in the data, or write `{{{{ {name} }}}}`"
                yield Issue(seen, fix, f"dataset.prompt.{key}", level="warning")


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    return [row[name] for row in rows if row.get(name) is not None]


def check_fixed(texts: Sequence[str], columns: frozenset[str], path: str) -> Iterator[Issue]:
    """Find templates that are the same text for all rows."""
    if texts and not any("{{" in text or "{%" in text for text in texts):
        bare = re.sub(r"[{}$]", "", texts[0]).strip()
        named = [name for name in sorted(columns) if f"{{{name}}}" in texts[0]]
        name = bare if bare in columns else [*named, "answer"][0]
        seen = f"names no column, so it is the text {texts[0]!r:.40} for all rows"
        yield Issue(seen, f"write `{{{{ {name} }}}}`, say", path, level="warning")


def check_made_columns(dataset: SingleDataset) -> Iterator[Issue]:
    """Find columns of the recipe that what `grpo` makes would replace."""
    made = {SOURCE} if dataset.source_name else set[str]()
    made |= {LEVEL} if getattr(dataset, "levels", ()) else set()
    for name in sorted(made & dataset.columns.keys()):
        seen = f"`{name}` is a column that `grpo` makes itself"
        yield Issue(seen, f"call it `own_{name}`, say", f"dataset.columns.{name}")


def check_source(recipe: Recipe | None, source: SingleDataset, seen: Preview) -> Iterator[Issue]:
    """Find rows that no reward scores, and a column of theirs that the source's name replaces."""
    rewards = recipe.rewards if recipe else ()
    if rewards and all(each.source not in (None, source.source_name) for each in rewards):
        fix = "give it `rewards`, or add one to the recipe's `rewards`, which score the rows of all sources"
        yield Issue("has no reward", fix, "dataset")
    if SOURCE in (seen.columns or ()) and all(
        each.from_ != SOURCE for each in source.columns.values()
    ):
        text = f"its rows have a column `{SOURCE}`, which the name of the source replaces"
        fix = f"to keep it, give it another name: `columns: {{origin: {SOURCE}}}`"
        yield Issue(text, fix, "dataset", level="warning")


def check_tasks(
    recipe: Recipe | None,
    dataset: SingleDataset,
    rewards: Mapping[int, RewardParams],
    kinds: Mapping[str, Any],
) -> Iterator[Issue]:
    """Find rewards and environments that score rows of reasoning-gym as another task does."""
    own = dataset.task if isinstance(dataset, ReasoningGymDataset) else None
    configs = recipe.rewards if recipe and own else ()
    # A `when` may leave these rows out.
    whole = {at for at, config in enumerate(configs) if not config.when}
    scorers = {f"rewards.{at}": each for at, each in rewards.items() if at in whole}
    for path, params in {**scorers, **kinds}.items():
        task = getattr(params, "task", None) if params.kind == "reasoning_gym" else None
        if own and task not in (None, own):
            seen = f"scores answers as {task} does, and the rows are of {own}"
            fix = "remove it: each row names its task"
            yield Issue(seen, fix, f"{path}.task", level="warning")


def check_all_rows(recipe: Recipe | None, dataset: SingleDataset, seen: Preview) -> Iterator[Issue]:
    """Find rows that no reward applies to, or that are trained on and held out."""
    if seen.train is not None:
        yield from _check_unrewarded(recipe, dataset, seen.train)
    yield from check_shared(recipe, dataset, seen)


def count_missed(previews: Sequence[Preview]) -> Iterator[Issue]:
    """Count the rows that patterns drop, of all sources together; of long files, in the first rows."""
    splits = [each for seen in previews for each in (seen.train, seen.held) if each]
    splits.sort(key=lambda each: each.names.split, reverse=True)
    missed = [(place, each) for each in splits for place in each.dropped[:1]]
    if not missed:
        return
    place, split = missed[0]
    keys = (key for key, each in split.dataset.columns.items() if each.on_no_match == "drop")
    where = "dataset"
    if split.dataset.source_name:
        at = next(
            at for at, seen in enumerate(previews) if split is seen.train or split is seen.held
        )
        where = f"dataset.sources.{at}"
    counts = count_dropped((each.names.split, each.counts) for each in splits)
    for issue in check_dropped(counts, f"{where}.columns.{next(keys)}.regex", split.names(place)):
        seen = issue.seen
        if not all(len(each.rows) == each.count for each in splits):
            seen += ", by the first rows"
        if any(each.dataset.max_prompt_length for each in splits):
            # Lengths need the tokenizer.
            seen += "; `grpo probe` counts those longer than `max_prompt_length`"
        yield replace(issue, seen=seen)


def _check_unrewarded(
    recipe: Recipe | None, dataset: SingleDataset, split: SplitPreview
) -> Iterator[Issue]:
    """Find rows that no reward and no environment applies to."""
    kept = split.kept
    if recipe is None or not recipe.rewards or not kept:
        return
    sections = (*recipe.rewards, *recipe.environment)
    own = [
        each for each in sections if getattr(each, "source", None) in (None, dataset.source_name)
    ]
    texts = [text for each in own if (text := getattr(each, "when", None))]
    if len(texts) < len(own):
        return
    rows = range(len(kept))
    columns = {name: [row.get(name) for row in kept.values()] for name in next(iter(kept.values()))}
    batch = Batch([""] * len(kept), [""] * len(kept), columns=columns)
    conditions = [Condition(text) for text in texts]
    try:
        bare = [row for row in rows if not any(each.holds(batch, row) for each in conditions)]
    except RewardError:
        return  # reported by the check of conditions
    if bare:
        first = split.names([*kept][bare[0]])
        seen = f"no reward applies to {len(bare):,} of the {len(kept):,} rows looked at, which teach nothing; "
        fix = "widen a `when`, add a reward without one, or leave these rows out"
        yield Issue(f"{seen}the first is {first}", fix, "rewards", level="warning")


def check_shared(recipe: Recipe | None, dataset: SingleDataset, seen: Preview) -> Iterator[Issue]:
    """Find evaluation rows that are training rows too, by what they ask."""
    if isinstance(dataset, HubDataset) and dataset.eval_split == dataset.split:
        fix = "name another split, or remove it and set `eval_fraction: 0.05`"
        text = (
            f"`{dataset.split}` is what is trained on, too; a gain on it shows memory, not learning"
        )
        yield Issue(text, fix, "dataset.eval_split")
    # Of scored data other responses to the same prompts may be held out.
    if seen.train is None or seen.held is None or isinstance(dataset, ScoredDataset):
        return
    names = () if recipe is None or recipe.environment else _asked_columns(dataset)
    columns = seen.train.columns & seen.held.columns
    if any(name not in columns and name.partition(".")[0] not in columns for name in names):
        return  # Without what it names, no prompt can be compared.
    held = {at: _identify(row, names) for at, row in islice(_left_rows(seen.held), WHOLE_ROWS)}
    shared = {*held.values()} & {_identify(row, names) for _, row in _left_rows(seen.train)}
    if len(seen.train.rows) < seen.train.count and _is_long(seen.train):
        known = {line.strip() for line in islice(_lines(seen.held), WHOLE_ROWS)}
        both = {each for line in _lines(seen.train) if (each := line.strip()) in known}
        shared |= {_identify(row, names) for each in both if (row := parse_line(each)) is not None}
    places = [place for place, key in held.items() if key in shared]
    if places:
        every = len(places) == len(held)
        of_all = f"all {len(held):,}" if every else f"{len(places):,} of {len(held):,}"
        text = (
            f"{of_all} evaluation rows ask what training rows ask, word for word; the first is "
            f"{seen.held.names(places[0])}. A gain on them shows memory, not learning"
        )
        key = dataset.named_eval or "eval"
        fix = f"name rows that are not trained on, or remove `{key}` and set `eval_fraction: 0.05`"
        yield Issue(text, fix, f"dataset.{key}", level="warning")


def _asked_columns(dataset: SingleDataset) -> tuple[str, ...]:
    """Return the columns of the data that prompts are made of; none if all prompts may be the same."""
    prompt = dataset.prompt
    templates = [text for text in (prompt.user, prompt.system) if text is not None]
    named = {"prompt"} if prompt.user is None else set()
    try:
        named |= frozenset().union(*map(template_columns, templates))
    except RecipeError:
        return ()
    named |= {*prompt.images}
    made = dataset.columns
    return tuple(sorted(made[name].from_ if name in made else name for name in named))


def _identify(row: Row, names: Sequence[str]) -> str:
    return canonical_json([read_column(row, name) for name in names] if names else row)


def _files(split: SplitPreview) -> list[RowFile]:
    return [RowFile(path, "dataset") for path, _ in split.names.files]


def _lines(split: SplitPreview) -> Iterator[bytes]:
    files = (file for file in _files(split) if file.format == ".jsonl")
    return islice(chain.from_iterable(map(iterate_lines, files)), split.count)


def _is_long(split: SplitPreview) -> bool:
    return split.count > WHOLE_ROWS and all(file.format == ".jsonl" for file in _files(split))


def _left_rows(split: SplitPreview) -> Iterator[tuple[int, Row]]:
    """Yield place and row of those that no pattern drops; of a split with many rows, of the preview."""
    is_read = len(split.rows) == split.count or split.count > WHOLE_ROWS
    dropped = {*split.dropped}
    rows = enumerate(split.rows if is_read else _read_all(split))
    return ((place, row) for place, row in rows if place not in dropped)


def _read_all(split: SplitPreview) -> Iterator[Row]:
    try:
        rows = chain.from_iterable(map(iterate_rows, _files(split)))
        yield from islice(rows, split.count)
    except RecipeError:
        return  # of a later row, which the preview did not reach: the training tells it


def later_rows(split: SplitPreview, column: str) -> Iterator[tuple[int, Row]]:
    """Yield place and row of those after the preview in which a column of the data may be empty.

    Lines of JSON are parsed only if they lack the column's name, or have an empty value behind it.
    """
    first, files = len(split.rows), _files(split)
    if first == split.count:
        return
    name = canonical_json(column.partition(".")[0]).encode()
    if not name.isascii() or any(file.format != ".jsonl" for file in files):
        rows = _read_all(split) if split.count <= _MOST_ROWS else ()
        yield from islice(enumerate(rows), first, None)
        return
    empty = re.compile(re.escape(name) + rb'\s*:\s*(?:null|NaN|"\s*"|\{)')
    for place, line in islice(enumerate(_lines(split)), first, None):
        if (name not in line or empty.search(line)) and (row := parse_line(line)) is not None:
            yield place, row
