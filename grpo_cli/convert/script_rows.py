"""Where a Python script gets its rows from: `load_dataset`, and what it does to the rows before the trainer.

Source: datasets 5 (`load_dataset`, `Dataset`).
"""

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_cli.convert.datasets import BUILDERS, NO_DATASET, PROMPT_EXAMPLE
from grpo_cli.convert.key_report import by_key, read_keys
from grpo_cli.convert.script_account import ScriptAccount
from grpo_cli.convert.script_values import (
    MISSING,
    Choice,
    Object,
    Value,
    code_of,
    default_of,
    plain,
)

_PARAMETERS = ("path", "name", "data_dir", "data_files", "split")
"""Of `load_dataset`, in their order."""
_KEYS = {
    "path": "dataset_name",
    "name": "dataset_config",
    "split": "dataset_train_split",
    "streaming": "dataset_streaming",
}
_READERS = {"from_json": "json", "from_csv": "csv", "from_parquet": "parquet"}
_NUMBERED = ("select", "take", "skip")


@dataclass
class _Source:
    """Rows that the trainer gets, followed back to where they are loaded."""

    base: Object | None = None
    split: Value | None = None
    part: Any = MISSING
    """Of `train_test_split`."""
    changes: list[Object] = field(default_factory=list)


class ScriptRows(ScriptAccount):
    """What a script gives `GRPOTrainer` as rows."""

    def take_rows(self, trainer: Object, train: Value | None, held_out: Value | None) -> None:
        """Take the rows that are trained on and held out."""
        at = self.nodes_of.get("train_dataset", trainer.node)
        source = self._trace(train) if train is not None else _Source()
        other = (
            self._trace(held_out) if held_out is not None and plain(held_out) is not None else None
        )
        split = self._find_held_out_split(source, other) if other is not None else MISSING
        self._take_source(source, train, at, split)
        self._take_changes(source, other)
        if other is not None:
            self._take_held_out(source, other, held_out, split)

    def _trace(self, value: Value) -> _Source:
        if isinstance(value, Choice):
            return self._trace_choice(value)
        if not isinstance(value, Object):
            return _Source()
        if value.is_call and self._role(value) == "rows":
            return _Source(value)
        if value.owner is not None and not (
            isinstance(value.owner, Object) and value.owner.is_import
        ):
            source = self._trace(value.owner)
            if value.is_call:
                source.changes.append(value)
            elif value.name.startswith("["):
                is_part = any(each.last_name == "train_test_split" for each in source.changes)
                if is_part:
                    source.part = plain(value.parts[0]) if value.parts else MISSING
                else:
                    source.split = value.parts[0] if value.parts else None
            return source
        base = self.find_in(value, lambda each: self._role(each) == "rows")
        if base is None or not value.is_call:
            return _Source(changes=[value] if value.is_call else [])
        inner = [self._trace(each) for each in (value.args or {}).values()]
        source = next((each for each in inner if each.base is base), _Source(base))
        source.changes.append(value)
        return source

    def _trace_choice(self, value: Choice) -> _Source:
        """Follow rows of which a condition decides what is done to them, but not where they are loaded."""
        options = [option for _, option in value.options if plain(option) is not None]
        sources = [self._trace(option) for option in options]
        if not sources or any(source.base is not sources[0].base for source in sources):
            return _Source()
        longest = max(sources, key=lambda source: len(source.changes))
        changes = [*longest.changes]
        changes += [each for source in sources for each in source.changes if each not in changes]
        return replace(longest, changes=list(dict.fromkeys(changes)))

    def _arguments(self, base: Object) -> dict[str, tuple[Value, ast.AST]]:
        return {
            _PARAMETERS[int(name)] if name.isdigit() and int(name) < len(_PARAMETERS) else name: (
                value,
                self.node_of(base, name),
            )
            for name, value in (base.args or {}).items()
        }

    def _mark(self, made: Object) -> None:
        self.done |= {(id(made), name) for name in ("", *(made.args or {}))}

    def _take_source(
        self, source: _Source, value: Value | None, at: ast.AST, held_out: Any
    ) -> None:
        base = source.base
        if base is None:
            self.leave("dataset", value, at, NO_DATASET)
            return
        self._mark(base)
        arguments = self._arguments(base)
        if source.split is not None:
            # Rows of a split have no splits but those of `train_test_split`.
            arguments.setdefault("split", (source.split, at))
        literals = {name: plain(each) for name, (each, _) in arguments.items()}
        reader = _READERS.get(base.last_name)
        files = literals.get(
            "data_files", literals.get("path_or_paths", literals.get("path") if reader else MISSING)
        )
        is_files = reader is not None or literals.get("path") in BUILDERS
        if base.last_name != "load_dataset" and reader is None:
            self.leave("dataset", base, base.node, NO_DATASET)
        elif is_files and files is MISSING:
            self.leave("dataset", base, base.node, "write `kind: files`, and the files as `train`")
        elif is_files:
            chosen = self._choose_files(files, literals.get("split"), held_out)
            self.put(
                "datasets", [{"path": reader or literals["path"], "data_files": chosen}], base.node
            )
        else:
            self._take_arguments(arguments)
            return
        used = {"path", "data_files", "split", "path_or_paths", "0"}
        self._drop_arguments({name: each for name, each in arguments.items() if name not in used})

    def _take_arguments(self, arguments: dict[str, tuple[Value, ast.AST]]) -> None:
        left: dict[str, tuple[Value, ast.AST]] = {}
        for name, (value, node) in arguments.items():
            literal = plain(value)
            if name == "path" and not isinstance(literal, str):
                fix = "name the dataset: `kind: hub` and `path`"
                self.leave("dataset", value, node, fix)
                if default_of(value) is not MISSING:
                    self.report.defaults["dataset.path"] = default_of(value)
            elif name in _KEYS and literal is not MISSING:
                self.put(_KEYS[name], literal, node)
            elif name == "revision" and literal is not MISSING:
                self.extra["dataset.revision"] = ("load_dataset.revision", literal, node)
            elif name in (*_KEYS, "revision", "data_dir", "data_files", "**"):
                self.leave(f"dataset.{name}", value, node)
            else:
                left[name] = (value, node)
        self._drop_arguments(left)

    def _drop_arguments(self, arguments: dict[str, tuple[Value, ast.AST]]) -> None:
        reasons = by_key(read_keys("script-load-dataset"))
        for name, (_, node) in arguments.items():
            reason = reasons.get(name, f"`{code_of(node)}` has no place in a recipe")
            self.drop(f"load_dataset.{name}", node, reason)

    def _choose_files(self, files: Any, split: Any, held_out: Any) -> Any:
        """Return the files of the splits that are trained on and, if the trainer has such rows, held out."""
        if not isinstance(files, dict) or split not in (None, *files):
            return files
        chosen = (
            {"train": files[split]}
            if split
            else {"train": files.get("train", next(iter(files.values())))}
        )
        return {**chosen, "test": files[held_out]} if held_out in files else chosen

    # What is done to rows.

    def _take_changes(self, source: _Source, other: _Source | None) -> None:
        """Take what changes the rows, leaves some out, or holds some out; leave to a person what it is not."""
        made: list[Object] = []
        reasons = by_key(read_keys("script-rows-calls"))
        for index, change in enumerate(source.changes):
            self._mark(change)
            name = change.last_name
            if name == "filter":
                key = "train" if "datasets" in self.report.tree.value else "path"
                fix = "name data without the rows that it leaves out; a recipe reads all rows"
                self.leave(f"dataset.{key}", None, change.node, f"{self._say_when(change)}{fix}")
            elif name in _NUMBERED:
                self._take_number(change, "limit", is_first=index == 0)
            elif name == "train_test_split":
                self._take_share(change, other)
            elif name in reasons:
                self.drop(self.code_of_change(change), change.node, reasons[name])
            else:
                made.append(change)
        if made:
            lines = ", ".join(
                f"line {self._line(each)}: `{self.code_of_change(each)}`" for each in made
            )
            self.add_to_do(
                "dataset.prompt",
                f"{self.file.name} changes the rows ({lines}); write what it makes of a row, as Jinja over its "
                f"columns\n{PROMPT_EXAMPLE}",
            )

    def _line(self, made: Object) -> str:
        return self.place(made.node).rpartition(":")[2]

    def _take_number(self, change: Object, key: str, *, is_first: bool) -> None:
        """Take the first rows of a dataset."""
        value = (change.args or {}).get("0") or (change.args or {}).get("indices")
        count = plain(value)
        if isinstance(count, list) and count == [*range(len(count))]:
            count = len(count)
        is_certain = is_first and not change.condition and change.last_name != "skip"
        if isinstance(count, int) and count > 0 and is_certain:
            self.extra[f"dataset.{key}"] = (self.code_of_change(change), count, change.node)
        else:
            fix = "write how many rows it takes; a recipe takes the first ones of the file"
            self.leave(f"dataset.{key}", None, change.node, f"{self._say_when(change)}{fix}")

    def _take_share(self, change: Object, other: _Source | None) -> None:
        args = change.args or {}
        share = args.get("test_size") or args.get("0")
        literal = plain(share) if share is not None else MISSING
        if other is None or change not in other.changes:
            fix = "write the share that is left out of training, such as 0.05"
            self.leave("dataset.eval_fraction", None, change.node, fix)
        elif isinstance(literal, float) and 0 < literal < 1:
            self.extra["dataset.eval_fraction"] = (
                "train_test_split.test_size",
                literal,
                change.node,
            )
            for name in args.keys() - {"test_size", "0"}:
                node, seed = self.node_of(change, name), plain(args[name])
                if name == "seed" and isinstance(seed, int):
                    self.extra["dataset.eval_seed"] = ("train_test_split.seed", seed, node)
                else:
                    self.drop(
                        f"train_test_split.{name}", node, "recipes draw the rows that are held out"
                    )
        else:
            fix = "write the share of the rows that is held out, such as 0.05"
            self.leave("dataset.eval_fraction", None, change.node, fix)

    @staticmethod
    def _say_when(change: Object) -> str:
        return f"only if `{change.condition}`: " if change.condition else ""

    # Held-out rows.

    def _find_held_out_split(self, source: _Source, other: _Source) -> Any:
        """Return the split that held-out rows are; MISSING unless they are of the dataset that is trained on."""
        if source.base is None or other.base is None or other.part is not MISSING:
            return MISSING
        first, second = (
            {
                name: code_of(node)
                for name, (_, node) in self._arguments(each).items()
                if name != "split"
            }
            for each in (source.base, other.base)
        )
        named = self._arguments(other.base).get("split")
        split = (
            plain(other.split) if other.split is not None else plain(named[0]) if named else MISSING
        )
        return split if first == second and isinstance(split, str) else MISSING

    def _take_held_out(
        self, source: _Source, other: _Source, value: Value | None, split: Any
    ) -> None:
        at = self.nodes_of["eval_dataset"]
        if other.part is not MISSING and other.base is source.base:
            pass  # of `train_test_split`
        elif split is not MISSING:
            files = self.report.get("datasets", 0, "data_files")
            if files is None:
                self.put("dataset_test_split", split, at)
            elif not (isinstance(files, dict) and "test" in files):
                self.leave("dataset.eval", value, at, "say which rows are held out")
        else:
            base = other.base
            about = (
                f"; they are `{code_of(base.node, 200)}` of line {self._line(base)}"
                if base is not None
                else ""
            )
            fix = f"say which rows are held out{about}; a recipe's are a split, files or a share of its dataset"
            self.leave("dataset.eval_split", value, at, fix)
        if other.base is not None and other.base is not source.base:
            self._mark(other.base)
        codes = {self.code_of_change(each) for each in source.changes}
        for change in other.changes:
            if change in source.changes:
                continue
            self._mark(change)
            code = self.code_of_change(change)
            if change.last_name in _NUMBERED:
                self._take_number(change, "eval_limit", is_first=change is other.changes[0])
            elif code in codes:
                self.drop(code, change.node, "as for the rows that are trained on")
            else:
                reason = by_key(read_keys("script-rows-calls")).get(change.last_name)
                what = "held-out rows are made as those that are trained on; write this into `dataset.prompt` too"
                self.drop(code, change.node, reason or what)
