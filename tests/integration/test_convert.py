"""What `grpo convert` writes is taken by TRL's own parser, and a dump of TRL's own config is taken by it."""

import json

import pytest
import yaml

from tests.recipe_texts import write_recipe
from tests.unit.convert.readings import NAMES, read

RECIPE = """\
name: rich
seed: 7
model:
  path: org/model
  revision: v2
  dtype: bfloat16
  attn_implementation: sdpa
  lora: {r: 8, lora_alpha: 16, lora_dropout: 0.1, target_modules: [q_proj, v_proj], use_rslora: true}
  init_kwargs: {rope_theta: 10000}
dataset: {kind: hub, path: org/rows, name: main, split: a, eval_split: b}
rewards:
  - {kind: model, path: org/judge, weight: 0.5}
  - {kind: think_format, weight: 0.25}
  - {kind: python, path: "lib.scores:brevity"}
generation:
  num_generations: 4
  max_completion_length: 99
  temperature: 0.7
  min_p: 0.05
  chat_template_kwargs: {enable_thinking: false}
  vllm: {importance_sampling_clip_max: null, gpu_memory_utilization: 0.2}
training:
  per_device_train_batch_size: 4
  per_device_eval_batch_size: 4
  learning_rate: 3e-5
  lr_scheduler_type: cosine_with_min_lr
  lr_scheduler_kwargs: {min_lr_rate: 0.1}
  warmup_steps: 0.1
  eval_strategy: steps
  eval_steps: 20
  save_strategy: no
  beta: 1e-3
  scale_rewards: batch
  loss_type: dr_grpo
  optim: adamw_torch
  gradient_checkpointing_kwargs: {use_reentrant: false}
  max_steps: 10
launch: {use_cpu: true, num_processes: 2, strategy: ddp}
logging: {report_to: none, run_name: "1e-6", log_level: info}
"""


def parse(text, folder):
    """What `trl grpo --config` makes of a config, and what it hands on to accelerate."""
    from trl.scripts.grpo import make_parser

    path = folder / "trl.yaml"
    path.write_text(text, encoding="utf-8")
    return make_parser().parse_args_and_config(
        ["--config", str(path)], return_remaining_strings=True, separate_remaining_strings=True
    )


@pytest.mark.slow
def test_trls_parser_takes_every_value(tmp_path):
    from grpo_cli.convert.conversion import convert_file

    converted = convert_file(write_recipe(tmp_path, RECIPE), None, "trl", None)
    assert converted.valid
    script, args, model, data, rest, _ = parse(converted.text, tmp_path)
    expected = {
        "seed": 7,
        "num_generations": 4,
        "max_completion_length": 99,
        "temperature": 0.7,
        "min_p": 0.05,
        "chat_template_kwargs": {"enable_thinking": False},
        "vllm_importance_sampling_clip_max": None,
        "vllm_gpu_memory_utilization": 0.2,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-5,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_strategy": "no",
        "beta": 1e-3,
        "scale_rewards": "batch",
        "loss_type": "dr_grpo",
        "optim": "adamw_torch",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "max_steps": 10,
        "use_cpu": True,
        "report_to": [],
        "run_name": "1e-6",
        "log_level": "info",
        "logging_steps": 1,
        "reward_weights": [0.5, 0.25, 1.0],
        "model_init_kwargs": {"rope_theta": 10000},
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert (model.model_name_or_path, model.model_revision) == ("org/model", "v2")
    assert (model.dtype, model.use_peft, model.use_rslora) == ("bfloat16", True, True)
    assert (model.lora_r, model.lora_alpha, model.lora_dropout) == (8, 16, 0.1)
    assert model.lora_target_modules == ["q_proj", "v_proj"]
    assert script.reward_model_name_or_path == "org/judge"
    assert script.reward_funcs == ["think_format_reward", "lib.scores.brevity"]
    assert (script.dataset_name, script.dataset_config) == ("org/rows", "main")
    assert (script.dataset_train_split, script.dataset_test_split) == ("a", "b")
    assert data.datasets == []
    assert sorted(rest) == ["--accelerate_config", "--num_processes", "2", "multi_gpu"]


@pytest.mark.slow
def test_accelerates_launcher_knows_what_trl_hands_on(tmp_path):
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    from grpo_cli.convert.conversion import convert_file

    text = convert_file(write_recipe(tmp_path, RECIPE), None, "trl", None).text
    rest = parse(text, tmp_path)[-2]
    launch = launch_command_parser().parse_args(
        [*resolve_accelerate_config_argument(rest), "script.py"]
    )
    assert launch.num_processes == 2
    assert launch.config_file.endswith("multi_gpu.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_trls_parser_takes_what_other_tools_configs_became(name, tmp_path):
    from grpo_cli.convert.to_trl import flatten_recipe
    from grpo_cli.recipe.recipe import Recipe

    tree = read(name).recipe
    # A machine without GPUs cannot even hold these settings otherwise.
    tree.setdefault("launch", {})["use_cpu"] = True
    for key in ("bf16", "tf32"):
        tree["training"].pop(key, None)
    tree["logging"] = {"report_to": []}
    # TRL counts at world size 1 here, which is not the recipe's.
    tree["training"]["per_device_train_batch_size"] = tree["generation"]["num_generations"]
    tree["training"]["per_device_eval_batch_size"] = tree["generation"]["num_generations"]
    recipe = Recipe.model_validate(tree)
    config = flatten_recipe(recipe, tmp_path)
    _, args, model, _, _, _ = parse(config.write("r"), tmp_path)
    assert model.model_name_or_path == recipe.model.path
    assert args.learning_rate == recipe.training.learning_rate
    assert args.num_train_epochs == recipe.training.num_train_epochs
    assert args.max_completion_length == recipe.generation.max_completion_length


@pytest.mark.slow
@pytest.mark.parametrize("form", [json, yaml])
def test_a_dump_of_trls_config_passes_check_once_what_it_lacks_is_written(form, tmp_path):
    from trl import GRPOConfig

    from grpo_cli.checks.recipe_checks import check_recipe
    from grpo_cli.convert.conversion import convert_file

    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        learning_rate=2e-6,
        gradient_accumulation_steps=4,
        warmup_steps=0.1,
        report_to="none",
        bf16=False,
        use_cpu=True,
    ).to_dict()
    assert config["generation_batch_size"] == 32
    path = tmp_path / f"dump.{form.__name__}"
    path.write_text((json.dumps if form is json else yaml.safe_dump)(config), encoding="utf-8")
    output = tmp_path / "new.yaml"
    converted = convert_file(path, None, "recipe", output)
    assert [each for each in converted.problems if each.level == "error"] == []
    assert set(converted.report.to_do) == {"model.path", "dataset", "rewards"}
    missing = [
        "model.path=org/model",
        "dataset={kind: hub, path: org/rows}",
        "rewards=[{kind: think_format}]",
    ]
    recipe = check_recipe(output, missing).recipe
    assert (recipe.generation.steps_per_generation, recipe.training.warmup_steps) == (4, 0.1)
    assert (recipe.training.learning_rate, recipe.launch.use_cpu) == (2e-6, True)
