"""Reads the entries of rewards, tools and environments by their kinds."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from pydantic import ValidationError

from grpo_cli.data.rows import suggest
from grpo_cli.errors import RunError
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Section
from grpo_cli.recipe.episode import KindConfig
from grpo_cli.recipe.explanation import Path, dotted, explain, split_path, unknown_key
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards import registry as reward_kinds
from grpo_cli.rewards.contract import RewardContext

SECTIONS = ("rewards", "tools", "environment")


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


def read_kinds(loaded: LoadedRecipe, section: str) -> tuple[dict[str, Any], list[Issue]]:
    """Return the parameters of a section's entries by their path, and what is wrong.

    Tools and environments with errors are left out; of rewards, only those whose parameters cannot be read.
    """
    valid: dict[str, Any] = {}
    issues: list[Issue] = []
    of_recipe: tuple[RewardContext | None, ...] = ()
    if section == "rewards":
        recipe = loaded.recipe
        of_recipe = (RewardContext(recipe.generation.max_completion_length) if recipe else None,)
    for at, entry in kind_entries(loaded, section):
        params, wrong = _read_params(loaded, at, entry, _registry_of(section))
        issues += wrong
        if params is None:
            continue
        path, found = dotted(at), params.problems(*of_recipe)
        issues += [replace(each, path=f"{path}.{each.path}") for each in found]
        if section == "rewards" or not any(each.level == "error" for each in found):
            valid[path] = params
    return valid, issues


def _registry_of(section: str) -> KindRegistry:
    if section == "rewards":
        return KindRegistry(
            "reward kind", RewardConfig, reward_kinds.find_kind, reward_kinds.kind_names
        )
    # Imported late: recipes without tools and environments do not pay for it.
    from grpo_cli.environments.registry import find_kind, kind_names

    noun = f"kind of {section.removesuffix('s')}"
    return KindRegistry(noun, KindConfig, partial(find_kind, section), partial(kind_names, section))


def _read_params(
    loaded: LoadedRecipe, at: Path, entry: dict[str, Any], registry: KindRegistry
) -> tuple[Any, list[Issue]]:
    """Return the parameters of an entry, validated by its kind; None, with issues, if they are wrong."""
    kind, path = entry["kind"], dotted(at)
    try:
        schema = registry.find(kind)
    except RunError as error:
        return None, [error.as_issue(f"{path}.kind")]
    if schema is None:
        names = registry.names()
        fix = suggest(kind, names, f"write one of {', '.join(names)}")
        return None, [Issue(f"there is no {registry.noun} `{kind}`", fix, f"{path}.kind")]
    common = registry.common.model_fields
    values = {key: each for key, each in entry.items() if key not in common}
    try:
        return schema.model_validate(values), []
    except ValidationError as error:
        wrong = explain(error, schema, loaded.tree, at)
    keys = {split_path(issue.path)[len(at) :][:1] for issue in wrong}
    issues = []
    with suppress(ValidationError):
        # What it needs to be installed does not depend on the wrong ones.
        rest = {key: each for key, each in values.items() if (key,) not in keys}
        others = schema.model_validate(rest).problems()
        issues = [
            replace(each, path=f"{path}.{each.path}".rstrip(".")) for each in others if each.package
        ]
    for issue in wrong:
        # An unknown parameter may also be a misspelt key that every entry has.
        known = [*schema.model_fields, *common]
        unknown = issue.seen.startswith("unknown key")
        issues.append(unknown_key(loaded.tree, split_path(issue.path), known) if unknown else issue)
    return None, issues
