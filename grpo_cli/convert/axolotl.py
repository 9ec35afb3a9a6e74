"""axolotl's YAML with `rl: grpo` as a recipe.

Source: axolotl, `src/axolotl/utils/schemas/`, `src/axolotl/core/builders/`,
`src/axolotl/core/trainers/grpo/`, docs/grpo.qmd and docs/rlhf.qmd.
"""

from pathlib import Path
from typing import Any

from grpo_cli.convert import trl
from grpo_cli.convert.datasets import NO_DATASET, PROMPT_EXAMPLE, take_entries, take_held_out_share
from grpo_cli.convert.key_report import KeyReport, Table, find, read_keys, read_table
from grpo_cli.convert.rewards import take_rewards
from grpo_cli.recipe.yaml_tree import KeyPath

_DEFAULT = "axolotl's default"
_LOCAL = ("None", "0.0.0.0", "127.0.0.1", "localhost")
_SECTIONS = {"trl": "", "vllm": "vllm_"}
"""Sections whose keys are TRL's, and what TRL writes before their names."""
_SERVER_FLAGS = read_table("axolotl-server-flags")


def convert_axolotl(report: KeyReport, folders: tuple[Path, ...]) -> None:
    """Take every key of an axolotl config; refuse one for another training than GRPO."""
    report.rename(_SECTIONS, read_keys("axolotl-names"))
    _take_method(report)
    report.take(_MODEL)
    dtype = "float32" if report.get("bf16") is False else "bfloat16"
    dtype = "float16" if report.is_on("fp16") else dtype
    note = "axolotl loads weights in the precision it trains in"
    report.add("model.dtype", dtype, note)
    trl.take_model(report, "axolotl-lora-defaults")
    _take_rows(report)
    take_rewards(report, {}, folders)
    _take_server(report)
    report.take(_TRAINING)
    trl.take_training(report)
    _add_defaults(report)
    _take_evaluation(report)


def _take_method(report: KeyReport) -> None:
    trl.take_method(report, "rl", ("grpo", "gdpo"))
    if report.get("rl") == "gdpo":
        target = "training.multi_objective_aggregation"
        report.keep(("rl",), target, "normalize_then_sum", "what GDPO is")


def _take_adapter(report: KeyReport, key: KeyPath, adapter: Any) -> None:
    if adapter not in ("lora", "qlora"):
        report.drop(key, f"recipes have LoRA, and no `{adapter}`")
        return
    report.keep(key, "model.lora", {}, "" if adapter == "lora" else "qlora")
    if adapter == "qlora" and report.node("load_in_4bit") is None:
        report.add("model.quantization", "4bit", "adapter: qlora")


def _take_bf16(report: KeyReport, key: KeyPath, value: Any) -> None:
    if isinstance(value, bool):
        report.keep(key, "training.bf16", value)
    else:
        report.settle(key, "training.bf16", "TRL's default: bf16, unless fp16 is set")


_MODEL: Table = {**read_table("axolotl-model"), "adapter": _take_adapter, "bf16": _take_bf16}


def _take_rows(report: KeyReport) -> None:
    """Take the datasets; what their `type` makes of rows is left to the user."""
    if report.get("datasets") is None:
        report.to_do["dataset"] = NO_DATASET
        return
    transform = report.get("datasets", 0, "type")
    name = f"`{transform}`" if isinstance(transform, str) else "axolotl"
    take_entries(report, "datasets")
    text = (
        f"write the prompt that {name} made of a row, as Jinja over the columns\n{PROMPT_EXAMPLE}"
    )
    report.to_do["dataset.prompt"] = text


def _take_server(report: KeyReport) -> None:
    """Take where vLLM runs; a server on this machine is one that `grpo train` starts itself."""
    is_colocated = report.get("vllm_mode") == "colocate"
    if not report.is_on("use_vllm"):
        report.drop_all(report.section("vllm"), "`trl.use_vllm` is not set")
    elif is_colocated:
        report.drop_all(_SERVER_FLAGS, trl.SHARED_GPU)
    elif str(report.get("vllm_server_host")) in _LOCAL:
        reason = "`grpo train` starts the server itself; for one of yours set `base_url`"
        report.drop_all(trl.SERVER_KEYS, reason)
    else:
        report.drop_all(report.section("vllm"), "the server is on another machine; set it there")
    report.take({**read_table("axolotl-server"), **_SERVER_FLAGS})
    trl.take_sampling(report, server_first=True)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _take_checkpointing(report: KeyReport, key: KeyPath, value: Any) -> None:
    note = "" if isinstance(value, bool) else f"without axolotl's `{value}`"
    report.keep(key, "training.gradient_checkpointing", value is not False, note)


def _take_times_per_epoch(report: KeyReport, key: KeyPath, times: Any) -> None:
    """Take `saves_per_epoch` and `evals_per_epoch` as a share of all steps."""
    kind, epochs = str(key[0]).partition("s_")[0], report.get("num_train_epochs") or 1
    if not _positive(times) or not _positive(epochs):
        report.drop(key, "not a number above 0, so the default applies")
    elif times * epochs <= 1:
        report.keep(key, f"training.{kind}_strategy", "epoch", "once an epoch at most")
    else:
        share = round(1 / (times * epochs), 6)
        report.keep(key, f"training.{kind}_steps", share, "a share of all steps")


def _take_tracker(report: KeyReport, key: KeyPath, value: Any) -> None:
    tracker = read_keys("axolotl-trackers")[str(key[0])]
    trackers = find(report.recipe, "logging.report_to") or []
    note = "set WANDB_PROJECT to name the project" if key[0] == "wandb_project" else ""
    if value and tracker not in trackers:
        report.keep(key, "logging.report_to", [*trackers, tracker], note)
    else:
        report.settle(key, "logging.report_to", note or "off")


_TRAINING: Table = {
    **read_table("axolotl"),
    "val_set_size": take_held_out_share,
    "gradient_checkpointing": _take_checkpointing,
    "saves_per_epoch": _take_times_per_epoch,
    "evals_per_epoch": _take_times_per_epoch,
    **dict.fromkeys(read_keys("axolotl-trackers"), _take_tracker),
}


def _add_defaults(report: KeyReport) -> None:
    training = report.recipe.setdefault("training", {})
    for kind in ("save", "eval"):
        if training.get(f"{kind}_steps") is not None:
            training[f"{kind}_strategy"] = "steps"
    for name, (value, note) in read_keys("axolotl-defaults").items():
        report.add_missing(f"training.{name}", value, note)
    size, note = training["per_device_train_batch_size"], f"{_DEFAULT}: as in training"
    report.add_missing("training.per_device_eval_batch_size", size, note)
    if not _positive(training.get("max_steps")):
        report.add_missing("training.num_train_epochs", 1, _DEFAULT)
    if training.get("sync_ref_model"):
        report.add_missing("training.ref_model_mixup_alpha", 0.9, _DEFAULT)
        report.add_missing("training.ref_model_sync_steps", 64, _DEFAULT)


def _take_evaluation(report: KeyReport) -> None:
    training = report.recipe["training"]
    evaluates = training.get("eval_strategy") not in (None, "no")
    if evaluates and find(report.recipe, "dataset.eval_fraction") is None:
        evaluates = False
        training.pop("eval_steps", None)
        report.add("training.eval_strategy", "no", "nothing is held out to evaluate on")
    if training.get("early_stopping") and evaluates:
        metric = training.get("metric_for_best_model") or "eval_loss"
        report.add("training.early_stopping.metric", metric, "what axolotl watches")
    elif training.pop("early_stopping", None):
        reason = "nothing is held out, so nothing is evaluated"
        report.drop(("early_stopping_patience",), reason)
