"""axolotl's YAML with `rl: grpo` as a recipe.

Owns optimization, schedules and logging; weights and data are in `axolotl_parts.py`, the sections `trl`
and `vllm` in `axolotl_sections.py`, the keys without a place in `axolotl_keys.py`.
Source: axolotl, `src/axolotl/core/builders/`, `src/axolotl/core/trainers/grpo/`, docs/grpo.qmd.
"""

from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.axolotl_keys import (
    DROPPED,
    RENAMED,
    SAME,
)
from grpo_cli.convert.axolotl_parts import load_weights, take_data, take_precision
from grpo_cli.convert.axolotl_sections import take_section, take_server
from grpo_cli.convert.from_trl import keep_best_metric, take_warmup_ratio
from grpo_cli.convert.key_report import Ledger, find
from grpo_cli.convert.launching import take_deepspeed, take_fsdp
from grpo_cli.convert.rewards import take_rewards
from grpo_cli.convert.trl_table import drop_known, drop_unknown, take_field
from grpo_cli.convert.values import fits
from grpo_cli.convert.weights import take_plain
from grpo_cli.errors import Problem, RecipeError

_DEFAULT = "axolotl's default"
_TRACKERS = {
    "use_wandb": "wandb",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_tensorboard": "tensorboard",
}


def convert_axolotl(ledger: Ledger, folders: tuple[FilePath, ...]) -> None:
    """Takes every key of an axolotl config.

    Args:
        ledger: The account, nothing taken yet.
        folders: Where modules with rewards may lie, the recipe's folder first.

    Raises:
        RecipeError: The config is for another training than GRPO.
    """
    _take_method(ledger)
    load_weights(ledger)
    take_precision(ledger)
    take_data(ledger)
    take_rewards(ledger, {}, inside=("trl",), folders=folders)
    take_server(ledger)
    take_section(ledger)
    _take_batch(ledger)
    _take_optimization(ledger)
    _take_checkpoints(ledger)
    _take_logging(ledger)
    take_plain(ledger, ("seed",), "seed")
    take_deepspeed(ledger)
    take_fsdp(ledger)
    for name in ledger.rest():
        if name in DROPPED:
            empty = ledger.get(name) is None
            ledger.drop((name,), "empty, so the default holds" if empty else DROPPED[name])
        elif not drop_known(ledger, (name,), name):
            drop_unknown(ledger, (name,), {*DROPPED, *RENAMED, *SAME, *_OTHERS})


_OTHERS = """base_model adapter lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear datasets
    val_set_size optimizer lr_scheduler warmup_ratio gradient_checkpointing bf16 flash_attention
    saves_per_epoch evals_per_epoch wandb_name chat_template deepspeed fsdp fsdp_config seed""".split()


def _take_method(ledger: Ledger) -> None:
    method = ledger.get("rl")
    if method not in ("grpo", "gdpo"):
        node = ledger.node("rl")
        place = node.location if node is not None else ledger.tree.location
        told = f"trains by `rl: {method}`" if method else "does not say `rl: grpo`"
        message = f"{told}, and recipes train by GRPO"
        raise RecipeError([Problem(message, "convert a config with `rl: grpo`", "rl", place)])
    if method == "gdpo" and ledger.get("trl", "multi_objective_aggregation") is None:
        note = "what GDPO is"
        ledger.keep(("rl",), "training.multi_objective_aggregation", "normalize_then_sum", note)
    else:
        ledger.settle(("rl",), "training", "what recipes do")


def _take_batch(ledger: Ledger) -> None:
    for name, field in RENAMED.items():
        if ledger.node(name) is not None:
            take_field(ledger, (name,), field)
    for name in SAME:
        if ledger.node(name) is not None:
            take_field(ledger, (name,), name)
    training: dict[str, Any] = ledger.recipe.setdefault("training", {})
    micro = training.get("per_device_train_batch_size")
    whole = _positive(ledger.get("batch_size"))
    if whole is not None and "gradient_accumulation_steps" not in training:
        steps = max(1, int(whole // (_positive(micro) or 1)))
        note = "divided by micro_batch_size"
        ledger.keep(("batch_size",), "training.gradient_accumulation_steps", steps, note)
    if micro is None:
        ledger.add("training.per_device_train_batch_size", 1, _DEFAULT)
    if "per_device_eval_batch_size" not in training:
        ledger.add("training.per_device_eval_batch_size", micro or 1, f"{_DEFAULT}: as in training")
    if "num_train_epochs" not in training:
        ledger.add("training.num_train_epochs", 1, _DEFAULT)


def _positive(value: Any) -> int | float | None:
    """A number above 0; None for anything else."""
    counts = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return value if counts else None


def _take_optimization(ledger: Ledger) -> None:
    _take_optimizer(ledger)
    _take_scheduler(ledger)
    training: dict[str, Any] = ledger.recipe["training"]
    take_warmup_ratio(ledger, ("warmup_ratio",))
    if "warmup_steps" not in training:
        ledger.add("training.warmup_steps", 0.03, f"{_DEFAULT}: 3 % of all steps (at most 100)")
    _take_gradient_checkpointing(ledger)


def _take_optimizer(ledger: Ledger) -> None:
    name = ledger.get("optimizer")
    if name is not None:
        if fits("optim", name):
            ledger.keep(("optimizer",), "training.optim", name)
        else:
            ledger.drop(
                ("optimizer",), f"transformers has no optimizer `{name}`; its default is used"
            )
    args = ledger.get("optim_args")
    if isinstance(args, dict):
        text = ",".join(f"{key}={value}" for key, value in args.items())
        ledger.keep(("optim_args",), "training.optim_args", text)
    elif isinstance(args, str):
        ledger.keep(("optim_args",), "training.optim_args", args)


def _take_scheduler(ledger: Ledger) -> None:
    name = ledger.get("lr_scheduler")
    target = "training.lr_scheduler_type"
    ratio = ledger.get("cosine_min_lr_ratio")
    if name is None:
        ledger.add(target, "cosine", _DEFAULT)
    elif fits("lr_scheduler_type", name):
        ledger.keep(("lr_scheduler",), target, name)
    else:
        ledger.drop(("lr_scheduler",), f"transformers has no scheduler `{name}`")
        ledger.add(target, "cosine", f"in place of {name}")
    if ratio is not None and find(ledger.recipe, target) == "cosine":
        key = ("cosine_min_lr_ratio",)
        given = find(ledger.recipe, "training.lr_scheduler_kwargs")
        before = given if isinstance(given, dict) else {}
        ledger.keep(key, target, "cosine_with_min_lr")
        ledger.keep(key, "training.lr_scheduler_kwargs", {**before, "min_lr_rate": ratio})
    elif ledger.node("cosine_min_lr_ratio") is not None:
        ledger.drop(("cosine_min_lr_ratio",), "the scheduler is no cosine")


def _take_gradient_checkpointing(ledger: Ledger) -> None:
    key, target = ("gradient_checkpointing",), "training.gradient_checkpointing"
    value = ledger.get(*key)
    if value is None:
        ledger.add(target, False, _DEFAULT)
        if ledger.node(*key) is not None:
            ledger.drop(key, "empty, so the default holds")
    elif isinstance(value, bool):
        ledger.keep(key, target, value)
    else:
        ledger.keep(key, target, True, f"without axolotl's `{value}`")


def _take_checkpoints(ledger: Ledger) -> None:
    training: dict[str, Any] = ledger.recipe["training"]
    for name, steps, strategy in (
        ("saves_per_epoch", "save_steps", "save_strategy"),
        ("evals_per_epoch", "eval_steps", "eval_strategy"),
    ):
        count = _positive(ledger.get(name))
        if ledger.node(name) is not None and count is None:
            ledger.drop((name,), "no number above 0, so the default holds")
        elif count is not None:
            share = 1 / (count * (_positive(training["num_train_epochs"]) or 1))
            if share >= 1:
                ledger.keep((name,), f"training.{strategy}", "epoch", "once an epoch at most")
            else:
                note = "a share of all steps"
                ledger.keep((name,), f"training.{steps}", round(share, 6), note)
        if training.get(steps) is not None:
            training[strategy] = "steps"
    if "save_strategy" not in training:
        ledger.add("training.save_strategy", "epoch", _DEFAULT)
    if "save_total_limit" not in training:
        ledger.add("training.save_total_limit", 4, _DEFAULT)
    held_out = find(ledger.recipe, "dataset.eval_fraction") or _has_eval_rows(ledger)
    if training.get("eval_strategy") not in (None, "no") and not held_out:
        training["eval_strategy"] = "no"
        training.pop("eval_steps", None)
        ledger.comments["training.eval_strategy"] = "nothing is held out to evaluate on"
    patience = ledger.get("early_stopping_patience")
    if patience and training.get("eval_strategy") not in (None, "no"):
        target = "training.early_stopping.patience"
        ledger.keep(("early_stopping_patience",), target, patience)
        metric = training.get("metric_for_best_model") or "eval_loss"
        ledger.add("training.early_stopping.metric", metric, "what axolotl watches")
    keep_best_metric(ledger)


def _has_eval_rows(ledger: Ledger) -> bool:
    dataset = ledger.recipe.get("dataset", {})
    return "eval" in dataset or "eval_split" in dataset


def _take_logging(ledger: Ledger) -> None:
    trackers = [tracker for key, tracker in _TRACKERS.items() if ledger.get(key)]
    if ledger.get("wandb_project") and "wandb" not in trackers:
        trackers.append("wandb")
    for key, tracker in _TRACKERS.items():
        if ledger.node(key) is not None:
            ledger.settle((key,), "logging.report_to", tracker if ledger.get(key) else "off")
    if trackers:
        ledger.add("logging.report_to", trackers, "axolotl's switches")
    for key in ("wandb_name", "mlflow_run_name"):
        if ledger.get(key) is not None and not find(ledger.recipe, "logging.run_name"):
            ledger.keep((key,), "logging.run_name", ledger.get(key))
        elif ledger.node(key) is not None:
            ledger.drop((key,), "empty, or another tracker names the run")
