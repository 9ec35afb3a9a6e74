"""From files and flags to a recipe: `extends`, `--set`, validation, all problems at once."""

import copy
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_cli.errors import GrpoError, RecipeError, nearest, recipe_error
from grpo_cli.input_files import find_fault
from grpo_cli.issues import Issue, Location
from grpo_cli.recipe.adapter import fill_from_adapter
from grpo_cli.recipe.explanation import explain
from grpo_cli.recipe.grpo_fields import check_trl_keys
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import (
    Node,
    locate,
    merge,
    read_source,
    read_text,
    split_path,
    write_plain,
)
from grpo_cli.user_code import find_module_file

_STAND_INS: dict[str, Any] = {
    "name": "recipe",
    "model": {"path": "some/model"},
    "model.path": "some/model",
    "model.lora": {"r": 16},
}
"""Stand-ins for wrong values whose absence would cause further errors, for the checks of the rest."""
_OTHER_TOOLS = {"model_name_or_path": "TRL", "reward_funcs": "TRL", "base_model": "axolotl"}
"""Keys by which the config of another tool is known."""
_OPTIONAL = frozenset(
    "teacher tools environment episode generation training warmup launch logging evaluation expect".split()
)
_FLAG_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_MOST_PARENTS = 32
_LOCAL_PATHS = (
    ("model", "path"),
    ("model", "adapter"),
    ("model", "adapter", "path"),
    ("model", "chat_template"),
    ("teacher",),
    ("teacher", "path"),
    ("launch", "accelerate_config"),
    ("dataset", "train"),
    ("warmup", "train"),
    ("dataset", "eval"),
    ("dataset", "difficulty", "samples"),
)
_SHORT_FORMS = {"adapter": "path", "teacher": "path", "difficulty": "kind"}
"""Sections that may be written as the value of one key, and that key."""
_MAY_BE_ELSEWHERE = {"adapter", "path", "chat_template", "teacher"}
"""Keys whose values are local paths only if they look like one or exist."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with the tree it came from, so that later checks can cite lines."""

    recipe: Recipe | None
    """Without the values that `problems` are about; None if the rest does not fit the schema either."""
    tree: Node
    problems: tuple[Issue, ...]
    source: Path
    text: str
    """The file as it was read."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Place in `rewards` → where a reward of a source was written."""

    def write_movable(self) -> str:
        """Return the YAML of the file, without overrides, that reads the same in any folder.

        Local paths are absolute, and the recipes that it extends are merged into it.
        """
        tree = _read_with_parents(self.source, self.text, {}, [])
        has_parents = tree.value.pop("extends", None) is not None
        written = [(node, node.value) for node in _scalars(tree)]
        try:
            _anchor_paths(tree)
        except RecipeError:  # An override replaces what is not a path.
            return self.text
        if has_parents:
            return f"# {self.source.resolve()}, with what it extends\n{write_plain(tree.plain())}"
        text = _replace_scalars(
            self.text, [each for each in written if each[0].value is not each[1]]
        )
        is_same = read_text(text, str(self.source)).plain() == tree.plain()
        return text if is_same else write_plain(tree.plain())

    def place(self, problem: Issue) -> Issue:
        """Return the same problem with the line its dotted path was written on, and that path."""
        if problem.location is None and problem.path:
            steps = split_path(problem.path)
            problem = replace(problem, location=locate(self.tree, steps))
        section, _, rest = problem.path.partition(".")
        index, _, rest = rest.partition(".")
        if (origin := self.origins.get(f"{section}.{index}")) is None:
            return problem
        return replace(problem, path=f"{origin}.{rest}".rstrip("."))

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
            location = self.place(Issue("", "", error.path)).location
            place = f"{location}: {error.path}" if location else error.path
            raise type(error)(f"{place}: {error}") from error.__cause__


def load_tree(path: Path, overrides: list[str] | None = None) -> LoadedRecipe:
    """Read a recipe and validate it against the schema; find every problem it has.

    Args:
        path: The YAML file.
        overrides: `--set` texts, applied after `extends`.

    Raises:
        RecipeError: The YAML itself cannot be read, so there is nothing to validate.
    """
    text = read_source(path)
    repeated: list[Issue] = []
    tree = _read_with_parents(path, text, {}, repeated)
    tree.value.pop("extends", None)
    if tree.value.keys() == {"schema_version", "recipe"}:
        # A run folder's resolved.json: the same run can be started again from it.
        tree = tree.value["recipe"]
        # As in `RunFolder.read_recipe`: before there was `eval_seed`, rows were held out by the recipe's seed.
        tree.value["dataset"].value.setdefault("eval_seed", tree.value["seed"])
    _refuse_other_tools(tree, path)
    for key in _OPTIONAL:
        # A section whose keys are all commented out is as good as absent.
        if key in tree.value and tree.value[key].value is None:
            del tree.value[key]
    _apply_overrides(tree, overrides or [])
    origins = _gather_rewards(tree)
    _anchor_paths(tree)
    unfit = fill_from_adapter(tree)
    recipe, problems = _validate(tree)
    problems = [*repeated, *unfit, *(p for p in problems if not unfit or p.path != "model.path")]
    loaded = LoadedRecipe(recipe, tree, tuple(problems), path, text, origins)
    return replace(loaded, problems=tuple(map(loaded.place, problems))) if origins else loaded


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe that fits the schema.

    Raises:
        RecipeError: With every problem found.
    """
    loaded = load_tree(path, overrides)
    if loaded.recipe is None or loaded.problems:
        raise RecipeError(loaded.problems)
    return loaded.recipe


def _validate(tree: Node) -> tuple[Recipe | None, list[Issue]]:
    """Validate a tree, and again without what is wrong, so that one mistake does not hide another."""
    wrong = check_trl_keys(tree)
    problems, values = list(wrong), tree.plain()
    while True:
        for problem in wrong:
            _leave_out(values, problem.path)
        try:
            return Recipe.model_validate(values), problems
        except ValidationError as error:
            issues = explain(error, Recipe, tree)
        reported = [f"{problem.path}." for problem in problems]
        wrong = [
            issue
            for issue in issues
            if not any(path.startswith(f"{issue.path}.") for path in reported)
        ]
        if not wrong:
            return None, problems
        problems += wrong


def _leave_out(values: dict[str, Any], path: str) -> None:
    """Remove the value at a dotted path, or the list that it is an entry of."""
    owner, key = values, path
    value: Any = values
    for step in split_path(path):
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
            raise recipe_error(message, fix, location=tree.value[key].location)


def _read_with_parents(
    path: Path, text: str, trees: dict[Path, Node | None], repeated: list[Issue]
) -> Node:
    """Read a recipe on top of its parents; `trees` has every file read so far, None while it is being read."""
    tree = read_text(text, str(path), repeated=repeated)
    if not isinstance(tree.value, dict):
        message = "is not a recipe: the top level must be `key: value` lines"
        raise recipe_error(message, "start from `grpo init`", location=tree.location)
    here = _resolve(path.parent, path.name, tree)
    if sum(each is None for each in trees.values()) == _MOST_PARENTS:
        seen = f"more than {_MOST_PARENTS} recipes extend each other"
        raise recipe_error(seen, "merge some of them", "extends", tree.location)
    trees[here] = None
    parents = tree.child("extends") or Node([], tree.location)
    merged: Node | None = None
    for node in parents.value if isinstance(parents.value, list) else [parents]:
        if not isinstance(node.value, str):
            message = "should be a path or a list of paths"
            raise recipe_error(message, "name YAML files", "extends", node.location)
        parent = _read_parent(_resolve(path.parent, node.value, node), node, trees, repeated)
        merged = parent if merged is None else merge(merged, parent)
    trees[here] = tree if merged is None else merge(merged, tree)
    return trees[here] or tree


def _read_parent(
    path: Path, node: Node, trees: dict[Path, Node | None], repeated: list[Issue]
) -> Node:
    if path not in trees:
        if fault := find_fault(path):
            fix = "paths in `extends` are relative to the file that names them; correct it"
            others = [
                each.name for each in path.parent.glob("*.y*ml") if each not in {path, *trees}
            ]
            if (close := nearest(path.name, others)) and Path(node.value).name:
                fix = f"write `{Path(node.value).with_name(close)}`"
            raise recipe_error(fault, fix, "extends", node.location)
        return _read_with_parents(path, read_source(path), trees, repeated)
    known = trees[path]
    if known is None:
        raise recipe_error(f"`{node.value}` extends itself", "remove it", "extends", node.location)
    return known


def _apply_overrides(tree: Node, overrides: list[str]) -> None:
    """Set each `path=value` in a tree; the value is read as YAML, and cited as the flag if it is wrong.

    Raises:
        RecipeError: A flag is not `path=value`, or its path leads through a value that is not a mapping.
    """
    problems: list[Issue] = []
    for text in overrides:
        try:
            _override(tree, text, Location(f"--set {text}"))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)


def _override(tree: Node, text: str, flag: Location) -> None:
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not _FLAG_PATH.fullmatch(name):
        fix = "write for example --set training.max_steps=50"
        raise recipe_error("is not `path=value`", fix, location=flag)
    if second := re.search(r",(\w+(\.\w+)+=.*)", raw):
        fix = f"write --set {text.removesuffix(second[0])} --set {second[1]}"
        raise recipe_error("holds two settings", fix, location=flag)
    if name == "extends":
        raise recipe_error("is read before --set", "write `extends` into the recipe", name, flag)
    # A shell has already stripped a template of the quotes that YAML would want.
    literal = not raw or raw.startswith("{{")
    value = Node(raw, flag) if literal else read_text(raw, flag.source, has_lines=False)
    *parents, last = name.split(".")
    node = tree
    for depth, step in enumerate(parents, 1):
        node = _descend(node, step, ".".join(parents[:depth]), flag)
    if isinstance(node.value, list):
        node.value[_list_index(node, last, name, flag)] = value
    elif isinstance(node.value, dict):
        node.value[last] = merge(node.value[last], value) if last in node.value else value
        node.key_locations[last] = flag
    else:
        raise _no_mapping(name, flag)


def _descend(node: Node, step: str, path: str, flag: Location) -> Node:
    """Return the node under a step of a flag's path, making the mapping if there is none."""
    if isinstance(node.value, list):
        entry: Node = node.value[_list_index(node, step, path, flag)]
        return entry
    if not isinstance(node.value, dict):
        raise _no_mapping(path, flag)
    if step in _SHORT_FORMS and isinstance(getattr(node.value.get(step), "value", None), str):
        node.value[step] = Node({_SHORT_FORMS[step]: node.value[step]}, node.value[step].location)
    if (child := node.value.get(step)) is None or child.value is None:
        node.value[step] = child = Node({}, flag)
        node.key_locations[step] = flag
    return child


def _list_index(node: Node, step: str, path: str, flag: Location) -> int:
    last = len(node.value) - 1
    if re.fullmatch("[0-9]{1,9}", step) and int(step) <= last:
        return int(step)
    message = f"the list has {last + 1} entries, numbered from 0"
    raise recipe_error(message, f"use a number from 0 to {last}, or edit the recipe", path, flag)


def _no_mapping(path: str, flag: Location) -> RecipeError:
    fix = f"check the path, or set the whole of it: --set '{path.rpartition('.')[0]}={{…}}'"
    return recipe_error("leads through a value that holds no keys", fix, path, flag)


def _gather_rewards(tree: Node) -> dict[str, str]:
    """Move the rewards of sources to `rewards`, where `source` says whose they are; return where each was."""
    sources = tree.find(("dataset", "sources"))
    origins: dict[str, str] = {}
    for place, source in enumerate(_entries(sources)):
        name, own = source.child("name"), source.child("rewards")
        if name is None or own is None or not isinstance(own.value, list):
            continue
        if not isinstance((tree.child("rewards") or own).value, list):
            break
        rewards = tree.value.setdefault("rewards", Node([], own.location))
        for index, entry in enumerate(own.value):
            if isinstance(entry.value, dict):
                entry.value["source"] = Node(name.value, entry.location)
            origins[f"rewards.{len(rewards.value)}"] = f"dataset.sources.{place}.rewards.{index}"
            rewards.value.append(entry)
        del source.value["rewards"]
    return origins


def _entries(node: Node | None) -> list[Node]:
    return node.value if node is not None and isinstance(node.value, list) else []


def _anchor_paths(tree: Node) -> None:
    """Make local paths absolute: relative to the file that wrote them, or the working directory for flags."""
    sources = range(len(_entries(tree.find(("dataset", "sources")))))
    files = [("dataset", "sources", place, key) for place in sources for key in ("train", "eval")]
    for path in (*_LOCAL_PATHS, *files):
        node = tree.find(path)
        for item in node.value if node and isinstance(node.value, list) else [node]:
            _anchor(item, only_local=path[-1] in _MAY_BE_ELSEWHERE)
    _anchor_images(tree.child("dataset"))
    for key in ("rewards", "tools", "environment"):
        node = tree.child(key)
        for entry in node.value if node and isinstance(node.value, list) else [node]:
            if entry is not None:
                _anchor(entry.child("path"), only_local=True)
                _anchor_module(entry.child("path"))
                _anchor_command(entry.child("command"))
                _anchor_command(entry.child("python"))


def _anchor_images(dataset: Node | None) -> None:
    """Make the paths of images absolute in rows that the recipe itself holds."""
    named = dataset.find(("prompt", "images")) if dataset is not None else None
    if dataset is None or named is None:
        return
    columns = [node.value for node in _entries(named) or [named] if isinstance(node.value, str)]
    rows = [*_entries(dataset.child("rows")), *_entries(dataset.child("eval_rows"))]
    for row in (row for row in rows if isinstance(row.value, dict)):
        for value in filter(None, map(row.child, columns)):
            for image in _entries(value) or [value]:
                _anchor(image, only_local=False)


def _scalars(node: Node) -> Iterator[Node]:
    if isinstance(node.value, dict | list):
        for child in node.value.values() if isinstance(node.value, dict) else node.value:
            yield from _scalars(child)
    else:
        yield node


def _replace_scalars(text: str, changed: list[tuple[Node, Any]]) -> str:
    """Write the values of nodes over those that a file held: comments and all else stay."""
    lines = text.splitlines(keepends=True)
    # The last of a line first, so that the columns of the others stay right.
    for node, old in sorted(changed, key=lambda each: -each[0].location.column):
        line, column = node.location.line - 1, node.location.column - 1
        lines[line] = lines[line][:column] + lines[line][column:].replace(old, node.value, 1)
    return "".join(lines)


def _anchor_command(node: Node | None) -> None:
    """Make the files of a command absolute: its first word if it has a `/`, all others that exist."""
    words = node.value if node and isinstance(node.value, list) else [node]
    for place, word in enumerate(words):
        if (
            word is None
            or not isinstance(word.value, str)
            or (place == 0 and "/" not in word.value)
        ):
            continue
        # Links are kept: an interpreter finds its packages by the path that it was called by.
        path = os.path.abspath(_folder(word) / os.path.expanduser(word.value))
        if os.path.exists(path):
            word.value = path


def _folder(node: Node) -> Path:
    """Return the folder of the file that wrote a value; the working directory for flags."""
    source = node.location.source
    return Path.cwd() if source.startswith("--set") else Path(source).resolve().parent


def _anchor(node: Node | None, *, only_local: bool) -> None:
    # `://` is in an address, `{{` in a chat template.
    if node is None or not isinstance(node.value, str) or re.search(r"://|\{[{%]", node.value):
        return
    folder = _folder(node)
    file, colon, function = node.value.partition(".py:")
    looks_local = node.value.startswith((".", "/", "~")) or colon or node.value.endswith(".gguf")
    candidate = _resolve(folder, f"{file}.py" if colon else node.value, node)
    if looks_local or not only_local or (node.value and candidate.exists()):
        node.value = f"{candidate}{':' + function if colon else ''}"


def _anchor_module(node: Node | None) -> None:
    """Name the file of `package.module:name` if it is in the folder of the recipe, and not installed."""
    if node is not None and isinstance(node.value, str):
        match = re.fullmatch(r"(\w+(?:\.\w+)*):(\w+)", node.value)
        if match and (file := find_module_file(match[1], _folder(node))):
            node.value = f"{file}:{match[2]}"


def _resolve(folder: Path, text: str, node: Node) -> Path:
    """Return a path as written at `node`, relative to `folder`; one that the system can look up."""
    try:
        path = (folder / Path(text).expanduser()).resolve()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise recipe_error(
            f"is not a path ({reason})", "correct it", location=node.location
        ) from None
    if not exists and (variable := re.search(r"\$(\w+|\{\w+\})", text)):
        message = f"environment variables such as {variable[0]} are not expanded in a recipe"
        raise recipe_error(message, "write the path itself", location=node.location)
    return path
