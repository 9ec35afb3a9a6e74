"""Every check of a recipe that needs no model, those of its text among them; all problems are returned at once."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_cli.batch.plan import BatchPlan
from grpo_cli.batch.plan import as_json as batch_as_json
from grpo_cli.checks.adapter import check_adapter, check_lora
from grpo_cli.checks.asynchronous import check_async
from grpo_cli.checks.batch import check_batch
from grpo_cli.checks.compatibility import check_compatibility, is_set
from grpo_cli.checks.context import Check, CheckContext, read_context
from grpo_cli.checks.data import check_data
from grpo_cli.checks.difficulty import check_difficulty
from grpo_cli.checks.episode import check_episodes
from grpo_cli.checks.evaluation import check_during, check_early_stopping, check_evaluation
from grpo_cli.checks.expect import check_expect
from grpo_cli.checks.generation import check_parts, check_sampling, resolve_backend
from grpo_cli.checks.images import check_images
from grpo_cli.checks.launch import check_launch, check_packages
from grpo_cli.checks.mixture import check_mixture
from grpo_cli.checks.model import check_model
from grpo_cli.checks.rewards import check_rewards
from grpo_cli.checks.scored import check_scored
from grpo_cli.checks.slurm import check_slurm
from grpo_cli.checks.streaming import check_streaming
from grpo_cli.checks.teacher import check_teacher
from grpo_cli.checks.trackers import check_trackers
from grpo_cli.checks.training import check_precision, check_risks, check_training, resolve_dtype
from grpo_cli.checks.vllm import check_vllm
from grpo_cli.checks.warmup import check_warmup
from grpo_cli.data.preview import Preview
from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue, Location, sort_issues
from grpo_cli.machine import Hardware, read_hardware
from grpo_cli.recipe.loading import LoadedRecipe, load_tree
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import KeyPath, Node, dotted, split_path

_PROMPTS = frozenset({"user", "system", "rubric", "chat_template"})
_PATTERNS = frozenset({"regex", "pattern"})
_LATEX = re.compile(r"(?<!\\)(?:\\\\)*\\(boxed|begin|frac|text)(?![a-z])")
"""Commands of LaTeX whose backslash a regular expression reads with the letter after it."""
_HIDDEN = re.compile(r"#\S")
"""How a comment begins that may be text: after the sign of most others comes a space."""
_LINE_BREAK = re.compile(r"\\n(?![a-z])")
r"""Two characters that mean a line break in double quotes; not the beginning of `\neq`."""
_ESCAPED = re.compile(r"[\b\f]|\t(?=ext|imes|heta|frac)|\r(?=ight|ho)")
r"""What YAML makes of `\b`, of `\boxed`, `\frac` and `\text` in double quotes."""
_TO_DO = re.compile(r" *# TO DO: ([\w.]+)( \(in part\))?: ")
_SIGNS = {"\b": r"\b", "\f": r"\f", "\t": r"\t", "\r": r"\r"}
_CHECKOUT = re.compile(r'-e "[^"]*\[')
"""In commands that install an extra: the checkout of this machine."""


def check_to_do(context: CheckContext) -> Iterator[Issue]:
    """Find lines of `grpo convert` that say what a person has to write, or to compare with the source."""
    tree = context.loaded.tree
    for number, line in enumerate(context.loaded.text.splitlines(), 1):
        left = _TO_DO.match(line)
        if left and (left[2] or tree.find(split_path(left[1])) is None):
            seen = (
                "is still to be written, as the comment `TO DO` says: training would run without it"
            )
            fix = "write it, or delete the comment"
            if left[2]:
                seen = "is converted in part, as the comment `TO DO` says"
                fix = "compare it with the source, then delete the comment"
            place = Location(tree.location.source, number, line.index("#") + 1)
            yield Issue(seen, fix, left[1], place)


def check_texts(context: CheckContext) -> Iterator[Issue]:
    """Find texts that are cut by a comment, and backslashes that are read otherwise."""
    yield from _find_texts(context.loaded.tree, ())


def _find_texts(node: Node, path: KeyPath) -> Iterator[Issue]:
    if isinstance(node.value, dict | list):
        entries = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for key, child in entries:
            yield from _find_texts(child, (*path, key))
    elif isinstance(node.value, str) and path and path[-1] in _PROMPTS | _PATTERNS:
        yield from _check_text(node, path)


def _check_text(node: Node, path: KeyPath) -> Iterator[Issue]:
    where, end = dotted(path), node.value[-30:]
    if _HIDDEN.match(node.comment):
        seen = f"` #` begins a comment, so the text ends with {end!r}, without {node.comment!r:.60}"
        yield Issue(seen, "put the whole text in quotes", where, level="warning")
    if path[-1] in _PROMPTS and node.style in (None, "'") and _LINE_BREAK.search(node.value):
        seen = r"holds a backslash and an n, which are a line break in double quotes alone"
        fix = "put the text in double quotes, or write it as a block (`|`)"
        yield Issue(seen, fix, where, level="warning")
    if found := _ESCAPED.search(node.value):
        sign = _SIGNS[found[0]]
        seen = f"{node.value!r:.60} holds a control character: in double quotes, YAML reads {sign} as one"
        fix = f"write the text in single quotes: '…{sign}…'"
        yield Issue(seen, fix, where, level="warning")
    if path[-1] in _PATTERNS and (command := _LATEX.search(node.value)):
        letter, name = command[1][0], command[1]
        seen = f"`\\{letter}` before `{name[1:]}` is a sign of regular expressions, so it never matches \\{name}"
        yield Issue(seen, f"write `\\\\{name}` (in single quotes)", where, level="warning")


TREE_CHECKS: tuple[Check, ...] = (check_texts, check_to_do, check_data)
"""Checks that also run if a recipe does not fit the schema."""
RECIPE_CHECKS: tuple[tuple[str, Check], ...] = (
    ("", check_model),
    ("model.adapter", check_adapter),
    ("model.lora", check_lora),
    ("teacher", check_teacher),
    ("", check_rewards),
    ("", check_batch),
    ("", check_launch),
    ("", check_packages),
    ("launch.slurm", check_slurm),
    ("", check_sampling),
    ("generation.sampling_parts: 2 or more", check_parts),
    ("generation.vllm", check_vllm),
    ("training.asynchronous", check_async),
    ("dataset.kind: scored", check_scored),
    ("expect", check_expect),
    ("logging.report_to", check_trackers),
    ("", check_precision),
    ("", check_training),
    ("episode", check_episodes),
    ("warmup", check_warmup),
    ("dataset.sources", check_mixture),
    ("dataset.difficulty", check_difficulty),
    ("dataset.streaming", check_streaming),
    ("images", check_images),
    ("", check_evaluation),
    ("", check_during),
    ("", check_early_stopping),
    ("", check_compatibility),
    ("", check_risks),
)
"""Every other check, in order, with the setting that a recipe must have for it; see `is_set`."""


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe with all that the checks found."""

    loaded: LoadedRecipe
    problems: tuple[Issue, ...]
    """Errors, warnings and notes, sorted by where they stand."""
    preview: Preview | None
    """What the data looks like; None if it could not be read."""
    batch: BatchPlan | None
    """None if the recipe does not fit the schema."""
    num_processes: int
    on_cpu: bool
    """Whether training is known to be on a CPU."""
    unseen: tuple[str, ...] = ()
    """What the training depends on and no check looked at, in words."""

    @property
    def errors(self) -> list[Issue]:
        """The problems that forbid a training."""
        return [problem for problem in self.problems if problem.level == "error"]

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the number of processes worked out for this machine.

        Raises:
            RecipeError: There are errors.
        """
        if self.errors or self.loaded.recipe is None:
            raise RecipeError(self.errors)
        recipe = self.loaded.recipe
        launch = recipe.launch.model_copy(update={"num_processes": self.num_processes})
        return recipe.model_copy(update={"launch": launch})

    def notes_of(self, path: str) -> list[Issue]:
        """Return what was noted of a setting, such as what `auto` is here."""
        return [each for each in self.problems if (each.path, each.level) == (path, "note")]

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as plain values, for `--json`."""
        columns = self.preview.columns if self.preview else None
        return {
            "recipe": str(self.loaded.source),
            "valid": not self.errors,
            "not_checked": list(self.unseen),
            "problems": [problem.as_json() for problem in self.problems],
            "num_processes": self.num_processes,
            "train_rows": self.preview.train_rows if self.preview else None,
            "eval_rows": self.preview.eval_rows if self.preview else None,
            "columns": sorted(columns) if columns else None,
            "batch": batch_as_json(self.batch) if self.batch else None,
        }


def check_recipe(
    path: Path,
    overrides: list[str] | None = None,
    hardware: Hardware | None = None,
    *,
    environment: bool = True,
) -> CheckedRecipe:
    """Load a recipe and run every check that needs no model.

    Args:
        path: The recipe.
        overrides: `--set` texts.
        hardware: Of the machine that trains; None for this one.
        environment: Whether a package that this machine lacks is an error, rather than a note.

    Raises:
        RecipeError: The YAML itself cannot be read.
    """
    hardware = hardware or read_hardware()
    loaded = resolve_dtype(load_tree(path, overrides))
    loaded, notes = resolve_backend(loaded, hardware, environment=environment)
    context = read_context(loaded, hardware)
    unseen = () if loaded.recipe is None or loaded.problems else tuple(context.find_unseen())
    # The values that they are about were left out for the checks, which may miss them.
    known = tuple(f"{issue.path}." for issue in loaded.problems)
    found = [*notes, *_run_checks(context)]
    news = [issue for issue in found if not f"{issue.path}.".startswith(known)]
    placed = [loaded.place(issue) for issue in (*loaded.problems, *news)]
    if not environment:
        placed = [*_without_packages(placed, {note.path for note in notes})]
    batch = None if loaded.recipe is None else context.plan
    issues = tuple(_name_packages_once(sort_issues(placed)))
    processes, on_cpu = context.num_processes, context.on_cpu
    return CheckedRecipe(loaded, issues, context.preview, batch, processes, on_cpu, unseen)


def _run_checks(context: CheckContext) -> Iterator[Issue]:
    yield from context.kind_issues
    recipe, checks = context.loaded.recipe, [*TREE_CHECKS]
    if recipe is not None:
        checks += [check for setting, check in RECIPE_CHECKS if is_set(recipe, setting)]
    for check in checks:
        # Checks that need the model's files wait until those exist, which `check_model` reports.
        with suppress(RecipeError):
            yield from check(context)


def _without_packages(issues: Iterable[Issue], noted: set[str]) -> Iterator[Issue]:
    """Yield missing packages as notes: this machine does not train. `auto` has its own note, at one of `noted`."""
    for issue in issues:
        if not issue.package:
            yield issue
        elif issue.path not in noted:
            fix = _CHECKOUT.sub('-e ".[', issue.fix)
            yield replace(issue, seen=f"{issue.seen} here", level="note", fix=fix)


def _name_packages_once(problems: list[Issue]) -> Iterator[Issue]:
    """Yield one issue a missing package, which names every key that needs the package; others as they are."""
    alike: dict[str, dict[str, Issue]] = {}
    for number, each in enumerate(problems):
        alike.setdefault(each.package or str(number), {}).setdefault(each.path, each)
    for first, *more in (list(group.values()) for group in alike.values()):
        also = " and ".join(f"`{each.path}`" for each in more)
        yield replace(first, why=f"it is also needed by {also}") if also else first
