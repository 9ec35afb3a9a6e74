"""Whose config a file is, by the keys that tell. Reads keys only; does not judge their values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from grpo_cli.errors import Problem, RecipeError, UsageError, nearest
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import Node

Dialect = Literal["trl", "open-r1", "axolotl"]
DIALECTS: tuple[str, ...] = get_args(Dialect)
TOOLS: dict[Dialect, str] = {"trl": "TRL", "open-r1": "open-r1", "axolotl": "axolotl"}

_AXOLOTL = (
    "base_model rl trl micro_batch_size num_epochs adapter lora_target_linear sequence_len val_set_size"
).split()
_OPEN_R1 = (
    "dataset_prompt_column system_prompt dataset_mixture dataset_configs benchmarks callbacks "
    "hub_model_revision push_to_hub_revision overwrite_hub_revision wandb_entity wandb_project "
    "wandb_run_group wandb_log_unique_prompts cosine_min_value_wrong cosine_max_value_wrong "
    "cosine_min_value_correct cosine_max_value_correct cosine_max_len repetition_n_grams "
    "repetition_max_penalty code_language code_provider code_eval_test_batch_size "
    "parallel_code_exec_per_proc ioi_provider e2b_router_url morph_router_url soft_punish_cache"
).split()
OPEN_R1_REWARDS = (
    "accuracy format tag_count reasoning_steps cosine repetition_penalty length code binary_code "
    "ioi_code cf_code code_format soft_overlong_punishment"
).split()
_TRL = "model_name_or_path dataset_name reward_funcs reward_model_name_or_path use_vllm".split()
_OURS = frozenset({"model", "dataset", "rewards", "extends"})


@dataclass(frozen=True)
class Recognition:
    """Which tool a config is for, and by which keys that was seen."""

    dialect: Dialect
    signs: tuple[str, ...]
    """Telling keys; empty where the dialect was given."""


def recognise(tree: Node, asked: str | None, source: str) -> Recognition:
    """Tells the dialect of a config.

    Args:
        tree: The file as read.
        asked: What `--from` says.
        source: The file's name, for messages.

    Raises:
        UsageError: `--from` names no dialect.
        RecipeError: The file is no config of one of these tools.
    """
    if asked is not None:
        if asked not in DIALECTS:
            close = nearest(asked, DIALECTS)
            fix = f"--from {close}" if close else f"--from {', '.join(DIALECTS)}"
            raise UsageError(f"there is no dialect `{asked}`. Fix: use {fix}")
        _refuse_unless_mapping(tree)
        return Recognition(asked, ())  # type: ignore[arg-type]
    _refuse_unless_mapping(tree)
    keys = tree.value.keys()
    if _is_recipe(keys):
        fix = f"check it with `grpo check {source}`, or convert it with `--to trl`"
        raise RecipeError([Problem("is a recipe of grpo already", fix, location=tree.location)])
    named = tree.child("reward_funcs")
    rewards = named.plain() if named is not None and isinstance(named.value, list) else []
    signs: list[tuple[Dialect, list[str]]] = [
        ("axolotl", [key for key in _AXOLOTL if key in keys] if "base_model" in keys else []),
        (
            "open-r1",
            [key for key in _OPEN_R1 if key in keys]
            + [f"reward_funcs: {name}" for name in rewards if name in OPEN_R1_REWARDS],
        ),
        ("trl", [key for key in _TRL if key in keys]),
    ]
    for dialect, seen in signs:
        if seen:
            return Recognition(dialect, tuple(seen[:4]))
    message = "is no config of TRL, open-r1 or axolotl that could be told: it has none of " + (
        ", ".join(["base_model", *_TRL])
    )
    raise RecipeError(
        [
            Problem(
                message, "say whose it is with --from trl|open-r1|axolotl", location=tree.location
            )
        ]
    )


def _is_recipe(keys: Iterable[str]) -> bool:
    known = set(keys)
    fits = known <= {*Recipe.model_fields, "extends"}
    return len(known & _OURS) > (0 if fits else 1)


def _refuse_unless_mapping(tree: Node) -> None:
    if not isinstance(tree.value, dict):
        message = "is no config: the top level must be `key: value` lines"
        fix = "name the YAML file that the other tool reads"
        raise RecipeError([Problem(message, fix, location=tree.location)])
