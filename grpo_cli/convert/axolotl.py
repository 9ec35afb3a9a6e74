"""axolotl's YAML with `rl: grpo` as a recipe.

Source: axolotl, `src/axolotl/utils/schemas/`, `src/axolotl/core/builders/`,
`src/axolotl/core/trainers/grpo/`, docs/grpo.qmd and docs/rlhf.qmd.
"""

from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert import shared_keys as shared
from grpo_cli.convert import trl
from grpo_cli.convert.key_report import (
    KeyReport,
    Rule,
    Table,
    by_value,
    dropped,
    find,
    read_keys,
    read_table,
    settled,
    writes,
)
from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue
from grpo_cli.recipe.explanation import Path

_DEFAULT = "axolotl's default"
_ENDINGS = (".json", ".jsonl", ".csv", ".parquet")
_LOCAL = ("None", "0.0.0.0", "127.0.0.1", "localhost")
_SECTIONS = {"trl": "", "vllm": "vllm_"}
"""Sections whose keys are TRL's, and what TRL writes before their names."""


def convert_axolotl(report: KeyReport, folders: tuple[FilePath, ...]) -> None:
    """Take every key of an axolotl config; refuse one for another training than GRPO."""
    report.rename(_SECTIONS, read_keys("axolotl-names"))
    _take_method(report)
    if report.is_on("lora_target_linear"):
        reason = "`lora_target_linear` takes all linear modules"
        report.drop_all((), ["lora_target_modules"], reason)
    report.take({**_MODEL, **shared.MODEL})
    dtype = "float32" if report.get("bf16") is False else "bfloat16"
    dtype = "float16" if report.is_on("fp16") else dtype
    note = "axolotl loads weights in the precision it trains in"
    report.add_missing("model.dtype", dtype, note)
    _take_rows(report)
    shared.take_rewards(report, {}, folders)
    _take_server(report)
    own = {**_TRAINING, **read_table("axolotl")}
    report.take({**own, **trl.SCRIPT})
    trl.take_rest(report, {*_MODEL, *own})
    _add_defaults(report)
    _take_evaluation(report)


def _take_method(report: KeyReport) -> None:
    method, node = report.get("rl"), report.node("rl")
    if method not in ("grpo", "gdpo"):
        cause = f"trains by `rl: {method}`" if method else "does not say `rl: grpo`"
        place = (node or report.source).location
        message = f"{cause}, and recipes train by GRPO"
        raise RecipeError([Issue(message, "convert a config with `rl: grpo`", "rl", place)])
    target = "training.multi_objective_aggregation"
    if method == "gdpo" and report.get("multi_objective_aggregation") is None:
        report.keep(("rl",), target, "normalize_then_sum", "what GDPO is")
    else:
        report.settle(("rl",), "training", "what recipes do")


def _choose_template(name: Any) -> Rule:
    if name == "jinja" or str(name).startswith("tokenizer_default"):
        return settled("model.chat_template", "the tokenizer's own, or the Jinja given")
    cause = f"axolotl's own template `{name}`; the tokenizer's is used."
    return dropped(f"{cause} Another one, as Jinja, goes to `model.chat_template`")


def _take_adapter(report: KeyReport, key: Path) -> None:
    adapter = report.get(*key)
    if adapter not in ("lora", "qlora"):
        report.drop(key, f"recipes have LoRA, and no `{adapter}`")
        return
    report.keep(key, "model.lora", {}, "" if adapter == "lora" else "qlora")
    if adapter == "qlora" and report.node("load_in_4bit") is None:
        report.add("model.quantization", "4bit", "adapter: qlora")


def _choose_bf16(value: Any) -> Rule:
    target, note = "training.bf16", "TRL's default: bf16, unless fp16 is set"
    return target if isinstance(value, bool) else settled(target, note)


_MODEL: Table = {
    **read_table("axolotl-model"),
    "chat_template": by_value(_choose_template),
    "adapter": _take_adapter,
    "bf16": by_value(_choose_bf16),
}


def _take_rows(report: KeyReport) -> None:
    """Take the first dataset; what its `type` makes of rows is left to a person."""
    if report.get("datasets") is None or not trl.has_first(report, "datasets"):
        report.to_do["dataset"] = trl.NO_DATASET
        return
    key = ("datasets", 0)
    path, form = report.get(*key, "path"), report.get(*key, "ds_type")
    report.take({"ds_type": settled("dataset.kind", "read from the files' endings")}, *key)
    if isinstance(path, str) and path.endswith(_ENDINGS) and form in (None, *trl.BUILDERS):
        report.recipe["dataset"] = {"kind": "files"}
        report.take({"path": "dataset.train"}, *key)
        report.drop_all(
            key, ("name", "split", "data_files"), "files have no configurations and splits"
        )
    else:
        trl.take_source(report, *key)
    transform = report.get(*key, "type")
    name = f"`{transform}`" if isinstance(transform, str) else "axolotl"
    report.drop_all(key, ("type",), f"{name} makes prompts of rows; write `dataset.prompt` instead")
    reason = "how axolotl reads rows; `dataset.prompt` replaces it"
    report.drop_all(key, list(report.rest(*key)), reason)
    report.to_do["dataset.prompt"] = (
        f"write what {name} made of a row, as Jinja over its columns\n{trl.PROMPT_EXAMPLE}"
    )


def _take_server(report: KeyReport) -> None:
    """Take where vLLM runs; a server on this machine is one that `grpo train` starts itself."""
    is_used, is_colocated = report.is_on("use_vllm"), report.get("vllm_mode") == "colocate"
    is_local = str(report.get("vllm_server_host")) in _LOCAL
    is_managed = is_used and is_local and not is_colocated
    report.take(read_table("axolotl-server"))
    if is_managed:
        names = ("vllm_server_host", "vllm_server_port", "vllm_server_timeout")
        reason = "`grpo train` starts the server itself; for one of yours set `base_url`"
        report.drop_all((), names, reason)
    if not is_used:
        report.drop_all((), report.section("vllm"), "`trl.use_vllm` is not set")
    elif is_colocated:
        report.drop_all((), _SERVER_FLAGS, shared.SHARED_GPU)
    elif not is_managed:
        report.drop_all((), report.section("vllm"), "of a server elsewhere")
    shared.take_sampling(report, server_first=True, managed=is_managed)
    report.take(_SERVER_FLAGS)


_SERVER_FLAGS = read_table("axolotl-server-flags")


def _choose_held_out(size: Any) -> Rule:
    if isinstance(size, int | float) and 0 < size < 1:
        return "dataset.eval_fraction"
    if size == 0:
        return settled("dataset", "nothing is held out")
    return dropped("a share is needed: `dataset.eval_fraction`, above 0 and below 1")


def _take_whole_batch(report: KeyReport, key: Path) -> None:
    target = "training.gradient_accumulation_steps"
    if report.get("gradient_accumulation_steps") is not None or not _positive(report.get(*key)):
        report.drop(key, "`micro_batch_size` and `gradient_accumulation_steps` decide it")
        return
    steps = report.get(*key) // (_positive(report.get("per_device_train_batch_size")) or 1)
    report.keep(key, target, max(1, int(steps)), "divided by micro_batch_size")


def _positive(value: Any) -> float:
    """Return a number above 0; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return max(value, 0) if is_number else 0


def _known(name: str, noun: str) -> Rule:
    """Return a rule for a choice that transformers may not have."""
    reason = f"transformers has no {noun} `{{}}`; the default is used"
    return by_value(
        lambda value: f"training.{name}" if trl.fits(name, value) else dropped(reason.format(value))
    )


def _take_lowest_rate(report: KeyReport, key: Path) -> None:
    if (find(report.recipe, "training.lr_scheduler_type") or "cosine") != "cosine":
        report.drop(key, "the scheduler is no cosine")
        return
    report.keep(key, "training.lr_scheduler_type", "cosine_with_min_lr")
    report.keep(key, "training.lr_scheduler_kwargs", {"min_lr_rate": report.get(*key)})


def _choose_gradient_checkpointing(value: Any) -> Rule:
    note = "" if isinstance(value, bool) else f"without axolotl's `{value}`"
    return writes("training.gradient_checkpointing", value is not False, note)


def _take_times_per_epoch(report: KeyReport, key: Path) -> None:
    """Take `saves_per_epoch` and `evals_per_epoch` as a share of all steps."""
    kind = str(key[0]).partition("s_")[0]
    count = _positive(report.get(*key)) * (_positive(report.get("num_train_epochs")) or 1)
    if not count:
        report.drop(key, "no number above 0, so the default holds")
    elif count <= 1:
        report.keep(key, f"training.{kind}_strategy", "epoch", "once an epoch at most")
    else:
        report.keep(key, f"training.{kind}_steps", round(1 / count, 6), "a share of all steps")


def _take_tracker(report: KeyReport, key: Path) -> None:
    tracker = read_keys("axolotl-trackers")[str(key[0])]
    trackers = find(report.recipe, "logging.report_to") or []
    note = "set WANDB_PROJECT to name the project" if key[0] == "wandb_project" else ""
    if report.get(*key) and tracker not in trackers:
        report.keep(key, "logging.report_to", [*trackers, tracker], note)
    else:
        report.settle(key, "logging.report_to", note or "off")


_TRAINING: Table = {
    "val_set_size": by_value(_choose_held_out),
    "batch_size": _take_whole_batch,
    "optimizer": _known("optim", "optimizer"),
    "lr_scheduler": _known("lr_scheduler_type", "scheduler"),
    "cosine_min_lr_ratio": _take_lowest_rate,
    "gradient_checkpointing": by_value(_choose_gradient_checkpointing),
    "saves_per_epoch": _take_times_per_epoch,
    "evals_per_epoch": _take_times_per_epoch,
    **dict.fromkeys(read_keys("axolotl-trackers"), _take_tracker),
}


def _add_defaults(report: KeyReport) -> None:
    training = report.recipe.setdefault("training", {})
    for kind in ("save", "eval"):
        if training.get(f"{kind}_steps") is not None:
            training[f"{kind}_strategy"] = "steps"
    if training.get("sync_ref_model"):
        report.add_missing("training.ref_model_mixup_alpha", 0.9, _DEFAULT)
        report.add_missing("training.ref_model_sync_steps", 64, _DEFAULT)
    micro = training.get("per_device_train_batch_size", 1)
    for name, value, note in (
        ("per_device_train_batch_size", 1, ""),
        ("per_device_eval_batch_size", micro, ": as in training"),
        ("num_train_epochs", 1, ""),
        ("lr_scheduler_type", "cosine", ""),
        ("warmup_steps", 0.03, ": 3 % of all steps (at most 100)"),
        ("gradient_checkpointing", False, ""),
        ("save_strategy", "epoch", ""),
        ("save_total_limit", 4, ""),
    ):
        report.add_missing(f"training.{name}", value, f"{_DEFAULT}{note}")


def _take_evaluation(report: KeyReport) -> None:
    training, rows = report.recipe["training"], report.recipe.get("dataset", {})
    evaluates = training.get("eval_strategy") not in (None, "no")
    if evaluates and rows.get("eval_fraction") is None:
        evaluates = False
        training["eval_strategy"] = "no"
        training.pop("eval_steps", None)
        report.comments["training.eval_strategy"] = "nothing is held out to evaluate on"
    if training.get("early_stopping") and evaluates:
        metric = training.get("metric_for_best_model") or "eval_loss"
        report.add("training.early_stopping.metric", metric, "what axolotl watches")
    elif training.pop("early_stopping", None):
        reason = "nothing is held out, so nothing is evaluated"
        report.drop(("early_stopping_patience",), reason)
    trl.keep_best_metric(report)
