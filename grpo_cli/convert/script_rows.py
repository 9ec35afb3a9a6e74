"""The rows and images of a Python script: where they are loaded, and what is done to them.

Source: datasets 5 (`load_dataset`, `Dataset`).
"""

import ast
from collections.abc import Iterator
from typing import Any

from grpo_cli.convert.datasets import BUILDERS, NO_DATASET, PROMPT_EXAMPLE
from grpo_cli.convert.key_report import by_key, read_keys
from grpo_cli.convert.script_account import ScriptAccount, is_rows
from grpo_cli.convert.script_values import (
    MISSING,
    Object,
    Value,
    code_of,
    default_of,
    literal,
    plain,
    reachable,
)

_ROWS = ("path", "name", "data_dir", "data_files", "split")
"""Parameters of `load_dataset`, in their order."""
_ROWS_KEYS = {
    "path": "dataset_name",
    "name": "dataset_config",
    "split": "dataset_train_split",
    "streaming": "dataset_streaming",
}
_READERS = {"from_json": "json", "from_csv": "csv", "from_parquet": "parquet"}
_NUMBERED = ("select", "take", "skip")
_VISION = ("AutoModelForImageTextToText", "AutoModelForVision2Seq")
_IMAGES = ("image", "images")
"""TRL's columns with images."""


class ScriptRows(ScriptAccount):
    """Takes the rows that a script gives `GRPOTrainer`."""

    def take_rows(
        self, train: tuple[Value | None, ast.AST], held_out: tuple[Value, ast.AST] | None
    ) -> None:
        """Take the rows that are trained on and held out: where they are loaded, and what changes them."""
        value, node = train
        bases, passes = self.find(value, is_rows)
        base = bases[0] if len(bases) == 1 else None
        other: Object | None = None
        others: list[Object] = []
        other_passes: list[Object] = []
        if held_out is not None and plain(held_out[0]) is not None:
            others, other_passes = self.find(held_out[0], is_rows)
            other = others[0] if len(others) == 1 else None
        split = self._find_held_out(base, other, held_out) if other and held_out else MISSING
        if base is None:
            self.leave("dataset", value, node, NO_DATASET)
            for each in [*bases, *passes]:
                self.done.add(id(each))
                text = f"{self.locate(each.node)} has `{self.code_of_change(each, 200)}`"
                self.add_to_do("dataset", text)
        else:
            self._take_source(base, value, node, split)
            self._take_changes(passes, other_passes)
        if held_out is not None and plain(held_out[0]) is not None:
            shared = [each for each in other_passes if each in passes]
            is_part = any(each.last_name == "train_test_split" for each in shared)
            if not is_part or base is None:
                self._take_held_out(base, other, held_out, split)
            for each in others if other is None else ():
                if id(each) not in self.done:
                    self.done.add(id(each))
                    text = f"{self.locate(each.node)} has `{self.code_of_change(each, 200)}`"
                    self.add_to_do("dataset.eval_split", text)
            self._take_other_changes(passes, other_passes)

    def _find_split(self, base: Object, value: Value | None) -> tuple[Value, ast.AST] | None:
        """Return the split of a dataset that a value is: an item, or the argument of `load_dataset`."""
        argument = (base.args or {}).get("split") or (base.args or {}).get("4")
        for each in reachable(value):
            if not isinstance(each, Object) or not each.name.startswith("[") or not each.parts:
                continue
            calls = [made for made in reachable(each.owner) if isinstance(made, Object)]
            is_part = any(made.last_name == "train_test_split" for made in calls)
            if base in calls and not is_part:
                index, listed = plain(each.parts[0]), plain(argument)
                if isinstance(index, int) and isinstance(listed, list):
                    return literal(each.node, listed[index]), each.node
                return each.parts[0], each.node
        return (argument, self.node_of(base, "split")) if argument is not None else None

    def _find_held_out(
        self, base: Object | None, other: Object, held_out: tuple[Value, ast.AST]
    ) -> Any:
        """Return the split that held-out rows are; MISSING unless they are of the dataset that is trained on."""
        codes = [
            {key: code_of(value.node) for key, value in (each.args or {}).items() if key != "split"}
            for each in (base, other)
            if each is not None
        ]
        split = self._find_split(other, held_out[0])
        is_same = len(codes) == 2 and codes[0] == codes[1]
        return (
            plain(split[0]) if is_same and split and isinstance(plain(split[0]), str) else MISSING
        )

    def _take_source(self, base: Object, value: Value | None, node: ast.AST, held_out: Any) -> None:
        bound, reader = self.bind(base, _ROWS), _READERS.get(base.last_name)
        if (split := self._find_split(base, value)) is not None:
            bound["split"] = split
        data = {name: plain(each) for name, (each, _) in bound.items()}
        files = data.get(
            "data_files", data.get("path_or_paths", data.get("path") if reader else MISSING)
        )
        reasons = by_key(read_keys("script-load-dataset"))
        if base.last_name != "load_dataset" and reader is None:
            self.leave("dataset", None, base.node, NO_DATASET)
            return
        if reader is not None or data.get("path") in BUILDERS:
            used = ("path", "data_files", "split", "path_or_paths")
            if files is MISSING:
                fix = "write `kind: files`, and the files as `train`"
                self.leave("dataset", base, base.node, fix)
            else:
                chosen = _choose_files(files, data.get("split"), held_out)
                entry = {"path": reader or data["path"], "data_files": chosen}
                self.put("datasets", [entry], base.node)
            left = {name: each for name, each in bound.items() if name not in used}
            self.drop_all("load_dataset", left, reasons)
            return
        for name, (each, at) in bound.items():
            if name == "path" and not isinstance(data[name], str):
                self.leave("dataset", each, at, "name the dataset: `kind: hub` and `path`")
                if default_of(each) is not MISSING:
                    self.report.defaults["dataset.path"] = default_of(each)
            elif name in _ROWS_KEYS and data[name] is not MISSING:
                self.put(_ROWS_KEYS[name], data[name], at)
            elif name == "revision" and data[name] is not MISSING:
                self.extra["dataset.revision"] = ("load_dataset.revision", data[name], at)
            elif name in (*_ROWS_KEYS, "revision", "data_dir", "data_files", "**"):
                self.leave(f"dataset.{name}", each, at)
            else:
                self.drop_all("load_dataset", {name: (each, at)}, reasons)

    def _take_changes(self, passes: list[Object], others: list[Object]) -> None:
        """Take what leaves rows out or holds some out; leave to the user what changes them."""
        made: list[str] = []
        reasons = by_key(read_keys("script-rows-calls"))
        for index, change in enumerate(passes):
            self.done.add(id(change))
            name, when = (
                change.last_name,
                f"only if `{change.condition}`: " if change.condition else "",
            )
            if name == "filter":
                key = "train" if "datasets" in self.report.tree.value else "path"
                fix = "name data without the rows that it leaves out; a recipe reads all rows"
                self.leave(f"dataset.{key}", None, change.node, f"{when}{fix}")
            elif name in _NUMBERED:
                self._take_number(change, "limit", is_first=index == 0)
            elif name == "train_test_split":
                self._take_share(change, is_used=change in others)
            elif name in reasons:
                self.drop(self.code_of_change(change), change.node, reasons[name])
            else:
                made.append(
                    f"{self.line_of(change.node)}: `{when and f'({when}) '}{self.code_of_change(change)}`"
                )
        if made:
            self.add_to_do(
                "dataset.prompt",
                f"{self.file.name} changes the rows ({', '.join(made)}); write what it makes of a row, as Jinja "
                f"over its columns\n{PROMPT_EXAMPLE}",
            )

    def _take_number(self, change: Object, key: str, *, is_first: bool) -> None:
        """Take the first rows of a dataset."""
        args = change.args or {}
        count = plain(args.get("0") or args.get("indices") or args.get("n"))
        if isinstance(count, list) and count == [*range(len(count))]:
            count = len(count)
        is_certain = is_first and not change.condition and change.last_name != "skip"
        if isinstance(count, int) and count > 0 and is_certain:
            self.extra[f"dataset.{key}"] = (self.code_of_change(change), count, change.node)
        else:
            when = f"only if `{change.condition}`: " if change.condition else ""
            fix = "write how many rows it takes; a recipe takes the first ones of the file"
            self.leave(f"dataset.{key}", None, change.node, f"{when}{fix}")

    def _take_share(self, change: Object, *, is_used: bool) -> None:
        bound = self.bind(change, ["test_size"])
        missing: tuple[Value | None, ast.AST] = (None, change.node)
        share, node = bound.get("test_size", missing)
        seed, at = bound.get("seed", missing)
        bound = {name: each for name, each in bound.items() if name not in ("test_size", "seed")}
        size = plain(share)
        what = "held out" if is_used else "left out of training"
        if is_used and isinstance(size, float) and 0 < size < 1:
            self.extra["dataset.eval_fraction"] = ("train_test_split.test_size", size, node)
            if isinstance(plain(seed), int):
                self.extra["dataset.eval_seed"] = ("train_test_split.seed", plain(seed), at)
            elif seed is not None:
                self.leave("dataset.eval_seed", seed, at)
            self.drop_all("train_test_split", bound, {}, "recipes draw the rows that are held out")
        else:
            fix = f"write the share of the rows that is {what}, such as 0.05"
            self.leave("dataset.eval_fraction", None, change.node, fix)

    def _take_held_out(
        self, base: Object | None, other: Object | None, at: tuple[Value, ast.AST], split: Any
    ) -> None:
        files = self.report.get("datasets", 0, "data_files")
        if split is not MISSING and files is None:
            self.put("dataset_test_split", split, at[1])
        elif split is MISSING or not (isinstance(files, dict) and "test" in files):
            is_other = other is not None and other is not base
            about = ""
            if other and is_other:
                about = f"; they are `{code_of(other.node, 200)}` of {self.line_of(other.node)}"
            fix = f"say which rows are held out{about}; a recipe's are a split, files or a share of its dataset"
            self.leave("dataset.eval_split", at[0], at[1], fix)
        if other is not None:
            self.done.add(id(other))

    def _take_other_changes(self, passes: list[Object], others: list[Object]) -> None:
        """Take what is done to held-out rows alone."""
        codes = {self.code_of_change(each, 10**6) for each in passes}
        reasons = by_key(read_keys("script-rows-calls"))
        for change in [each for each in others if each not in passes]:
            self.done.add(id(change))
            code = self.code_of_change(change)
            if change.last_name in _NUMBERED:
                self._take_number(change, "eval_limit", is_first=change is others[0])
            elif self.code_of_change(change, 10**6) in codes:
                self.drop(code, change.node, "as for the rows that are trained on")
            else:
                what = "held-out rows are made as those that are trained on; write this into `dataset.prompt` too"
                self.drop(code, change.node, reasons.get(change.last_name, what))

    # Images.

    def take_images(self) -> None:
        """Leave the column of images to the user, if the script shows any."""
        shown: list[ast.AST] = []
        columns: list[str] = []
        for node in self.nodes:
            match node:
                case ast.Name(id=name) if name in _VISION:
                    shown.append(node)
                case ast.Dict(keys=keys, values=values):
                    pairs = [*zip(keys, values, strict=True)]
                    is_part = any(
                        _is_text(key, "type") and _is_text(each, "image") for key, each in pairs
                    )
                    shown += [node] if is_part else []
                    named = [each for key, each in pairs if _is_text(key, *_IMAGES)]
                    columns += [name for each in named for name in _find_columns(each)]
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="Image"), attr="open"), args=args
                ):
                    opened = [name for each in args for name in _find_columns(each)]
                    columns += opened
                    shown += [node] if opened else []
                case ast.Subscript(slice=ast.Constant(value=name)) if name in _IMAGES:
                    shown.append(node)
        if shown:
            first = min(shown, key=lambda node: getattr(node, "lineno", 0))
            fix = f"name the column with images, as in `prompt: {{images: {next(iter(columns), 'image')}}}`"
            self.leave("dataset.prompt.images", None, first, fix)


def _choose_files(files: Any, split: Any, held_out: Any) -> Any:
    """Return the files of the splits that are trained on and, if the trainer has such rows, held out."""
    if not isinstance(files, dict) or split not in (None, *files):
        return files
    train = files[split] if split else files.get("train", next(iter(files.values())))
    return {"train": train, "test": files[held_out]} if held_out in files else {"train": train}


def _is_text(node: ast.AST | None, *texts: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in texts


def _find_columns(value: ast.AST) -> Iterator[str]:
    """Yield the names in `row["name"]`, anywhere in an expression."""
    for node in ast.walk(value):
        match node:
            case ast.Subscript(slice=ast.Constant(value=str() as name)):
                yield name
