"""TRL's command-line config (`trl grpo --config`) as a recipe.

Owns the script's own keys; models, rewards, sampling and launching have modules of their own.
Source: `trl/scripts/grpo.py` and `trl/scripts/utils.py` of trl 1.16.
"""

from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import Ledger, find
from grpo_cli.convert.launching import LAUNCH_KEYS, take_launch
from grpo_cli.convert.rewards import Table, take_rewards, trl_rewards
from grpo_cli.convert.sampling import SAMPLING_KEYS, take_sampling
from grpo_cli.convert.trl_table import drop_known, drop_unknown, field_names, take_field
from grpo_cli.convert.weights import MODEL_KEYS, take_model, take_plain
from grpo_cli.recipe.explanation import Path

BUILDERS = frozenset({"json", "csv", "parquet"})
"""What `load_dataset` calls files of a kind; a recipe tells them apart by their endings."""
_SCRIPT = frozenset(
    """dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming datasets
    streaming test_split_size reward_funcs reward_weights reward_model_name_or_path
    max_prompt_length warmup_ratio env seed adafactor""".split()
)
PROMPT_EXAMPLE = (
    'prompt: {system: "Think step by step.", user: "{{ question }}"}\n'
    r"columns: {answer: {from: answer, regex: '####\s*(.+)$'}}   # what rewards receive"
)
"""What a person may write in the place of code that makes prompts."""
TRL_LOGGING_STEPS = 10
"""TRL's own default; transformers evaluates as often where `eval_steps` is not given."""


def convert_trl(
    ledger: Ledger, folders: tuple[FilePath, ...], rewards: Table | None = None
) -> None:
    """Takes every key of a TRL config.

    Args:
        ledger: The account, nothing taken yet.
        folders: Where modules with rewards may lie, the recipe's folder first.
        rewards: Names that stand for rewards beside TRL's own.
    """
    take_model(ledger)
    take_dataset(ledger)
    table = {**trl_rewards(), **(rewards or {})}
    take_rewards(ledger, table, model_key="reward_model_name_or_path", folders=folders)
    take_training(ledger)
    take_rest(ledger, _SCRIPT)


def take_training(ledger: Ledger, *, server_first: bool = False) -> None:
    """Takes the keys of `GRPOConfig`, of accelerate's launcher, and those of earlier versions.

    Args:
        ledger: The account.
        server_first: Whether the tool's vLLM is a server where no mode is given.
    """
    take_plain(ledger, ("seed",), "seed")
    take_prompt_length(ledger, ("max_prompt_length",))
    take_launch(ledger)
    take_sampling(ledger, server_first=server_first)
    take_batch(ledger)
    take_warmup_ratio(ledger, ("warmup_ratio",))
    if ledger.is_on("adafactor"):
        ledger.keep(("adafactor",), "training.optim", "adafactor", "removed from transformers")
    elif ledger.node("adafactor") is not None:
        ledger.settle(("adafactor",), "training.optim", "off")
    for name in ledger.rest():
        take_field(ledger, (name,), name)
    keep_eval_steps(ledger)
    keep_best_metric(ledger)
    if ledger.node("env") is not None:
        ledger.drop(("env",), "set environment variables where `grpo train` is started")


def take_rest(ledger: Ledger, known: frozenset[str]) -> None:
    """Drops what is left, each key with the reason."""
    names = {*known, *MODEL_KEYS, *LAUNCH_KEYS, *SAMPLING_KEYS, *field_names()}
    for name in ledger.rest():
        if not drop_known(ledger, (name,), name):
            drop_unknown(ledger, (name,), names)


def take_prompt_length(ledger: Ledger, key: Path) -> None:
    """Takes the longest prompt, which today's TRL no longer has."""
    note = "removed from TRL, which cut longer prompts; their rows are dropped here"
    take_plain(ledger, key, "dataset.max_prompt_length", note)


def take_batch(ledger: Ledger) -> None:
    """Takes one of the two sizes of a generation batch where both are given, as `GRPOConfig.to_dict()` does."""
    key = ("generation_batch_size",)
    if ledger.get(*key) is not None and ledger.get("steps_per_generation") is not None:
        ledger.drop(
            key, "`steps_per_generation` is given too, and says the same for any number of GPUs"
        )


def take_warmup_ratio(ledger: Ledger, key: Path) -> None:
    """Takes the share of warm-up steps, which transformers 5 reads from `warmup_steps` below 1."""
    if ledger.node(*key) is None:
        return
    ratio = ledger.get(*key)
    if ledger.get(*key[:-1], "warmup_steps"):
        ledger.drop(key, "`warmup_steps` is given too, and wins")
    elif isinstance(ratio, int | float) and 0 <= ratio < 1:
        ledger.keep(key, "training.warmup_steps", ratio, "below 1 it is a share of all steps")
        if ledger.node(*key[:-1], "warmup_steps") is not None:
            ledger.drop((*key[:-1], "warmup_steps"), "0, so `warmup_ratio` holds")
    else:
        ledger.drop(key, "a share of all steps is at least 0 and below 1")


def keep_eval_steps(ledger: Ledger) -> None:
    """Writes how often TRL evaluates where only its logging says so; we log more often."""
    training = ledger.recipe.get("training", {})
    if training.get("eval_strategy") == "steps" and training.get("eval_steps") is None:
        steps = find(ledger.recipe, "logging.logging_steps")
        note = f"{ledger.tool} evaluates as often as it logs"
        ledger.add("training.eval_steps", steps or TRL_LOGGING_STEPS, note)


def keep_best_metric(ledger: Ledger) -> None:
    """Writes by which metric transformers tells the best checkpoint where none is named; ours is the reward."""
    training = ledger.recipe.get("training", {})
    wanted = training.get("load_best_model_at_end") is True
    if wanted and training.get("metric_for_best_model") is None:
        ledger.add("training.metric_for_best_model", "loss", f"{ledger.tool}'s default")


def take_dataset(ledger: Ledger) -> None:
    """Takes where the rows come from: a dataset of the hub, or a mixture of one."""
    mixture = ledger.get("datasets")
    if isinstance(mixture, list) and mixture:
        _take_mixture(ledger, ("datasets",))
        for name in ("dataset_name", "dataset_config", "dataset_train_split"):
            if ledger.node(name) is not None:
                ledger.drop((name,), "`datasets` is given too, and wins")
        take_plain(ledger, ("test_split_size",), "dataset.eval_fraction")
        if ledger.node("dataset_test_split") is not None:
            ledger.drop(("dataset_test_split",), "`test_split_size` makes the evaluation rows")
    else:
        _take_named(ledger)
        for name in ("datasets", "test_split_size"):
            if ledger.node(name) is not None:
                ledger.drop((name,), "only a mixture (`datasets`) has it, and there is none")
    for name in ("dataset_streaming", "streaming"):
        if ledger.node(name) is not None:
            ledger.drop(
                (name,), "rows are loaded as a whole, so that they can be checked and counted"
            )


def _take_named(ledger: Ledger) -> None:
    if ledger.get("dataset_name") is None:
        if ledger.node("dataset_name") is not None:
            ledger.drop(("dataset_name",), "empty")
        ledger.to_do["dataset"] = "say where the rows come from: `kind`, and `path` or `train`"
    else:
        ledger.recipe.setdefault("dataset", {})["kind"] = "hub"
        ledger.keep(("dataset_name",), "dataset.path", ledger.get("dataset_name"))
    take_plain(ledger, ("dataset_config",), "dataset.name")
    take_plain(ledger, ("dataset_train_split",), "dataset.split")
    take_plain(ledger, ("dataset_test_split",), "dataset.eval_split")
    strategy = ledger.get("eval_strategy") or ledger.get("evaluation_strategy") or "no"
    dataset: dict[str, Any] = ledger.recipe.get("dataset", {})
    if strategy != "no" and "path" in dataset and "eval_split" not in dataset:
        ledger.add("dataset.eval_split", "test", f"{ledger.tool}'s default")


def _take_mixture(ledger: Ledger, key: Path) -> None:
    ledger.credit(key, "dataset")
    for index, _ in enumerate(ledger.get(*key)):
        if index:
            ledger.drop((*key, index), "a recipe reads one dataset; merge them into one beforehand")
    if not isinstance(ledger.get(*key, 0), dict):
        ledger.drop((*key, 0), "should be a mapping with a `path`")
        return
    take_source(ledger, (*key, 0))
    for name, reason in _MIXTURE_ONLY.items():
        if ledger.node(*key, 0, name) is not None:
            ledger.drop((*key, 0, name), reason)
    for name in ledger.rest(*key, 0):
        drop_unknown(ledger, (*key, 0, name), {"path", "name", "split", "data_files", "data_dir"})


_MIXTURE_ONLY = {
    "columns": "all columns are kept; rewards get those that they name",
    "fraction": "a share of a mixture, and there is no mixture",
    "data_dir": "name the files in `dataset.train`, with `kind: files`",
}


def take_source(ledger: Ledger, key: Path) -> None:
    """Takes one dataset of a list: `path`, `name`, `split`, `data_files`."""
    path = ledger.get(*key, "path")
    files = ledger.get(*key, "data_files")
    dataset = ledger.recipe.setdefault("dataset", {})
    if path in BUILDERS and files:
        dataset["kind"] = "files"
        ledger.settle((*key, "path"), "dataset.kind", "told by the files' endings")
        _take_files(ledger, (*key, "data_files"), files)
        for name in ("name", "split"):
            if ledger.node(*key, name) is not None:
                ledger.drop((*key, name), "files of one's own have no configurations and splits")
        return
    dataset["kind"] = "hub"
    take_plain(ledger, (*key, "path"), "dataset.path")
    take_plain(ledger, (*key, "name"), "dataset.name")
    take_plain(ledger, (*key, "split"), "dataset.split")
    if ledger.node(*key, "data_files") is not None:
        ledger.drop((*key, "data_files"), "a dataset of the hub is read by its splits")


def _take_files(ledger: Ledger, key: Path, files: Any) -> None:
    if not isinstance(files, dict):
        ledger.keep(key, "dataset.train", files)
        return
    ledger.keep(key, "dataset.train", files.get("train", next(iter(files.values()))))
    held_out = next((files[name] for name in ("test", "validation", "eval") if name in files), None)
    if held_out is not None:
        ledger.keep(key, "dataset.eval", held_out)
