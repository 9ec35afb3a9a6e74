"""Single rules: names of earlier versions, rewards, servers, sharding, adapters, recognition."""

import json
from pathlib import Path

import pytest

from grpo_cli.convert.conversion import recognise
from grpo_cli.convert.key_report import find, load_keys, read_keys
from grpo_cli.convert.rewards import place_function
from grpo_cli.convert.script_parts import find_target
from grpo_cli.errors import RecipeError, UsageError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import read_text
from tests.unit.convert.readings import convert, reasons

SCHEMA = Path(__file__).parents[3] / "recipes" / "recipe.schema.json"

TRL = "model_name_or_path: m\ndataset_name: d\nreward_funcs: [think_format_reward]\n"


def take(lines):
    return convert(TRL + lines, "trl")


@pytest.mark.parametrize(
    ("line", "target", "value"),
    [
        ("evaluation_strategy: epoch", "training.eval_strategy", "epoch"),
        ("torch_dtype: torch.float16", "model.dtype", "float16"),
        ("max_prompt_length: 99", "dataset.max_prompt_length", 99),
        ("warmup_ratio: 0.2", "training.warmup_steps", 0.2),
        (
            "vllm_importance_sampling_cap: 2.5",
            "generation.vllm.importance_sampling_clip_max",
            2.5,
        ),
        (
            "vllm_importance_sampling_clip_max: null",
            "generation.vllm",
            {"importance_sampling_clip_max": None},
        ),
        ("use_liger_kernel: true", "model.init_kwargs.use_kernels", True),
        ("use_liger_loss: true", "model.init_kwargs.use_kernels", True),
        ("no_cuda: true", "launch.use_cpu", True),
        ("use_cpu: yes", "launch.use_cpu", True),
        ("use_transformers_paged: true", "generation.backend", "transformers_continuous_batching"),
        ("trust_remote_code: true", "model.trust_remote_code", True),
        ("load_in_8bit: true", "model.quantization", "8bit"),
        ("adafactor: true", "training.optim", "adafactor"),
        (
            "use_peft: true\nlora_target_modules: [all-linear]",
            "model.lora.target_modules",
            "all-linear",
        ),
        ('model_init_kwargs: \'{"dtype": "bfloat16", "a": 1}\'', "model.init_kwargs", {"a": 1}),
        ("accelerate_config: multi_gpu", "launch.strategy", "ddp"),
        ("accelerate_config: configs/zero3.yaml", "launch.strategy", "zero3"),
        ("accelerate_config: configs/mine.yaml", "launch.accelerate_config", "configs/mine.yaml"),
        ("eval_strategy: no", "training.eval_strategy", "no"),
        ("learning_rate: 1e-6", "training.learning_rate", 1e-6),
    ],
)
def test_a_key_of_trls_goes_to_its_place(line, target, value):
    report = take(line)
    assert find(report.recipe, target) == value
    assert reasons(report) == {}


@pytest.mark.parametrize(
    ("lines", "key", "reason"),
    [
        ("warmup_ratio: 0.1\nwarmup_steps: 5", "warmup_ratio", "takes precedence"),
        ("eval_strategy: no\nevaluation_strategy: epoch", "evaluation_strategy", "set too"),
        ("lora_r: 8", "lora_r", "use_peft"),
        ("vllm_mode: server", "vllm_mode", "use_vllm"),
        ("use_vllm: true\nvllm_mode: colocate\nvllm_server_port: 1", "vllm_server_port", "server"),
        ("deepspeed: configs/mine.json", "deepspeed", "launch.strategy"),
        ("fsdp: []\nfsdp_config: {xla: false}", "fsdp_config", "`fsdp` is empty"),
        ("bnb_4bit_quant_type: fp4", "bnb_4bit_quant_type", "NF4"),
        ("reward_weights: [1, 2]", "reward_weights", "each entry"),
        ("test_split_size: 0.1", "test_split_size", "only `datasets`"),
        ("mixed_precision: bf16", "mixed_precision", "accelerate"),
        ("save_steps: null", "save_steps", "default"),
        ("auto_find_batch_size: true", "auto_find_batch_size", "refuses"),
        ("beeta: 0.1", "beeta", "did you mean `beta`"),
        ("entirely_new_thing: 0.1", "entirely_new_thing", "no counterpart"),
    ],
)
def test_a_key_without_a_place_is_dropped_with_the_reason(lines, key, reason):
    assert reason in reasons(take(lines))[key]


@pytest.mark.parametrize("switch", ["true", "yes", "'true'", "1"])
def test_a_switch_is_on_in_every_way_of_saying_so(switch):
    report = take(f"use_peft: {switch}\nlora_r: 8\nload_in_4bit: {switch}")
    assert find(report.recipe, "model.lora.r") == 8
    assert find(report.recipe, "model.quantization") == "4bit"


def test_trls_command_line_loads_in_float32_and_drops_out_in_lora():
    report = take("use_peft: true")
    assert find(report.recipe, "model.dtype") == "float32"
    assert find(report.recipe, "model.lora.lora_dropout") == 0.05
    assert find(report.recipe, "model.lora.target_modules") == ["q_proj", "v_proj"]


@pytest.mark.parametrize("lines", ["", "use_vllm: false"])
def test_without_vllm_the_backend_is_transformers(lines):
    assert find(take(lines).recipe, "generation.backend") == "transformers"
    assert find(take("use_vllm: true").recipe, "generation.backend") == "vllm"


def test_auto_is_written_as_the_precision_that_it_will_be():
    assert find(take("dtype: auto").recipe, "model.dtype") == "float32"
    assert find(take("dtype: auto\nuse_peft: true").recipe, "model.dtype") == "auto"


def test_weights_of_rewards_that_are_left_to_do_are_kept_in_the_text():
    report = convert("model_name_or_path: m\nreward_weights: [1.0, 0.2]\n")
    assert "[1.0, 0.2]" in report.to_do["rewards"]
    assert "[1.0, 0.2]" in reasons(report)["reward_weights"]


def test_a_reward_that_is_unknown_is_left_to_do_with_its_weight():
    report = convert("reward_funcs: [think_format_reward, mine]\nreward_weights: [1.0, 0.5]\n")
    assert len(find(report.recipe, "rewards")) == 1
    assert "`mine`" in report.to_do["rewards.1"]
    assert "weight: 0.5" in report.to_do["rewards.1"]


def test_the_best_checkpoint_is_told_by_the_metric_of_the_tool():
    report = take("load_best_model_at_end: true\neval_strategy: epoch")
    assert find(report.recipe, "training.metric_for_best_model") == "loss"
    report = take("load_best_model_at_end: true\nmetric_for_best_model: eval_reward")
    assert find(report.recipe, "training.metric_for_best_model") == "eval_reward"


def test_axolotls_early_stopping_watches_the_loss():
    report = convert(
        "base_model: m\nrl: grpo\nval_set_size: 0.1\neval_steps: 5\nearly_stopping_patience: 2\n"
    )
    stopping = find(report.recipe, "training.early_stopping")
    assert stopping == {"patience": 2, "metric": "eval_loss"}


def test_open_r1s_vllm_is_a_server_where_it_does_not_say():
    lines = "model_name_or_path: m\ndataset_name: d\nuse_vllm: true\n"
    assert find(convert(lines, "open-r1").recipe, "generation.vllm.mode") == "server"
    assert find(convert(lines, "trl").recipe, "generation.vllm") is None


def test_evaluation_keeps_its_rhythm_where_only_logging_sets_it():
    assert find(take("eval_strategy: steps").recipe, "training.eval_steps") == 10
    report = take("eval_strategy: steps\nlogging_steps: 3")
    assert find(report.recipe, "training.eval_steps") == 3


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero2"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}, "zero3"),
        ({"zero_optimization": {"stage": 0}}, None),
        ({}, None),
    ],
)
def test_deepspeed_is_a_strategy_where_it_is_a_plain_stage(config, strategy, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert find(take(f"deepspeed: {path}").recipe, "launch.strategy") == strategy
    if config:
        assert find(take(f"deepspeed: {json.dumps(config)}").recipe, "launch.strategy") == strategy


def test_a_dropped_reward_takes_its_weight_along():
    report = convert(
        "model_name_or_path: m\ndataset_name: d\nreward_funcs: [no_such, think_format_reward]\n"
        "reward_weights: [5, 2]\n"
    )
    assert report.recipe["rewards"] == [{"kind": "think_format", "weight": 2}]


def test_a_function_is_named_by_its_file_where_that_is_at_hand(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "scores.py").write_text("", encoding="utf-8")
    out = tmp_path / "recipes"
    out.mkdir()
    assert place_function("lib.scores", "f", (tmp_path,)) == "./lib/scores.py:f"
    assert place_function("lib.scores", "f", (out, tmp_path)) == "../lib/scores.py:f"
    assert place_function("json.decoder", "f", (out,)) == "json.decoder:f"
    assert place_function("nowhere_at_all", "f", (out,)) == "./nowhere_at_all.py:f"


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("base_model: m\nrl: grpo\n", "axolotl"),
        ("model_name_or_path: m\nsystem_prompt: s\n", "open-r1"),
        ("model_name_or_path: m\nreward_funcs: [accuracy]\n", "open-r1"),
        ("model_name_or_path: m\nreward_funcs: [accuracy_reward]\n", "trl"),
        ("dataset_name: d\n", "trl"),
    ],
)
def test_a_dialect_is_told_by_its_keys(text, dialect):
    recognised, signs = recognise(read_text(text, "c.yaml"), None, "c.yaml")
    assert recognised == dialect
    assert signs
    assert recognise(read_text(text, "c.yaml"), "trl", "c.yaml") == ("trl", ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nmodel: {path: m}\ndataset: {kind: hub}\n", "recipe of grpo already"),
        ("name: x\nmodel: {path: m}\ndataset: {kind: hub}\nlearning_rate: 1\n", "grpo already"),
        ("a: 1\n", "is not a config of TRL, open-r1, axolotl or ms-swift"),
        ("- 1\n", "`key: value` lines"),
    ],
)
def test_what_is_no_config_of_theirs_is_refused_with_its_place(text, said):
    with pytest.raises(RecipeError, match=said) as caught:
        recognise(read_text(text, "c.yaml"), None, "c.yaml")
    assert "c.yaml:1:1" in str(caught.value)


def test_an_unknown_dialect_is_a_wrong_flag():
    with pytest.raises(UsageError, match="use --from axolotl"):
        recognise(read_text("a: 1", "c"), "axolot", "c")


@pytest.mark.parametrize(("line", "said"), [("rl: dpo\n", "`rl: dpo`"), ("", "does not say")])
def test_another_method_of_axolotls_is_refused(line, said):
    with pytest.raises(RecipeError, match=said):
        convert(f"base_model: m\n{line}", "axolotl")


def test_a_reward_may_be_named_alone_with_its_parameters():
    report = convert(
        "model_name_or_path: m\ndataset_name: d\nreward_funcs: cosine\ncosine_max_len: 28\n",
        "open-r1",
    )
    (reward,) = report.recipe["rewards"]
    assert (reward["kind"], reward["max_length"]) == ("cosine_length", 7)
    assert report.comments["rewards.0"].startswith("reward_funcs: cosine")
    assert reasons(report) == {}


def test_a_mixture_of_trls_becomes_sources():
    report = take(
        "datasets:\n"
        "- {path: openai/gsm8k, name: main, split: train, fraction: 0.7}\n"
        "- {path: json, data_files: {train: a.jsonl, test: b.jsonl}, fraction: 0.3}\n"
        "- {path: other/gsm8k, fractoin: 1}\n"
        "test_split_size: 0.1"
    )
    assert report.recipe["dataset"] == {
        "sources": [
            {"name": "gsm8k", "kind": "hub", "path": "openai/gsm8k", "config": "main"}
            | {"split": "train", "ratio": 0.7},
            {"name": "json", "kind": "files", "train": "a.jsonl", "eval": "b.jsonl", "ratio": 0.3},
            {"name": "gsm8k-2", "kind": "hub", "path": "other/gsm8k"},
        ],
        "eval_fraction": 0.1,
    }
    assert "did you mean `fraction`" in reasons(report)["datasets.2.fractoin"]
    Recipe.model_validate({"name": "a", **report.recipe, "rewards": [{"kind": "exact"}]})


def is_in_schema(node, steps, schema):
    """Whether the schema of recipes has a key; below a mapping without keys of its own anything may be."""
    if "$ref" in node:
        return is_in_schema(schema["$defs"][node["$ref"].rpartition("/")[2]], steps, schema)
    if not steps or (node.get("type") == "object" and "properties" not in node):
        return True
    options = [each for kind in ("anyOf", "oneOf") for each in node.get(kind, ())]
    if steps[0] in node.get("properties", {}):
        return is_in_schema(node["properties"][steps[0]], steps[1:], schema)
    return any(is_in_schema(each, steps, schema) for each in options)


def test_every_target_of_the_tables_is_a_key_of_recipes():
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    targets = {*read_keys("swift-defaults")}
    for name in load_keys():
        for part in (read_keys(name).get("keep", {}), read_keys(name).get("switch", {})):
            targets |= {each[0] if isinstance(each, list) else each for each in part.values()}
    targets |= {*read_keys("init_kwargs").values(), *read_keys("script-targets").values()}
    targets = {find_target(each) or each for each in targets}
    assert len(targets) > 60
    assert [
        each for each in sorted(targets) if not is_in_schema(schema, each.split("."), schema)
    ] == []
