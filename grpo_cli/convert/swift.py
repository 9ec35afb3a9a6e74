"""ms-swift's arguments for `rlhf_type: grpo`, from its YAML or JSON or from `swift rlhf`, as a recipe.

Source: ms-swift 4, `swift/arguments/`, `swift/rlhf_trainers/args_mixin.py`, `swift/rewards/orm.py`.
"""

import re
from pathlib import Path
from typing import Any

from grpo_cli.convert import trl
from grpo_cli.convert.datasets import (
    FILE_ENDINGS,
    NO_DATASET,
    PROMPT_EXAMPLE,
    take_entries,
    take_held_out_share,
)
from grpo_cli.convert.key_report import KeyReport, Table, find, read_keys, read_table
from grpo_cli.convert.rewards import (
    Reward,
    listed_rewards,
    read_rewards,
    take_parameters,
    take_rewards,
)
from grpo_cli.input_files import find_fault, read_input_text
from grpo_cli.recipe.yaml_tree import KeyPath, as_node

_DEFAULT = "ms-swift's default"
_DATASET = re.compile(
    r"(?P<path>[^#:]+(?::(?=//)[^#:]+)?)(?::(?P<subset>[^#]+))?(?:#(?P<count>\d+))?"
)


SWIFT_KEYS = frozenset(
    """val_dataset rlhf_type tuner_type train_type quant_bits adapters split_dataset_ratio system columns
    external_plugins reward_funcs reward_weights""".split()
) | {
    *read_keys("swift-names").values(),
    *read_keys("swift-parameters"),
    *(key for name in ("swift-model", "swift-rows", "swift") for key in read_table(name)),
}
"""Keys of ms-swift that are read, by TRL's names."""


def convert_swift(report: KeyReport, folders: tuple[Path, ...]) -> None:
    """Take every key of an ms-swift config; refuse one for another training than GRPO."""
    report.rename({"ENV": ""}, {**read_keys("swift-names"), "NPROC_PER_NODE": "num_processes"})
    trl.take_method(report, "rlhf_type", ("grpo",))
    _take_tuner(report)
    report.take(_MODEL)
    report.add_missing("model.dtype", "bfloat16", "ms-swift loads weights in bfloat16 on a GPU")
    trl.take_model(report, "swift-lora-defaults")
    _take_rows(report)
    report.take(_ROWS)
    _take_rewards(report, folders)
    report.take(read_table("swift"))
    trl.take_sampling(report)
    trl.take_training(report)
    for target, value in read_keys("swift-defaults").items():
        if report.get(target.rpartition(".")[2]) is None:
            report.add_missing(target, value, _DEFAULT)
    if {"eval", "eval_fraction"} & report.recipe.get("dataset", {}).keys():
        strategy = find(report.recipe, "training.save_strategy") or "steps"
        report.add_missing("training.eval_strategy", strategy, f"{_DEFAULT}: as `save_strategy`")
        if find(report.recipe, "training.eval_strategy") == "steps":
            steps = find(report.recipe, "training.save_steps") or 500
            report.add_missing("training.eval_steps", steps, f"{_DEFAULT}: as `save_steps`")
    _name_open_defaults(report)
    if "model.lora" not in report.to_do:
        rate = 1e-4 if find(report.recipe, "model.lora") is not None else 1e-5
        report.add_missing("training.learning_rate", rate, _DEFAULT)


def _name_open_defaults(report: KeyReport) -> None:
    """Name the defaults that are not written since flags that are not known may set others."""
    open_ = {
        target: value
        for target, value in read_keys("swift-defaults").items()
        if target.partition(".")[0] in report.unread and find(report.recipe, target) is None
    }
    if open_:
        pairs = ", ".join(f"`{target}: {value}`" for target, value in open_.items())
        text = f"without them ms-swift's defaults hold, which are not written here: {pairs}"
        report.add_to_do("training", text)


def _take_tuner(report: KeyReport) -> None:
    """Take how weights are trained: LoRA if the config does not say."""
    key = "tuner_type" if report.node("tuner_type") is not None else "train_type"
    kind = report.get(key) or ("" if "model.lora" in report.to_do else "lora")
    if kind == "lora" and report.node(key) is not None:
        report.keep((key,), "model.lora", {})
    elif kind == "lora":
        report.add("model.lora", {}, _DEFAULT)
    elif report.node(key) is not None:
        if kind == "full":
            report.settle((key,), "model", "all weights are trained")
        else:
            report.drop((key,), f"recipes have LoRA, and no `{kind}`")


def _take_bits(report: KeyReport, key: KeyPath, value: Any) -> None:
    if value in (4, 8):
        report.keep(key, "model.quantization", f"{value}bit")
    else:
        report.drop(key, "recipes quantize to 4 or 8 bits")


def _take_adapters(report: KeyReport, key: KeyPath, value: Any) -> None:
    folder = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(folder, str):
        report.keep(key, "model.adapter", folder)
    else:
        report.drop(key, "a recipe begins with one adapter: `model.adapter`")


_MODEL: Table = {**read_table("swift-model"), "quant_bits": _take_bits, "adapters": _take_adapters}


def _take_rows(report: KeyReport) -> None:
    listed = report.get("datasets")
    texts = [listed] if isinstance(listed, str) else listed
    if not (isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts)):
        report.to_do.setdefault("dataset", NO_DATASET)
        report.drop_all(("datasets",), "should be a list of names")
        return
    entries, counts = [], []
    for text in texts:
        match = _DATASET.fullmatch(text)
        path = match["path"] if match else text
        count = match["count"] if match else None
        subset = match["subset"] if match and not path.endswith(FILE_ENDINGS) else None
        entries.append({"path": path, **({"name": subset} if subset else {})})
        counts.append(int(count) if count else None)
    node = report.node("datasets")
    if node is not None:
        report.tree.value["datasets"] = as_node(entries, node.location)
    take_entries(report, "datasets")
    if len(entries) == 1 and counts[0]:
        report.add("dataset.limit", counts[0], f"dataset: {texts[0]}")
    elif any(counts):
        report.comment("dataset.sources", f"`#` is the number of rows: {', '.join(texts)}")
    if not all(entry["path"].endswith(FILE_ENDINGS) for entry in entries):
        report.comment("dataset", "ms-swift takes names from ModelScope unless `use_hf` is set")
    text = "ms-swift detects the columns of prompts; write the prompt as Jinja over the columns"
    report.add_to_do("dataset.prompt", f"{text}\n{PROMPT_EXAMPLE}")


def _take_val_dataset(report: KeyReport, key: KeyPath, value: Any) -> None:
    """Take the files of held-out rows."""
    names = value if isinstance(value, list) else [value]
    if all(isinstance(each, str) and each.endswith(FILE_ENDINGS) for each in names):
        report.keep(key, "dataset.eval", names[0] if len(names) == 1 else names)
    else:
        report.drop(key, "name them in `dataset.eval_split`, or in `dataset.eval` for files")


def _take_system(report: KeyReport, key: KeyPath, value: Any) -> None:
    """Take a system prompt, or the text of the file that it names."""
    file = Path(str(value)) if len(str(value)) < 256 and "\n" not in str(value) else None
    if file is not None and file.suffix == ".txt":
        if find_fault(file):
            report.drop(key, f"`{value}` was not found")
            report.to_do["dataset.prompt.system"] = f"write the text of `{value}`"
            return
        value = read_input_text(file, "replace")
    trl.take_system_prompt(report, key, value)


def _take_columns(report: KeyReport, key: KeyPath, value: Any) -> None:
    """Take ms-swift's columns, which name the new column of each old one."""
    names = trl.read_json(value)
    if names is None:
        report.drop(key, trl.NOT_JSON)
    else:
        report.keep(key, "dataset.columns", {str(new): str(old) for old, new in names.items()})


_ROWS: Table = {
    **read_table("swift-rows"),
    "split_dataset_ratio": take_held_out_share,
    "val_dataset": _take_val_dataset,
    "system": _take_system,
    "columns": _take_columns,
}


def _take_rewards(report: KeyReport, folders: tuple[Path, ...]) -> None:
    """Take ms-swift's rewards with their parameters; those of plugins are left to the user."""
    longest = report.get("max_completion_length") or 512
    names = listed_rewards(report) or ()

    def adapt(key: str, value: Any) -> Any:
        is_length = key in ("cosine_max_len", "soft_max_length")
        return longest if value is None and is_length else value

    rewards = read_rewards("swift-rewards")
    table = {**take_parameters(report, rewards, "swift-parameters", names, adapt)}
    plugins = report.get("external_plugins")
    report.drop_all(
        ("external_plugins",), "write its rewards as `{kind: python, path: FILE.py:NAME}`"
    )
    for name in names if plugins else ():
        table.setdefault(name, Reward(None, f"defined in the plugin {plugins}"))
    take_rewards(report, table, folders)
