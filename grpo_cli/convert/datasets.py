"""Where the rows come from: one dataset, or a list of them, as a recipe's dataset or its sources.

Source: `DatasetMixtureConfig` of trl 1.16; open-r1, `configs.py`; axolotl, `utils/schemas/datasets.py`.
"""

import re
from functools import partial
from itertools import count
from typing import Any

from grpo_cli.convert.key_report import KeyReport, Rule, find, put, read_table, settled, switch
from grpo_cli.recipe.yaml_tree import KeyPath

BUILDERS = ("json", "csv", "parquet")
"""What `load_dataset` calls files of a kind; a recipe tells them apart by their endings."""
FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet")
PROMPT_EXAMPLE = """prompt: {system: "Think step by step.", user: "{{ question }}"}
columns: {answer: {from: answer, regex: '####\\s*(.+)$'}}   # what rewards receive"""
"""An example of what replaces Python code that builds prompts."""
NO_DATASET = "say where the rows come from: `kind`, and `path` or `train`"
NAMED = read_table("named")
MIXTURE_KEYS = ("datasets", "test_split_size", "streaming")


def take_dataset(report: KeyReport) -> None:
    """Take where TRL's rows come from: a dataset of the hub, or `datasets`."""
    if report.get("datasets"):
        take_entries(report, "datasets")
        name = report.origin(("datasets",))[0]
        report.drop_all(NAMED, f"`{name}` is set too and takes precedence")
        report.take({"test_split_size": "dataset.eval_fraction"})
        if find(report.recipe, "dataset.sources") is None:
            report.take({"streaming": switch("dataset.streaming")})
        report.drop_all(("streaming",), "the sources of a mixture are not streamed")
        return
    report.take(NAMED)
    report.drop_all(MIXTURE_KEYS, "only `datasets` has it, and there is none")
    if report.get("dataset_name") is None:
        report.to_do.setdefault("dataset", NO_DATASET)
        return
    put(report.recipe, "dataset.kind", "hub")
    if (report.get("eval_strategy") or report.get("evaluation_strategy") or "no") != "no":
        report.add_missing("dataset.eval_split", "test", f"{report.tool}'s default")


def take_entries(report: KeyReport, *key: str) -> None:
    """Take a list of datasets: one is the recipe's dataset, several are its sources."""
    entries = report.get(*key)
    if not (isinstance(entries, list) and entries and all(isinstance(e, dict) for e in entries)):
        report.drop(key, "should be a list of mappings, one for each dataset")
        report.to_do.setdefault("dataset", NO_DATASET)
        return
    if len(entries) == 1:
        report.settle(key, "dataset", "its only entry")
        _take_entry(report, (*key, 0), "dataset")
        return
    report.settle(key, "dataset.sources")
    names: list[str] = []
    for index, entry in enumerate(entries):
        names.append(_name_source(str(entry.get("path") or entry.get("id")), names))
        put(report.recipe, f"dataset.sources.{index}.name", names[-1])
        _take_entry(report, (*key, index), f"dataset.sources.{index}")
    put(report.recipe, "dataset.sources", [*find(report.recipe, "dataset.sources").values()])
    note = f"`ratio` is a share of the prompts; {report.tool} joins rows, all or a share of them"
    report.comment("dataset.sources", note)


def _name_source(path: str, taken: list[str]) -> str:
    """Return a name for a source that is not taken."""
    stem = re.sub(r"[^\w.]+", "-", path.rpartition("/")[2]).strip("-_.") or "source"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(name for name in names if name not in taken)


def _take_entry(report: KeyReport, key: KeyPath, place: str) -> None:
    """Take the keys of one dataset to a place in the recipe."""
    path, files = report.get(*key, "path"), report.get(*key, "data_files")
    rules: dict[str, Rule] = {}
    if path in BUILDERS and files:
        take_files = partial(_take_files, place=place)
        rules = {
            "path": settled(f"{place}.kind", "read from the endings"),
            "data_files": take_files,
        }
    elif isinstance(path, str) and path.endswith(FILE_ENDINGS):
        rules = {"path": f"{place}.train"}
    put(report.recipe, f"{place}.kind", "files" if rules else "hub")
    if not rules:
        name = "name" if place == "dataset" else "config"
        rules = {
            **dict.fromkeys(("path", "id"), f"{place}.path"),
            **dict.fromkeys(("name", "config"), f"{place}.{name}"),
            "split": f"{place}.split",
        }
    if place != "dataset":
        rules |= dict.fromkeys(("fraction", "weight"), f"{place}.ratio")
    report.take(rules, *key)
    report.take(read_table("dataset-entry"), *key)
    for each in report.rest(*key):
        report.drop_unknown((*key, each), rules)


def _take_files(report: KeyReport, key: KeyPath, files: Any, place: str) -> None:
    if not isinstance(files, dict):
        report.keep(key, f"{place}.train", files)
        return
    report.keep(key, f"{place}.train", files.get("train", next(iter(files.values()))))
    held_out = [files[name] for name in ("test", "validation", "eval") if name in files]
    if held_out:
        report.keep(key, f"{place}.eval", held_out[0])


def take_held_out_share(report: KeyReport, key: KeyPath, size: Any) -> None:
    """Take the share of the rows that is held out."""
    if isinstance(size, int | float) and 0 < size < 1:
        report.keep(key, "dataset.eval_fraction", size)
    else:
        reason = "a share is needed: `dataset.eval_fraction`, above 0 and below 1"
        report.drop(key, reason if size else "nothing is held out")
