"""What TRL's command line cannot express is listed; what it can is in its words."""

from pathlib import Path

import pytest

from grpo_cli.convert.key_report import by_key, read_keys
from grpo_cli.convert.to_trl import flatten_recipe
from grpo_cli.convert.trl import LORA_NAMES
from grpo_cli.recipe.grpo_fields import read_grpo_fields
from grpo_cli.recipe.recipe import Recipe

BASE = {
    "name": "back",
    "model": {"path": "org/model"},
    "dataset": {"kind": "hub", "path": "org/rows"},
    "rewards": [{"kind": "think_format"}],
    "evaluation": {"limit": 0},
}


def flatten(folder=Path("/somewhere"), **changes):
    config = flatten_recipe(Recipe.model_validate({**BASE, **changes}), folder)
    return config.flat, dict(config.lost)


def test_streamed_data_is_streamed_by_trl_too():
    rows = {"kind": "hub", "path": "org/rows", "streaming": True}
    flat, lost = flatten(dataset=rows)
    assert (flat["dataset_streaming"], lost) == (True, {})
    rows = {"kind": "files", "train": ["rows.jsonl"], "streaming": {"buffer_size": 9}}
    flat, lost = flatten(dataset=rows)
    assert flat["streaming"] is True
    assert "dataset.streaming.buffer_size" in lost


def test_images_are_listed_as_what_the_command_line_cannot_say():
    rows = {"kind": "hub", "path": "org/rows", "prompt": {"images": "chart", "user": "x"}}
    model = {"path": "org/model", "processor": {"max_pixels": 9}}
    flat, lost = flatten(dataset=rows, model=model)
    assert {"dataset.prompt.images", "model.processor"} <= lost.keys()
    assert "processor" not in flat


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        ({"kind": "math", "answer": "solution", "extract": ["boxed"]}, "accuracy_reward"),
        ({"kind": "think_format"}, "think_format_reward"),
        (
            {"kind": "soft_overlong", "cache": 256, "max_length": 1280},
            "get_soft_overlong_punishment",
        ),
        ({"kind": "python", "path": "lib.scores:f"}, "lib.scores.f"),
        ({"kind": "python", "path": "/somewhere/lib/scores.py:f"}, "lib.scores.f"),
    ],
)
def test_rewards_that_trl_knows_go_by_its_names(reward, name):
    flat, lost = flatten(rewards=[{**reward, "weight": 0.5}])
    assert flat["reward_funcs"] == [name]
    assert flat["reward_weights"] == [0.5]
    assert lost == {}


@pytest.mark.parametrize(
    "reward",
    [
        {"kind": "math", "answer": "answer"},
        {"kind": "length", "target": 3},
        {"kind": "think_format", "prefilled": True},
        {"kind": "soft_overlong", "cache": 100},
        {"kind": "model", "path": "org/judge", "output": "sigmoid"},
    ],
)
def test_other_rewards_are_listed(reward):
    flat, lost = flatten(rewards=[reward])
    assert "reward_funcs" not in flat
    assert "no such reward" in lost[f"rewards.0 ({reward['kind']})"]


def test_a_reward_model_comes_first_and_its_weight_too():
    rewards = [
        {"kind": "think_format", "weight": 2},
        {"kind": "model", "path": "org/judge", "weight": 3},
    ]
    flat, lost = flatten(rewards=rewards)
    assert flat["reward_model_name_or_path"] == "org/judge"
    assert flat["reward_weights"] == [3, 2]
    assert lost == {}


def test_a_function_in_a_folder_elsewhere_says_where_to_start():
    flat, lost = flatten(rewards=[{"kind": "python", "path": "/other/scores.py:f"}])
    assert flat["reward_funcs"] == ["scores.f"]
    assert "/other" in lost["rewards.0 (python)"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"dataset": {**BASE["dataset"], "prompt": {"user": "{{ q }}"}}}, "dataset.prompt"),
        ({"dataset": {**BASE["dataset"], "columns": {"a": "b"}}}, "dataset.columns"),
        ({"dataset": {**BASE["dataset"], "limit": 5}}, "dataset.limit"),
        ({"dataset": {**BASE["dataset"], "max_prompt_length": 5}}, "dataset.max_prompt_length"),
        ({"dataset": {**BASE["dataset"], "revision": "v1"}}, "dataset.revision"),
        ({"dataset": {**BASE["dataset"], "difficulty": "adaptive"}}, "dataset.difficulty"),
        ({"evaluation": {}}, "evaluation"),
        ({"description": "d"}, "description"),
        ({"training": {"early_stopping": {}}}, "training.early_stopping"),
        ({"training": {"stop_when": ["no_signal"]}}, "training.stop_when"),
        ({"generation": {"dynamic_sampling": {}}}, "generation.dynamic_sampling"),
        ({"launch": {"stall_timeout_s": 5}}, "launch.stall_timeout_s"),
        ({"model": {"path": "a.gguf"}}, "model.path"),
        ({"model": {"path": "m", "chat_template": "{{ x }}"}}, "model.chat_template"),
        (
            {"generation": {"backend": "vllm", "vllm": {"mode": "server"}}},
            "generation.vllm.managed",
        ),
        ({"generation": {"vllm": {"mode": "server"}}}, "generation.vllm.managed"),
        ({"rewards": [{"kind": "think_format", "when": "a"}]}, "rewards.0 (think_format): when"),
    ],
)
def test_what_trl_cannot_express_is_listed(changes, key):
    _, lost = flatten(**changes)
    assert list(lost) == [key]
    assert lost[key]


def test_data_goes_by_its_splits_its_files_or_a_mixture_that_is_split():
    hub = {"kind": "hub", "path": "org/rows", "name": "main", "split": "a", "eval_split": "b"}
    flat, _ = flatten(dataset=hub)
    names = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
    assert [flat[name] for name in names] == ["org/rows", "main", "a", "b"]
    flat, _ = flatten(dataset={**BASE["dataset"], "eval_fraction": 0.1})
    assert flat["datasets"] == [{"path": "org/rows", "split": "train"}]
    assert flat["test_split_size"] == 0.1
    flat, lost = flatten(dataset={"kind": "files", "train": "a.csv", "eval": "b.csv"})
    assert flat["datasets"] == [{"path": "csv", "data_files": ["a.csv"]}]
    assert "dataset.eval" in lost
    _, lost = flatten(dataset={"kind": "inline", "rows": [{"prompt": "x"}]})
    assert "dataset.kind: inline" in lost


def test_auto_keeps_its_meaning():
    assert flatten()[0]["dtype"] == "float32"
    assert flatten(model={"path": "m", "lora": {}})[0]["dtype"] == "auto"


def test_on_a_cpu_trl_is_told_what_grpo_train_sets_by_itself():
    flat, _ = flatten(launch={"use_cpu": True})
    assert (flat["use_cpu"], flat["bf16"], flat["dataloader_pin_memory"]) == (True, False, False)
    flat, _ = flatten(launch={"use_cpu": True}, training={"bf16": True})
    assert flat["bf16"] is True


def test_the_best_checkpoint_is_told_by_the_reward_with_trl_too():
    best = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    flat, _ = flatten(training=best)
    assert (flat["metric_for_best_model"], flat["greater_is_better"]) == ("eval_reward", True)
    flat, _ = flatten(training={**best, "metric_for_best_model": "loss"})
    assert flat["metric_for_best_model"] == "loss"
    assert "greater_is_better" not in flat


def test_adapters():
    lora = {"r": 4, "rank_pattern": {"q_proj": 8}, "target_parameters": ["mlp.experts.down_proj"]}
    flat, lost = flatten(model={"path": "m", "adapter": "me/sft", "lora": lora})
    assert flat["lora_target_parameters"] == ["mlp.experts.down_proj"]
    assert lost.keys() >= {"model.adapter", "model.lora.rank_pattern"}
    assert "lora_model_dir" not in flat
    assert [each for each in flat if each in LORA_NAMES.values()] == [
        each for each in LORA_NAMES.values() if each in flat
    ]


@pytest.mark.parametrize(("strategy", "config"), [("ddp", "multi_gpu"), ("zero3", "zero3")])
def test_a_strategy_is_a_config_of_trls(strategy, config):
    flat, lost = flatten(launch={"strategy": strategy})
    assert flat["accelerate_config"] == config
    assert "8" in lost["launch.num_processes"]


def test_what_grpo_alone_knows_is_no_key_of_trls():
    known = read_grpo_fields().keys()
    for name in ("generation", "training", "logging"):
        section = getattr(Recipe.model_validate(BASE), name)
        assert set(type(section).model_fields) - section.OURS <= known
        assert not section.OURS & known
    flat, lost = flatten(
        generation={"sampling_parts": 2},
        training={"fast": {"max_tokens_per_micro_batch": 200}, "mode": "sync"},
    )
    assert flat.keys() <= flatten()[0].keys()
    assert lost.keys() == {
        "generation.sampling_parts",
        "training.fast.max_tokens_per_micro_batch",
    }


def test_no_section_of_a_recipe_is_left_out_in_silence():
    written = {
        *("name", "description", "seed", "model", "dataset", "rewards", "generation", "training"),
        *("launch", "logging", "evaluation", "expect"),
    }
    assert Recipe.model_fields.keys() - written <= by_key(read_keys("trl-cannot")).keys()
