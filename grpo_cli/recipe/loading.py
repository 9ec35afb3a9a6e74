"""From files and flags to a recipe: `extends`, overrides, validation, all problems at once.

Owns the order in which the parts are put together and which paths are relative to what.
Does not look anything up on the machine beyond the recipe files: that is `checks`.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_cli.errors import GrpoError, Problem, RecipeError
from grpo_cli.recipe import explanation
from grpo_cli.recipe.overrides import apply_overrides
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.trl_keys import check_trl_keys
from grpo_cli.recipe.yaml_tree import Node, merge, read_source, read_text

MAX_FILES = 100
"""Recipes that one recipe may build on, directly or not."""
_STAND_INS: dict[str, Any] = {
    "name": "recipe",
    "model": {"path": "some/model"},
    "model.path": "some/model",
    "model.lora": {"r": 16},
}
"""What the checks of the rest see in the place of a wrong value, if leaving it out would lead to more errors."""
_OTHER_TOOLS = {"model_name_or_path": "TRL", "reward_funcs": "TRL", "base_model": "axolotl"}
"""Keys by which the config of another tool is known."""
_OPTIONAL = ("generation", "training", "launch", "logging", "evaluation", "expect")


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with the tree it came from, so that later checks can cite lines."""

    recipe: Recipe | None
    """Without the values that `problems` are about; None if the rest does not fit the schema either."""
    tree: Node
    problems: tuple[Problem, ...]
    source: Path
    text: str
    """The file as it was read."""

    def place(self, problem: Problem) -> Problem:
        """The same problem with the line its dotted path was written on."""
        if problem.location is not None or not problem.path:
            return problem
        steps = explanation.split_path(problem.path)
        return replace(problem, location=explanation.locate(self.tree, steps))

    @contextmanager
    def placing_errors(self) -> Iterator[None]:
        """Add the line of the recipe to errors that know their dotted path.

        Raises:
            GrpoError: What was raised inside, of the same type.
        """
        try:
            yield
        except RecipeError as error:
            raise RecipeError(map(self.place, error.problems)) from error.__cause__
        except GrpoError as error:
            if not error.path:
                raise
            location = self.place(Problem("", "", error.path)).location
            place = f"{location}: {error.path}" if location else error.path
            raise type(error)(f"{place}: {error}") from error.__cause__


def load_tree(path: Path, overrides: list[str] | None = None) -> LoadedRecipe:
    """Reads a recipe and validates it against the schema; finds every problem it can.

    Args:
        path: The YAML file.
        overrides: `--set` texts, applied after `extends`.

    Raises:
        RecipeError: The YAML itself cannot be read, so there is nothing to validate.
    """
    text = read_source(path)
    tree = _read_with_parents(path, text, {})
    tree.value.pop("extends", None)
    if tree.value.keys() == {"schema_version", "recipe"}:
        # A run folder's resolved.json: the same run can be started again from it.
        tree = tree.value["recipe"]
        # As in `RunFolder.read_recipe`: before there was `eval_seed`, rows were held out by the recipe's seed.
        tree.value["dataset"].value.setdefault("eval_seed", tree.value["seed"])
    _refuse_other_tools(tree, path)
    _drop_empty_sections(tree)
    apply_overrides(tree, overrides or [])
    anchor_paths(tree)
    recipe, problems = _validate(tree)
    return LoadedRecipe(recipe, tree, tuple(problems), path, text)


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe that fits the schema.

    Raises:
        RecipeError: With every problem found.
    """
    loaded = load_tree(path, overrides)
    if loaded.recipe is None or loaded.problems:
        raise RecipeError(loaded.problems)
    return loaded.recipe


def _validate(tree: Node) -> tuple[Recipe | None, list[Problem]]:
    """Validate a tree, and again without what is wrong, so that one mistake does not hide another."""
    wrong = check_trl_keys(tree)
    problems, values = list(wrong), tree.plain()
    while True:
        for problem in wrong:
            _leave_out(values, problem.path)
        try:
            return Recipe.model_validate(values), problems
        except ValidationError as error:
            found = explanation.explain(error, Recipe, tree)
        reported = [f"{problem.path}." for problem in problems]
        wrong = [
            problem
            for problem in found
            if not any(path.startswith(f"{problem.path}.") for path in reported)
        ]
        if not wrong:
            return None, problems
        problems += wrong


def _leave_out(values: dict[str, Any], path: str) -> None:
    """Remove the value at a dotted path, or the list that it is an entry of."""
    owner, key = values, path
    value: Any = values
    for step in explanation.split_path(path):
        if isinstance(value, dict):
            owner, key, value = value, str(step), value.get(str(step))
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
    owner.pop(key, None)
    if path in _STAND_INS:
        owner[key] = copy.deepcopy(_STAND_INS[path])


def _refuse_other_tools(tree: Node, path: Path) -> None:
    """Refuse a config of TRL or axolotl with one message rather than one a key."""
    for key, tool in _OTHER_TOOLS.items():
        if key in tree.value and tree.value.keys().isdisjoint({"model", "dataset", "rewards"}):
            message = f"`{key}` is a key of {tool}: this is a config of {tool}, not a recipe"
            fix = f"grpo convert {path} writes a recipe from it"
            raise RecipeError([Problem(message, fix, location=tree.value[key].location)])


def _drop_empty_sections(tree: Node) -> None:
    """A section whose keys are all commented out is as good as absent."""
    for key in _OPTIONAL:
        node = tree.child(key)
        if node is not None and node.value is None:
            del tree.value[key]


def _read_with_parents(path: Path, text: str, seen: dict[Path, Node | None]) -> Node:
    """Reads a recipe on top of its parents.

    Args:
        path: The file.
        text: What it holds.
        seen: Every file read so far; None for those that are still being read, the children.
    """
    tree = read_text(text, str(path))
    if not isinstance(tree.value, dict):
        problem = Problem(
            "is not a recipe: the top level must be `key: value` lines",
            "start from `grpo init`",
            location=tree.location,
        )
        raise RecipeError([problem])
    here = _absolute(path.parent, path.name, tree)
    seen[here] = None
    parents = tree.child("extends")
    merged: Node | None = None
    for name, node in _parent_names(parents) if parents else []:
        parent = _read_parent(_absolute(path.parent, name, node), name, node, seen)
        merged = parent if merged is None else merge(merged, parent)
    seen[here] = tree if merged is None else merge(merged, tree)
    return seen[here] or tree


def _parent_names(node: Node) -> list[tuple[str, Node]]:
    items = node.value if isinstance(node.value, list) else [node]
    wrong = [item for item in items if not isinstance(item.value, str)]
    if wrong:
        problem = Problem(
            "should be a path or a list of paths", "name YAML files", "extends", wrong[0].location
        )
        raise RecipeError([problem])
    return [(item.value, item) for item in items]


def _read_parent(path: Path, name: str, node: Node, seen: dict[Path, Node | None]) -> Node:
    if path in seen:
        known = seen[path]
        if known is None:
            raise _refuse_parent(f"`{name}` extends itself", "remove it", node)
        return known
    if len(seen) >= MAX_FILES:
        raise _refuse_parent(f"more than {MAX_FILES} files build on each other", "merge some", node)
    if not path.is_file():
        fix = "paths in `extends` are relative to the file that names them; correct it"
        raise _refuse_parent(f"there is no file {path}", fix, node)
    return _read_with_parents(path, read_source(path), seen)


def _refuse_parent(message: str, fix: str, node: Node) -> RecipeError:
    return RecipeError([Problem(message, fix, "extends", node.location)])


def anchor_paths(tree: Node) -> None:
    """Makes local paths absolute: relative to the file that wrote them, or the working directory for flags.

    Raises:
        RecipeError: A path is none: too long, with a null byte, or of an unknown user.
    """
    model = tree.child("model")
    for key in ("path", "chat_template"):
        _anchor(model.child(key) if model else None, only_local=True)
    launch = tree.child("launch")
    _anchor(launch.child("accelerate_config") if launch else None)
    dataset = tree.child("dataset")
    for key in ("train", "eval"):
        node = dataset.child(key) if dataset else None
        for item in node.value if node and isinstance(node.value, list) else [node]:
            _anchor(item)
    rewards = tree.child("rewards")
    for entry in rewards.value if rewards and isinstance(rewards.value, list) else []:
        _anchor(entry.child("path"), only_local=True)


def _anchor(node: Node | None, *, only_local: bool = False) -> None:
    if node is None or not isinstance(node.value, str):
        return
    # An address, or a chat template.
    if any(mark in node.value for mark in ("://", "{{", "{%")):
        return
    text = node.value
    source = node.location.source
    folder = Path.cwd() if source.startswith("--set") else Path(source).resolve().parent
    file, colon, function = text.partition(".py:")
    looks_local = text.startswith((".", "/", "~")) or bool(colon) or text.endswith(".gguf")
    candidate = _absolute(folder, f"{file}.py" if colon else text, node)
    if looks_local or not only_local or candidate.exists():
        node.value = f"{candidate}{':' + function if colon else ''}"


def _absolute(folder: Path, text: str, node: Node) -> Path:
    """A path as written at `node`, relative to `folder`; one that the system can look up."""
    try:
        path = (folder / Path(text).expanduser()).resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        problem = Problem(f"is not a path ({reason})", "correct it", location=node.location)
        raise RecipeError([problem]) from None
    return path
