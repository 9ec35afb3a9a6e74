"""TRL's config (`trl grpo --config`, or a dump of `GRPOConfig`) and open-r1's as a recipe.

Source: `trl/scripts/grpo.py`, `trl/scripts/utils.py` and `GRPOConfig` of trl 0.14 to 1.16,
`TrainingArguments` of transformers 4.48 to 5.17; open-r1, `configs.py`, `rewards.py` and `grpo.py`.
"""

import re
from functools import partial
from itertools import chain, count
from pathlib import Path as FilePath
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_cli.convert import shared_keys as shared
from grpo_cli.convert.key_report import (
    EMPTY,
    KeyReport,
    Rule,
    Table,
    by_value,
    dropped,
    find,
    moved,
    put,
    read_keys,
    read_table,
    settled,
    switch,
    writes,
)
from grpo_cli.convert.shared_keys import Reward, Rewards
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.explanation import Path
from grpo_cli.recipe.recipe import Recipe

BUILDERS = ("json", "csv", "parquet")
"""What `load_dataset` calls files of a kind; a recipe tells them apart by their endings."""
PROMPT_EXAMPLE = (
    'prompt: {system: "Think step by step.", user: "{{ question }}"}\n'
    r"columns: {answer: {from: answer, regex: '####\s*(.+)$'}}   # what rewards receive"
)
"""An example of what replaces Python code that builds prompts."""
NO_DATASET = "say where the rows come from: `kind`, and `path` or `train`"

_KERNELS = switch(
    "model.init_kwargs.use_kernels",
    note="deprecated in TRL, which names this in its place; `pip install kernels`",
)


def fits(name: str, value: Any) -> bool:
    """Return whether a recipe takes a value for a field of `GRPOConfig`."""
    section: Any = Recipe
    for step in str(grpo_fields.home_of(name)).split("."):
        section = section.model_fields[step].annotation
    own = section.model_fields.get(name.removeprefix("vllm_"))
    kind = own.annotation if own else grpo_fields.python_type(grpo_fields.read_grpo_fields()[name])
    try:
        TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError:
        return False
    return True


def _take_field(report: KeyReport, key: Path, name: str) -> bool:
    """Take a field of `GRPOConfig`, under today's or an earlier name; return whether it is one."""
    today = grpo_fields.RENAMED.get(name, name)
    if today not in grpo_fields.read_grpo_fields() or grpo_fields.home_of(today) is None:
        return False
    value = report.get(*key)
    has_default = grpo_fields.read_grpo_fields()[today].default != "None"
    if today != name and report.node(today) is not None:
        report.drop(key, f"`{today}`, its name of today, is given too")
    elif today == "use_liger_kernel":
        report.apply(_KERNELS, key)
    elif value is not None or (has_default and fits(today, None)):
        report.keep(key, grpo_fields.key_in_home(today), value)
    else:
        report.drop(key, EMPTY)
    return True


def take_rest(report: KeyReport, known: set[str]) -> None:
    """Decide what no table took: fields of `GRPOConfig`, what a recipe refuses, and unknown keys."""
    known = {*known, *shared.MODEL, *shared.VLLM, *shared.SERVER_KEYS, *SCRIPT, *_DATA_KEYS}
    known |= {*grpo_fields.read_grpo_fields(), *grpo_fields.RENAMED}
    report.take(read_table("gone"))
    for name in report.rest():
        refusal = grpo_fields.refusal_of(name)
        if refusal is not None and name not in grpo_fields.RENAMED:
            report.drop((name,), refusal.removeprefix("remove it: "))
        elif not _take_field(report, (name,), name):
            report.drop_unknown((name,), known)


def _take_warmup_ratio(report: KeyReport, key: Path) -> None:
    """Take the share of warm-up steps, which transformers 5 reads from `warmup_steps` below 1."""
    ratio = report.get(*key)
    if report.get("warmup_steps"):
        report.drop(key, "`warmup_steps` is given too, and wins")
    elif not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        report.drop(key, "a share of all steps is at least 0 and below 1")
    else:
        report.keep(key, "training.warmup_steps", ratio, "below 1 it is a share of all steps")
        report.drop_all((), ("warmup_steps",), "0, so `warmup_ratio` holds")


def _take_generation_batch(report: KeyReport, key: Path) -> None:
    """Take one of the two sizes if both are given, as `GRPOConfig.to_dict()` does."""
    if report.get("steps_per_generation") is not None:
        note = "`steps_per_generation` is given too, and says the same for any number of GPUs"
        report.drop(key, note)
    else:
        _take_field(report, key, "generation_batch_size")


SCRIPT: Table = {
    "seed": "seed",
    "max_prompt_length": moved(
        "dataset.max_prompt_length",
        "removed from TRL, which cut longer prompts; their rows are dropped here",
    ),
    **shared.LAUNCH,
    "generation_batch_size": _take_generation_batch,
    "warmup_ratio": _take_warmup_ratio,
    "adafactor": switch("training.optim", "adafactor", "removed from transformers"),
}
"""Keys of the training that are no fields of `GRPOConfig` in a recipe."""
_DATA_KEYS = (
    "dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming datasets "
    "streaming test_split_size reward_funcs reward_weights reward_model_name_or_path"
).split()


def convert_trl(
    report: KeyReport, folders: tuple[FilePath, ...], rewards: Rewards | None = None
) -> None:
    """Take every key of a TRL config; modules with rewards may lie in `folders`, the recipe's first."""
    shared.take_model(report)
    _take_dataset(report)
    shared.take_rewards(report, {**shared.TRL_REWARDS, **(rewards or {})}, folders)
    _take_training(report)


def _take_training(
    report: KeyReport, known: tuple[str, ...] = (), *, server_first: bool = False
) -> None:
    """Take the keys of `GRPOConfig` and of accelerate's launcher, and drop what is left."""
    shared.take_sampling(report, server_first=server_first)
    report.take(SCRIPT)
    take_rest(report, {*known})
    if find(report.recipe, "training.eval_strategy") == "steps":
        # transformers evaluates as often as it logs if `eval_steps` is not given; TRL logs every 10.
        steps = find(report.recipe, "logging.logging_steps") or 10
        note = f"{report.tool} evaluates as often as it logs"
        report.add_missing("training.eval_steps", steps, note)
    keep_best_metric(report)


def keep_best_metric(report: KeyReport) -> None:
    """Write transformers' default metric of the best checkpoint; ours is the reward."""
    if find(report.recipe, "training.load_best_model_at_end") is True:
        report.add_missing("training.metric_for_best_model", "loss", f"{report.tool}'s default")


NAMED = read_table("named")


def _take_files(report: KeyReport, key: Path, target: str = "dataset") -> None:
    files = report.get(*key)
    if not isinstance(files, dict):
        report.keep(key, f"{target}.train", files)
        return
    report.keep(key, f"{target}.train", files.get("train", next(iter(files.values()))))
    held_out = [files[name] for name in ("test", "validation", "eval") if name in files]
    if held_out:
        report.keep(key, f"{target}.eval", held_out[0])


_SOURCE_KEYS = {"dataset.name": "config"}
"""Keys of a dataset that a source has by another name."""
_FILES: Table = {
    "path": settled("dataset.kind", "read from the files' endings"),
    "data_files": _take_files,
    "name": dropped("files have no configurations"),
    "split": dropped("files have no splits"),
}


def _take_dataset(report: KeyReport) -> None:
    """Take where the rows come from: a dataset of the hub, or the first of a mixture."""
    if report.get("datasets"):
        if _is_mixture(report, "datasets"):
            _take_sources(report, ("datasets",), "hub", "mixture")
            report.drop_all((), ("streaming",), "the sources of a mixture are not streamed")
        elif has_first(report, "datasets"):
            take_source(report, "datasets", 0)
            report.take({"streaming": switch("dataset.streaming", True)})
            report.take(read_table("mixture"), "datasets", 0)
            for name in report.rest("datasets", 0):
                report.drop_unknown(
                    ("datasets", 0, name), {*read_table("hub"), *read_table("mixture")}
                )
        else:
            report.to_do.setdefault("dataset", NO_DATASET)
        others = tuple(name for name in NAMED if name != "dataset_test_split")
        report.drop_all((), others, "`datasets` is given too, and wins")
        report.take({"test_split_size": "dataset.eval_fraction"})
        report.drop_all((), ("dataset_test_split",), "`test_split_size` makes the evaluation rows")
        return
    if report.get("dataset_name") is None:
        report.to_do.setdefault("dataset", NO_DATASET)
    else:
        report.recipe.setdefault("dataset", {})["kind"] = "hub"
    report.take(NAMED)
    evaluates = report.get("eval_strategy") or report.get("evaluation_strategy") or "no"
    if evaluates != "no" and report.get("dataset_name") is not None:
        report.add_missing("dataset.eval_split", "test", f"{report.tool}'s default")
    reason = "only a mixture (`datasets`) has it, and there is none"
    report.drop_all((), ("datasets", "test_split_size", "streaming"), reason)


def has_first(report: KeyReport, *key: str | int) -> bool:
    """Return whether a list of datasets has a first one, and drop the others."""
    listed = report.get(*key)
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
        report.drop(key, "should be a list of mappings, one for each dataset")
        return False
    report.settle(key, "dataset", "its first entry")
    for index in range(1, len(listed)):
        report.drop(
            (*key, index),
            "one dataset was taken; merge them beforehand, or list all under `dataset.sources`",
        )
    return True


def _is_mixture(report: KeyReport, *key: str | int) -> bool:
    """Return whether a list has several datasets."""
    listed = report.get(*key)
    return (
        isinstance(listed, list)
        and len(listed) > 1
        and all(isinstance(each, dict) for each in listed)
    )


def _take_sources(report: KeyReport, key: Path, *tables: str) -> None:
    """Take the datasets of a list as sources; `tables` are those of a single dataset."""
    report.settle(key, "dataset.sources")
    names: list[str] = []
    for index, entry in enumerate(report.get(*key)):
        names.append(_name_source(str(entry.get("path") or entry.get("id")), names))
        put(report.recipe, f"dataset.sources.{index}.name", names[-1])
        _take_source_keys(report, (*key, index), f"dataset.sources.{index}", tables)
    sources = [*find(report.recipe, "dataset.sources").values()]
    put(report.recipe, "dataset.sources", sources)
    if not any("ratio" in source for source in sources):
        note = (
            f"{report.tool} joins all rows; here each has as many prompts, unless `ratio` says more"
        )
        report.comment("dataset.sources", note)


def _name_source(path: str, taken: list[str]) -> str:
    """Return a name for a source that is not taken."""
    stem = re.sub(r"[^\w.]+", "-", path.rpartition("/")[2]).strip("-_.") or "source"
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(name for name in names if name not in taken)


def _take_source_keys(report: KeyReport, key: Path, place: str, tables: tuple[str, ...]) -> None:
    """Take the keys of one dataset of a mixture to a place in the recipe."""
    from_files = report.get(*key, "path") in BUILDERS and report.get(*key, "data_files")
    put(report.recipe, f"{place}.kind", "files" if from_files else "hub")
    rules = {name: rule for table in tables for name, rule in read_table(table).items()}
    if from_files:
        rules |= {**_FILES, "data_files": partial(_take_files, target=place)}
    own = {
        name: f"{place}.{_SOURCE_KEYS.get(rule, rule).rpartition('.')[2]}"
        for name, rule in rules.items()
        if isinstance(rule, str)
    }
    report.take({**rules, **own, **dict.fromkeys(("fraction", "weight"), f"{place}.ratio")}, *key)
    for each in report.rest(*key):
        report.drop_unknown((*key, each), set(rules))


def take_source(report: KeyReport, *key: str | int) -> None:
    """Take one dataset of a list: `path`, `name`, `split`, `data_files`."""
    from_files = report.get(*key, "path") in BUILDERS and report.get(*key, "data_files")
    report.recipe.setdefault("dataset", {})["kind"] = "files" if from_files else "hub"
    report.take(_FILES if from_files else read_table("hub"), *key)


_DEFAULT_REWARDS = ("accuracy", "format", "tag_count")
_CODE_FORMAT = r"\A<think>\n.*?\n</think>\n<answer>\n.*?```{}.*?```.*?\n</answer>$"
_PARAMETERS: dict[str, tuple[str, str, Any]] = read_keys("open-r1-parameters")
"""Which reward of open-r1 a key is for, the parameter it is in a recipe, and open-r1's default."""
_R1_REWARDS = shared.read_rewards("open-r1-rewards")


def _choose_system_prompt(value: Any) -> Rule:
    is_jinja = any(mark in str(value) for mark in ("{{", "{%", "{#"))
    text = f"{{% raw %}}{value}{{% endraw %}}" if is_jinja else str(value)
    return writes("dataset.prompt.system", text)


def _take_mixture(report: KeyReport, key: Path) -> None:
    if not isinstance(report.get(*key), dict):
        report.drop(key, "should be a mapping with `datasets`")
        return
    report.settle(key, "dataset", "its datasets")
    if _is_mixture(report, *key, "datasets"):
        _take_sources(report, (*key, "datasets"), "open-r1-first")
        note = "`weight` was the share of its rows that were kept, and is now its `ratio`"
        report.comment("dataset.sources", note)
    elif has_first(report, *key, "datasets"):
        report.recipe.setdefault("dataset", {})["kind"] = "hub"
        report.take(read_table("open-r1-first"), *key, "datasets", 0)
    report.take(read_table("open-r1-mixture"), *key)
    for name in report.rest(*key):
        report.drop((*key, name), f"unknown to {report.tool}")


_R1_KEYS: Table = {
    "dataset_mixture": _take_mixture,
    "system_prompt": by_value(_choose_system_prompt),
    "dataset_prompt_column": by_value(
        lambda column: writes("dataset.prompt.user", f"{{{{ {column} }}}}")
    ),
    **read_table("open-r1"),
}
R1_SIGNS = (*_R1_KEYS, *_PARAMETERS)
"""Keys of open-r1 that TRL does not have."""
R1_REWARD_SIGNS = tuple(_R1_REWARDS)
"""Reward functions of open-r1 that TRL does not have."""


def convert_open_r1(report: KeyReport, folders: tuple[FilePath, ...]) -> None:
    """Take every key of an open-r1 recipe: TRL's, and rewards, prompts and callbacks of its own."""
    shared.take_model(report)
    if isinstance(report.get("dataset_mixture"), dict):
        report.drop_all((), ("dataset_name",), "`dataset_mixture` is given too, and wins")
    else:
        _take_dataset(report)
    report.take(_R1_KEYS)
    if report.get("dataset_prompt_column") is None:
        note = f"{report.tool}'s default column; its first versions took `problem`"
        report.add("dataset.prompt.user", "{{ prompt }}", note)
    shared.take_rewards(report, _with_parameters(report), folders, _DEFAULT_REWARDS)
    _settle_parameters(report)
    # Its recipes were written for a TRL whose vLLM was a server if no mode was given.
    _take_training(report, R1_SIGNS, server_first=True)


def _with_parameters(report: KeyReport) -> Rewards:
    """Return open-r1's rewards with the parameters that the config gives them."""
    entries = {name: dict(reward.entry or {}) for name, reward in _R1_REWARDS.items()}
    for key, (owner, name, default) in _PARAMETERS.items():
        value = default if report.get(key) is None else report.get(key)
        entries[owner][name] = _CODE_FORMAT.format(value) if name == "pattern" else value
    return {name: Reward(entries[name] or None, each.note) for name, each in _R1_REWARDS.items()}


def _settle_parameters(report: KeyReport) -> None:
    names = shared.list_names(report.get("reward_funcs")) or []
    targets = {entry.key: entry.target for entry in report.entries}
    for key, (owner, name, _) in _PARAMETERS.items():
        if owner in names:
            place = f"reward_funcs.{names.index(owner)}"
            target = targets.get(place) or targets.get("reward_funcs")
            report.take({key: settled(f"{target}.{name}")})
        else:
            reason = f"`{owner}` is not among the rewards, so nothing reads it"
            report.drop_all((), (key,), reason)
