"""The rows of a Python script: where they are loaded, and what is done to them.

Source: datasets 5 (`load_dataset`, `Dataset`).
"""

import ast
from typing import Any

from grpo_cli.convert.datasets import BUILDERS, NO_DATASET, PROMPT_EXAMPLE
from grpo_cli.convert.key_report import by_key, read_keys
from grpo_cli.convert.script_account import ScriptAccount
from grpo_cli.convert.script_parts import code_of_call, describe, is_item, rows_of
from grpo_cli.convert.script_values import (
    MISSING,
    NAMES,
    Function,
    Literal,
    Object,
    Value,
    code_of,
    describe_test,
    plain,
    reachable,
)

_READERS = {"from_json": "json", "from_csv": "csv", "from_parquet": "parquet"}
At = tuple[Value | None, ast.AST]
"""A value, and where it is written."""


class ScriptRows(ScriptAccount):
    """Takes the rows that a script gives `GRPOTrainer`."""

    def take_rows(self, train: At, held_out: At | None) -> None:
        """Take the rows that are trained on and held out: where they are loaded, and what changes them."""
        bases, passes = self.find(train[0], "rows")
        is_held_out = held_out is not None and plain(held_out[0]) is not None
        others, changes = self.find(held_out[0], "rows") if held_out else ([], [])
        base = bases[0] if len(bases) == 1 else None
        other = others[0] if len(others) == 1 else None
        split = self._find_held_out(base, other, held_out)
        if base is None:
            self.leave("dataset", *train, NO_DATASET)
            self._name_calls("dataset", [*bases, *passes])
            self._name_parts("dataset", train[0])
        else:
            self._take_source(base, train, split)
        codes = {each.node for each in passes}
        own = [each for each in changes if each.node not in codes] if is_held_out else []
        is_part = self._take_changes(passes if base else [], own, changes)
        if held_out is None or not is_held_out:
            return
        if not is_part:
            self._take_held_out(base, other, held_out, split)
        if other is None:
            self._name_calls("dataset.eval_split", others)
            self._name_parts("dataset.eval_split", held_out[0])

    def _name_parts(self, target: str, value: Value | None) -> None:
        """Name the rows that items such as `rows[rows["a"] > 1]` choose."""
        for item in reversed(reachable(value)):
            is_item = isinstance(item, Object) and item.name.startswith("[") and bool(item.parts)
            if is_item and not isinstance(plain(item.parts[0]), str | int):  # type: ignore[attr-defined]
                text = f"{self.locate(item.node)} has `{code_of(item.node, 200)}`"
                self.report.add_to_do(target, text)

    def _name_calls(self, target: str, calls: list[Object]) -> None:
        """Name calls that make or change rows for a key that is left to the user."""
        for made in calls:
            if not self.is_accounted(made.node):
                self.account(made.node, inside=True)
                when = f" {describe_test(self.when(made))}" if self.when(made) else ""
                text = f"{self.locate(made.node)} has `{code_of_call(made, 200)}`{when}"
                self.report.add_to_do(target, text)

    def _find_split(self, base: Object, value: Value | None) -> tuple[Value, ast.AST] | None:
        """Return the split of a dataset that a value is: an item, or the argument of `load_dataset`."""
        argument = (base.args or {}).get("split") or (base.args or {}).get("4")
        for item in rows_of(value):
            if not isinstance(item, Object) or not is_item(item) or not item.parts:
                continue
            calls = [made for made in rows_of(item.owner) if isinstance(made, Object)]
            is_part = any(made.last_name == "train_test_split" for made in calls)
            if base in calls and not is_part:
                index, listed = plain(item.parts[0]), plain(argument)
                if isinstance(index, int) and isinstance(listed, list):
                    return Literal.of(item.node, listed[index]), item.node
                if not isinstance(index, int):
                    return item.parts[0], item.node
        return (argument, self.node_of(base, "split")) if argument is not None else None

    def _find_held_out(self, base: Object | None, other: Object | None, at: At | None) -> Any:
        """Return the split that held-out rows are; MISSING unless they are of the dataset that is trained on."""
        if base is None or other is None or at is None:
            return MISSING
        codes = [
            {key: code_of(value.node) for key, value in (each.args or {}).items() if key != "split"}
            for each in (base, other)
        ]
        split = self._find_split(other, at[0])
        name = plain(split[0]) if split and codes[0] == codes[1] else MISSING
        return name if isinstance(name, str) else MISSING

    def _take_source(self, base: Object, at: At, held_out: Any) -> None:
        bound, reader = self.bind(base, NAMES["rows"]), _READERS.get(base.last_name)
        if (split := self._find_split(base, at[0])) is not None:
            bound["split"] = split
        data = {name: plain(value) for name, (value, _) in bound.items()}
        if base.last_name != "load_dataset" and reader is None:
            self.leave("dataset", None, base.node, NO_DATASET)
        elif reader is not None or data.get("path") in BUILDERS:
            names = ("data_files", "path_or_paths", *(["path"] if reader else []))
            files = next((data[name] for name in names if name in data), MISSING)
            if files is MISSING or not files:
                fix = "write `kind: files`, and the files as `train`"
                self.leave("dataset", base, base.node, fix)
            else:
                chosen = _choose_files(files, data.get("split"), held_out)
                entry = {"path": reader or data["path"], "data_files": chosen}
                self.put("datasets", [entry], base.node)
                self.report.show_as("datasets", "load_dataset")
            for name in (*names, "path", "split"):
                if name in bound:
                    self.account(bound.pop(name)[1], inside=True)
            self.take_all("load_dataset", bound, "script-files", "files have no such setting")
        else:
            if not data.get("path") or not isinstance(data["path"], str):
                path, node = bound.pop("path", (None, base.node))
                self.leave("dataset", path, node, "name the dataset: `kind: hub` and `path`")
            for name in bound.keys() & {"data_dir", "data_files", "**"}:
                value, node = bound.pop(name)
                self.leave("dataset", value, node, "write the files as `train`, with `kind: files`")
            self.take_all("load_dataset", bound, "script-load-dataset", "not a setting of a recipe")

    def _take_changes(self, passes: list[Object], own: list[Object], others: list[Object]) -> bool:
        """Take what leaves rows out, and leave the user what changes them; return whether a part is held out.

        `passes` is done to the rows that are trained on, `others` to held-out rows, and `own` to these alone.
        """
        made: list[str] = []
        is_part = False
        reasons = by_key(read_keys("script-rows-calls"))
        held_out = {**reasons, **by_key(read_keys("script-held-out-calls"))}
        for change in (*passes, *own):
            self.account(change.node, inside=True)
            name, code, test = change.last_name, code_of_call(change), self.when(change)
            when = f"only {describe_test(test)}: " if test else ""
            if name in NAMES["numbered"]:
                is_first = change in (*passes[:1], *others[:1])
                key = "limit" if change in passes else "eval_limit"
                self._take_number(change, key, when, is_first=is_first)
            elif change in own:
                self.drop(code, change.node, held_out.get(name, held_out["other"]))
            elif name == "filter":
                key = "train" if "datasets" in self.report.tree.value else "path"
                fix = "a recipe reads all rows; name data that is filtered already"
                self.leave(f"dataset.{key}", None, change.node, f"{when}{fix}")
            elif name == "train_test_split":
                is_part = change in others
                self._take_share(change, is_used=is_part)
            elif name in reasons:
                self.drop(code, change.node, reasons[name])
            else:
                made.append(f"{self.line_of(change.node)}: {when}`{code}`")
                self._take_template_kwargs(change)
        if made:
            text = f"{self.file.name} changes the rows ({', '.join(made)}); write the prompt that it makes"
            self.report.add_to_do(
                "dataset.prompt", f"{text}, as Jinja over the columns\n{PROMPT_EXAMPLE}"
            )
        return is_part

    def _take_template_kwargs(self, change: Object) -> None:
        """Take the arguments that functions that make prompts give the chat template."""
        own_names = read_keys("chat-template")["own"].split()
        own = {each.name: each.node for each in self.evaluator.functions}
        queue = [each.node for each in reachable(change) if isinstance(each, Function)]
        for function in queue:
            calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
            names = [code_of(call.func).rpartition(".")[2] for call in calls]
            queue += [own[name] for name in names if name in own and own[name] not in queue]
            for call, name in zip(calls, names, strict=True):
                listed = call.keywords if name == "apply_chat_template" else []
                for each in [each for each in listed if each.arg not in (None, *own_names)]:
                    target = f"generation.chat_template_kwargs.{each.arg}"
                    if isinstance(each.value, ast.Constant):
                        key = f"apply_chat_template.{each.arg}"
                        self.write(target, key, each.value.value, each.value)
                    else:
                        self.leave(target, None, each.value)

    def _take_number(self, change: Object, key: str, when: str, *, is_first: bool) -> None:
        """Take the first rows of a dataset."""
        args = change.args or {}
        count = plain(args.get("0") or args.get("indices") or args.get("n"))
        if isinstance(count, list) and count == [*range(len(count))]:
            count = len(count)
        is_certain = is_first and not when and change.last_name != "skip"
        if isinstance(count, int) and count > 0 and is_certain:
            self.write(f"dataset.{key}", code_of_call(change), count, change.node)
        else:
            fix = "write how many rows it takes; a recipe takes the first ones of the file"
            self.leave(f"dataset.{key}", None, change.node, f"{when}{fix}")

    def _take_share(self, change: Object, *, is_used: bool) -> None:
        bound = self.bind(change, ["test_size", "train_size"])
        name = "test_size" if "test_size" in bound else "train_size"
        share, node = bound.pop(name, (None, change.node))
        size = plain(share)
        size = round(1 - size, 6) if name == "train_size" and isinstance(size, float) else size
        if not is_used or not isinstance(size, float) or not 0 < size < 1:
            what = f"{size:g}" if isinstance(size, float) else "such as 0.05"
            about = describe(share, node) if size is MISSING and share is not None else ""
            about = f" (`{code_of(node)}`{about})" if about else ""
            place = f"{self.locate(change.node)} has `{code_of_call(change, 200)}`{about}"
            text = f"{place}; write the share of the rows that is left out of training, {what}"
            self.report.add_to_do("dataset.eval_fraction", text)
            if "seed" in bound and plain(bound["seed"][0]) is MISSING:
                self.leave("dataset.eval_seed", *bound["seed"])
            return
        self.write("dataset.eval_fraction", f"train_test_split.{name}", size, node)
        if "seed" in bound:
            self.take_all("train_test_split", bound, "script-split")
        self.drop_all("train_test_split", bound, "recipes draw the rows that are held out")

    def _take_held_out(self, base: Object | None, other: Object | None, at: At, split: Any) -> None:
        files = self.report.get("datasets", 0, "data_files")
        if split is not MISSING and files is None:
            self.put("dataset_test_split", split, at[1])
        elif split is MISSING or not (isinstance(files, dict) and "test" in files):
            about = ""
            if other is not None and other is not base:
                about = f"; they are `{code_of(other.node, 200)}` of {self.line_of(other.node)}"
            fix = (
                f"say which rows are held out{about}: write `eval_split`, `eval` or `eval_fraction`"
            )
            self.leave("dataset.eval_split", *at, fix)
        if other is not None:
            self.account(other.node, inside=True)


def _choose_files(files: Any, split: Any, held_out: Any) -> Any:
    """Return the files of the splits that are trained on and, if the trainer has such rows, held out."""
    if not isinstance(files, dict) or split not in (None, *files):
        return files
    train = files[split] if split else files.get("train", next(iter(files.values())))
    return {"train": train, "test": files[held_out]} if held_out in files else {"train": train}
