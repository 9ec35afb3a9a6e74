"""open-r1's GRPO recipes, TRL configs with rewards, prompts and callbacks of their own, as a recipe.

Source: open-r1, `src/open_r1/configs.py`, `src/open_r1/rewards.py` and `src/open_r1/grpo.py`.
"""

from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.from_trl import take_dataset, take_rest, take_training
from grpo_cli.convert.key_report import Ledger
from grpo_cli.convert.rewards import BOXED, Table, Translated, list_names, take_rewards
from grpo_cli.convert.weights import take_model, take_plain
from grpo_cli.recipe.explanation import Path

_DEFAULT_REWARDS = ("accuracy", "format", "tag_count")
_FORMAT = r"\A<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
_TAGS = ["<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"]
_PARAMETERS: dict[str, tuple[str, str]] = {
    "cosine_min_value_wrong": ("cosine", "wrong_shortest"),
    "cosine_max_value_wrong": ("cosine", "wrong_longest"),
    "cosine_min_value_correct": ("cosine", "correct_longest"),
    "cosine_max_value_correct": ("cosine", "correct_shortest"),
    "cosine_max_len": ("cosine", "max_length"),
    "repetition_n_grams": ("repetition_penalty", "ngram_size"),
    "repetition_max_penalty": ("repetition_penalty", "max_penalty"),
    "max_completion_len": ("soft_overlong_punishment", "max_length"),
    "soft_punish_cache": ("soft_overlong_punishment", "cache"),
    "code_language": ("code_format", "pattern"),
}
"""Which reward a key is for, and the parameter it is there."""
_TRACKING = "set {} in the environment of `grpo train`"
_SANDBOX = "open-r1's services that run programs; `code` runs them in a sandbox of its own"
_DROPPED = {
    "benchmarks": "open-r1's Slurm jobs; `grpo eval RUN --harness lm-eval` measures benchmarks",
    "callbacks": "open-r1's own; `grpo export RUN --push org/name` uploads the result",
    "hub_model_revision": "nothing is pushed while training",
    "push_to_hub_revision": "nothing is pushed while training",
    "overwrite_hub_revision": "nothing is pushed while training",
    "wandb_entity": _TRACKING.format("WANDB_ENTITY"),
    "wandb_project": _TRACKING.format("WANDB_PROJECT"),
    "wandb_run_group": _TRACKING.format("WANDB_RUN_GROUP"),
    "wandb_log_unique_prompts": "completions go to the run folder",
    **dict.fromkeys(
        """code_provider code_eval_test_batch_size parallel_code_exec_per_proc ioi_provider
        e2b_router_url morph_router_url""".split(),
        _SANDBOX,
    ),
}
_KNOWN = frozenset(
    {*_PARAMETERS, *_DROPPED, "dataset_prompt_column", "system_prompt", "chat_template"}
    | {"dataset_mixture", "dataset_configs", "reward_funcs", "reward_weights", "dataset_name"}
)


def convert_open_r1(ledger: Ledger, folders: tuple[FilePath, ...]) -> None:
    """Takes every key of an open-r1 recipe.

    Args:
        ledger: The account, nothing taken yet.
        folders: Where modules with rewards may lie, the recipe's folder first.
    """
    take_model(ledger)
    take_plain(ledger, ("chat_template",), "model.chat_template")
    _take_data(ledger)
    _take_prompt(ledger)
    take_rewards(ledger, _rewards(ledger), default=_DEFAULT_REWARDS, folders=folders)
    _credit_parameters(ledger)
    for name, reason in _DROPPED.items():
        if ledger.node(name) is not None:
            ledger.drop((name,), reason)
    # Its recipes were written for a TRL whose mode was `server` where none was given.
    take_training(ledger, server_first=True)
    take_rest(ledger, _KNOWN)


def _take_data(ledger: Ledger) -> None:
    mixture: Path = ("dataset_mixture",)
    names = ledger.get("dataset_configs")
    if isinstance(names, list) and len(names) == 1:
        ledger.keep(("dataset_configs", 0), "dataset.name", names[0])
        ledger.settle(("dataset_configs",), "dataset.name", "its only entry")
    elif ledger.node("dataset_configs") is not None:
        ledger.drop(("dataset_configs",), "a recipe reads one configuration: `dataset.name`")
    if not isinstance(ledger.get(*mixture), dict):
        if ledger.node(*mixture) is not None:
            ledger.drop(mixture, "should be a mapping with `datasets`")
        take_dataset(ledger)
        return
    _take_mixture(ledger, mixture)
    if ledger.node("dataset_name") is not None:
        ledger.drop(("dataset_name",), "`dataset_mixture` is given too, and wins")


def _take_mixture(ledger: Ledger, mixture: Path) -> None:
    ledger.credit(mixture, "dataset")
    key = (*mixture, "datasets")
    listed = ledger.get(*key)
    if isinstance(listed, list) and listed and isinstance(listed[0], dict):
        ledger.settle(key, "dataset", "its first entry")
        ledger.recipe.setdefault("dataset", {})["kind"] = "hub"
        for name, target in (("id", "path"), ("config", "name"), ("split", "split")):
            take_plain(ledger, (*key, 0, name), f"dataset.{target}")
        for index in range(1, len(listed)):
            ledger.drop((*key, index), "a recipe reads one dataset; merge them into one beforehand")
        for name, reason in (
            ("columns", "all columns are kept"),
            ("weight", "there is no mixture"),
        ):
            if ledger.node(*key, 0, name) is not None:
                ledger.drop((*key, 0, name), reason)
    take_plain(ledger, (*mixture, "test_split_size"), "dataset.eval_fraction")
    if ledger.node(*mixture, "seed") is not None:
        ledger.drop((*mixture, "seed"), "the recipe's `seed` draws the evaluation rows")
    for name in ledger.rest(*mixture):
        ledger.drop((*mixture, name), f"unknown to {ledger.tool}")


def _take_prompt(ledger: Ledger) -> None:
    key = ("dataset_prompt_column",)
    if ledger.get("system_prompt") is not None:
        text = str(ledger.get("system_prompt"))
        ledger.keep(("system_prompt",), "dataset.prompt.system", _as_template(text))
    elif ledger.node("system_prompt") is not None:
        ledger.drop(("system_prompt",), "empty")
    if ledger.get(*key) is not None:
        ledger.keep(key, "dataset.prompt.user", f"{{{{ {ledger.get(*key)} }}}}")
        return
    if ledger.node(*key) is not None:
        ledger.drop(key, "empty, so the default holds")
    note = f"{ledger.tool}'s default column; its first versions took `problem`"
    ledger.add("dataset.prompt.user", "{{ prompt }}", note)


def _as_template(text: str) -> str:
    """The text as Jinja that renders to it."""
    marks = any(mark in text for mark in ("{{", "{%", "{#"))
    return f"{{% raw %}}{text}{{% endraw %}}" if marks else text


def _rewards(ledger: Ledger) -> Table:
    def parameters(reward: str, defaults: dict[str, Any]) -> dict[str, Any]:
        given = {
            name: ledger.get(key)
            for key, (owner, name) in _PARAMETERS.items()
            if owner == reward and ledger.get(key) is not None
        }
        return {**defaults, **given}

    language = ledger.get("code_language") or "python"
    none = "there is no such kind; a function of your own (`kind: python`) can do it"
    cosine = {"correct_shortest": 1.0, "correct_longest": 0.5, "wrong_shortest": 0.0}
    return {
        "accuracy": lambda: Translated(
            dict(BOXED), "a gold that cannot be read gave 1 there; here the reward does not apply"
        ),
        "format": lambda: Translated(
            _regex(_FORMAT), "its very pattern; `answer_format` minds white space less"
        ),
        "tag_count": lambda: Translated({"kind": "tag_count", "tags": list(_TAGS)}),
        "reasoning_steps": lambda: Translated(
            {"kind": "reasoning_steps", "target": 3}, "repeated and empty steps do not count here"
        ),
        "cosine": lambda: Translated(
            {
                "kind": "cosine_length",
                "of": dict(BOXED),
                **parameters("cosine", {**cosine, "wrong_longest": -0.5, "max_length": 1000}),
            },
            "open-r1 counts characters, this counts tokens: set `max_length` to about a quarter",
        ),
        "repetition_penalty": lambda: Translated(
            {
                "kind": "repetition",
                **parameters("repetition_penalty", {"ngram_size": 3, "max_penalty": -1.0}),
            }
        ),
        "soft_overlong_punishment": lambda: Translated(
            {
                "kind": "soft_overlong",
                **parameters("soft_overlong_punishment", {"max_length": 16384, "cache": 4096}),
            }
        ),
        "code_format": lambda: Translated(
            _regex(rf"\A<think>\n.*?\n</think>\n<answer>\n.*?```{language}.*?```.*?\n</answer>$")
        ),
        "length": lambda: Translated(None, f"it compares lengths within a group; {none}"),
        "code": lambda: Translated(
            None,
            "its tests lie in `verification_info.test_cases`; put them into a column of their own and write "
            "`{kind: code, tests: COLUMN, credit: share}`",
        ),
        "binary_code": lambda: Translated(
            None,
            "its tests lie in `verification_info.test_cases`; put them into a column of their own and write "
            "`{kind: code, tests: COLUMN}`",
        ),
        "ioi_code": lambda: Translated(None, "it needs open-r1's servers for C++"),
        "cf_code": lambda: Translated(None, "it needs open-r1's Piston servers"),
    }


def _regex(pattern: str) -> dict[str, Any]:
    return {"kind": "regex", "pattern": pattern, "flags": ["dotall", "multiline"]}


def _credit_parameters(ledger: Ledger) -> None:
    names = list_names(ledger.get("reward_funcs"))
    used = list(_DEFAULT_REWARDS) if names is None else names
    written = _reward_indices(ledger)
    for key, (owner, name) in _PARAMETERS.items():
        if ledger.node(key) is None:
            continue
        if owner not in used:
            ledger.drop((key,), f"`{owner}` is not among the rewards, so nothing reads it")
        elif owner in written and ledger.get(key) is not None:
            ledger.settle((key,), f"rewards.{written[owner]}.{name}", "")
        else:
            ledger.drop((key,), "empty, so the default holds")


def _reward_indices(ledger: Ledger) -> dict[str, int]:
    """Where each of the named rewards stands in the recipe."""
    names = list_names(ledger.get("reward_funcs")) or []
    entries = {entry.key: entry.target or "" for entry in ledger.entries}
    found: dict[str, int] = {}
    for index, name in enumerate(names):
        target = entries.get(f"reward_funcs.{index}") or entries.get("reward_funcs", "")
        if target.startswith("rewards."):
            found[name] = int(target.rpartition(".")[2])
    return found
