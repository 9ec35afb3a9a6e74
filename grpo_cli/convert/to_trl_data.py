"""A recipe's data and rewards in TRL's terms: a dataset with a `prompt` column, functions by their names.

Source: `GRPOScriptArguments` and `DatasetMixtureConfig` of trl 1.16.
"""

from pathlib import Path
from typing import Any

from grpo_cli.recipe.dataset import FilesDataset, HubDataset
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig

Lost = list[tuple[str, str]]
_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_TRL_OVERLONG = (1280, 256)
"""The lengths with which `trl grpo` makes its `get_soft_overlong_punishment`."""
_NEVER = ("when", "timeout_s", "clip")


def take_dataset(recipe: Recipe, lost: Lost) -> dict[str, Any]:
    """The keys that name the rows; what a recipe does with them is listed in `lost`."""
    dataset = recipe.dataset
    fields: dict[str, Any] = {}
    if isinstance(dataset, HubDataset):
        fields = _hub(dataset)
        if dataset.revision is not None:
            lost.append(("dataset.revision", "TRL reads the newest revision"))
    elif isinstance(dataset, FilesDataset):
        fields = _files(dataset, lost)
    elif not recipe.is_sampled:
        reason = "TRL's command line always samples; it cannot train on responses that are scored already"
        lost.append(("dataset.kind: scored", reason))
    else:
        reason = "TRL reads datasets of the hub and files; write the rows to a file first"
        lost.append((f"dataset.kind: {dataset.kind}", reason))
    _list_lost(recipe, lost)
    return fields


def _hub(dataset: HubDataset) -> dict[str, Any]:
    if dataset.eval_fraction is not None and dataset.eval_split is None:
        source = {"path": dataset.path, "split": dataset.split}
        if dataset.name is not None:
            source["name"] = dataset.name
        return {"datasets": [source], "test_split_size": dataset.eval_fraction}
    fields: dict[str, Any] = {"dataset_name": dataset.path}
    if dataset.name is not None:
        fields["dataset_config"] = dataset.name
    if dataset.split != "train" or "split" in dataset.model_fields_set:
        fields["dataset_train_split"] = dataset.split
    if dataset.eval_split is not None:
        fields["dataset_test_split"] = dataset.eval_split
    return fields


def _files(dataset: FilesDataset, lost: Lost) -> dict[str, Any]:
    builder = _BUILDERS.get(Path(dataset.train[0]).suffix, "json")
    if dataset.eval is not None:
        lost.append(
            ("dataset.eval", "TRL takes no evaluation files; `test_split_size` splits rows off")
        )
    fields: dict[str, Any] = {"datasets": [{"path": builder, "data_files": list(dataset.train)}]}
    if dataset.eval_fraction is not None:
        fields["test_split_size"] = dataset.eval_fraction
    return fields


def _list_lost(recipe: Recipe, lost: Lost) -> None:
    dataset = recipe.dataset
    if dataset.prompt.user is not None or dataset.prompt.system is not None:
        reason = "TRL takes the column `prompt` as it is: write rendered prompts into the dataset"
        lost.append(("dataset.prompt", reason))
    if dataset.columns:
        names = ", ".join(dataset.columns)
        lost.append(("dataset.columns", f"write the columns {names} into the dataset"))
    for name in ("limit", "eval_limit"):
        if getattr(dataset, name) is not None:
            lost.append((f"dataset.{name}", "TRL takes all rows"))
    if dataset.max_prompt_length is not None:
        lost.append(("dataset.max_prompt_length", "TRL takes prompts of any length"))


def take_rewards(recipe: Recipe, folder: Path, lost: Lost) -> dict[str, Any]:
    """The keys that name the rewards TRL knows or can import, and their weights.

    Args:
        recipe: The recipe.
        folder: Where `trl grpo` will be started, from which it imports modules.
        lost: Gets the other rewards.
    """
    models: list[tuple[str, float]] = []
    functions: list[tuple[str, float]] = []
    for index, reward in enumerate(recipe.rewards):
        where = f"rewards.{index} ({reward.kind})"
        name = _name_reward(reward, recipe, folder, where, lost)
        if name is None:
            continue
        _list_options(reward, where, lost)
        if reward.kind == "model" and models:
            lost.append((where, "TRL's command line takes one reward model"))
        elif reward.kind == "model":
            models.append((name, reward.weight))
        else:
            functions.append((name, reward.weight))
    fields: dict[str, Any] = {}
    if models:
        fields["reward_model_name_or_path"] = models[0][0]
    if functions:
        fields["reward_funcs"] = [name for name, _ in functions]
    weights = [weight for _, weight in (*models, *functions)]
    if any(weight != 1 for weight in weights):
        fields["reward_weights"] = weights
    return fields


def _list_options(reward: RewardConfig, where: str, lost: Lost) -> None:
    for name in _NEVER:
        if getattr(reward, name) is not None:
            lost.append((f"{where}: {name}", "TRL's rewards have no such option"))
    if reward.on_error != "raise":
        lost.append((f"{where}: on_error", "a reward that raises ends TRL's run"))


def _name_reward(
    reward: RewardConfig, recipe: Recipe, folder: Path, where: str, lost: Lost
) -> str | None:
    """What TRL's command line calls a reward; None, and a reason in `lost`, where it has no name."""
    params = reward.params
    if reward.kind == "python":
        return _name_function(params, folder, where, lost)
    if reward.kind == "model" and params.keys() <= {"path"}:
        return str(params["path"])
    if reward.kind == "think_format" and not params.get("prefilled"):
        return "think_format_reward"
    if reward.kind == "math" and params.get("answer", "answer") == "solution":
        if params.get("extract") not in (["boxed"], "boxed"):
            lost.append((f"{where}: extract", "TRL counts boxed answers alone"))
        return "accuracy_reward"
    if reward.kind == "soft_overlong":
        longest = params.get("max_length") or recipe.generation.max_completion_length
        if (longest, params.get("cache")) == _TRL_OVERLONG:
            return "get_soft_overlong_punishment"
    fix = "write a function and name it as `module.function` in `reward_funcs`"
    if reward.kind == "math":
        fix = f"accuracy_reward reads the gold from the column `solution`; rename it, or {fix}"
    lost.append((where, f"TRL's command line has no such reward; {fix}"))
    return None


def _name_function(params: dict[str, Any], folder: Path, where: str, lost: Lost) -> str:
    source, _, function = str(params["path"]).rpartition(":")
    if params.get("kwargs"):
        lost.append((f"{where}: kwargs", "TRL passes columns alone; bind them in the function"))
    if not source.endswith(".py"):
        return f"{source}.{function}"
    file = Path(source)
    try:
        parts = file.relative_to(folder.resolve()).with_suffix("").parts
    except ValueError:
        parts = (file.stem,)
        lost.append((where, f"start `trl grpo` in {file.parent}, where it finds {file.name}"))
    return ".".join((*parts, function))
