"""Each of the written configs, key for key."""

import re

from grpo_cli.convert.key_report import find
from tests.unit.convert.readings import convert, read, reasons, targets


def check(report, expected):
    for target, value in expected.items():
        assert find(report.recipe, target) == value, target


def test_trl_math():
    report = read("trl_math")
    assert report.dialect == "trl"
    check(
        report,
        {
            "name": "Qwen2.5-0.5B-GRPO",
            "seed": 7,
            "model": {
                "path": "Qwen/Qwen2.5-0.5B-Instruct",
                "attn_implementation": "sdpa",
                "dtype": "float32",
            },
            "dataset": {
                "kind": "hub",
                "path": "trl-lib/DeepMath-103K",
                "split": "train",
                "eval_split": "test",
                "streaming": True,
            },
            "generation.backend": "vllm",
            "generation.vllm": {
                "mode": "colocate",
                "gpu_memory_utilization": 0.4,
                "max_model_length": 2048,
            },
            "generation.chat_template_kwargs": {"enable_thinking": False},
            "training.scale_rewards": False,
            "training.warmup_steps": 20,
            "training.eval_steps": 10,
            "launch": {"num_processes": 4, "strategy": "zero2"},
            "logging": {"report_to": "none", "run_name": "deepmath", "log_completions": True},
        },
    )
    rewards = report.recipe["rewards"]
    assert [reward["weight"] for reward in rewards] == [0.5, 1.0, 0.2, 1.0, 0.1]
    assert rewards[0] == {"kind": "model", "path": "my-org/reward-model", "weight": 0.5}
    assert rewards[3] == {"kind": "soft_overlong", "max_length": 1280, "cache": 256, "weight": 1.0}
    assert rewards[4]["path"] == "./my_rewards.py:brevity"
    assert set(reasons(report)) == {
        "output_dir",
        "num_completions_to_print",
        "push_to_hub",
        "hub_token",
        "env",
    }


def test_trl_old_lora():
    report = read("trl_old_lora")
    check(
        report,
        {
            "model.dtype": "bfloat16",
            "model.revision": "main",
            "model.init_kwargs": {"rope_theta": 10000},
            "model.quantization": "4bit",
            "model.lora": {
                "r": 32,
                "lora_alpha": 64,
                "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                "lora_dropout": 0.05,
            },
            "dataset": {
                "kind": "files",
                "train": "data/train.jsonl",
                "eval_fraction": 0.1,
                "max_prompt_length": 512,
            },
            "training.eval_strategy": "steps",
            "training.per_device_train_batch_size": 4,
            "training.warmup_steps": 0.1,
            "generation.vllm.mode": "server",
            "generation.vllm.server_host": "10.0.0.5",
            "generation.vllm.server_port": 8001,
            "generation.vllm.importance_sampling_clip_max": 2.0,
            "launch": {"strategy": "zero3"},
        },
    )
    assert "max_steps" in reasons(report)["max_step"]
    assert "accuracy_reward" in reasons(report)["reward_funcs.1"]
    assert "removed" in reasons(report)["overwrite_output_dir"]


def test_open_r1_math():
    report = read("open_r1_math")
    assert report.dialect == "open-r1"
    check(
        report,
        {
            "name": "Qwen2.5-Math-7B-GRPO",
            "dataset.prompt.user": "{{ problem }}",
            "dataset.name": "default",
            "dataset.eval_split": "test",
            "dataset.max_prompt_length": 512,
            "generation.vllm": {"mode": "server", "gpu_memory_utilization": 0.7},
            "training.warmup_steps": 0.1,
            "training.save_strategy": "no",
            "launch": {"num_processes": 7},
        },
    )
    assert find(report.recipe, "dataset.prompt.system").endswith("</answer>")
    kinds = [(reward["kind"], reward["weight"]) for reward in report.recipe["rewards"]]
    assert kinds == [
        ("math", 1.0),
        ("regex", 0.5),
        ("tag_count", 0.5),
        ("reasoning_steps", 0.2),
        ("cosine_length", 1.0),
        ("repetition", 0.3),
    ]
    cosine, repetition = report.recipe["rewards"][4:]
    assert cosine["correct_shortest"] == 1.0
    assert cosine["correct_longest"] == 0.6
    assert cosine["wrong_shortest"] == -1.0
    assert cosine["wrong_longest"] == -0.5
    assert cosine["max_length"] == 1000
    assert (repetition["ngram_size"], repetition["max_penalty"]) == (5, -0.5)
    assert targets(report)["cosine_max_len"] == "rewards.cosine.max_length"
    assert "group" in reasons(report)["reward_funcs.6"]
    assert "code_format" in reasons(report)["code_language"]


def test_open_r1s_format_is_its_very_pattern():
    report = read("open_r1_math")
    reward = report.recipe["rewards"][1]
    pattern = re.compile(reward["pattern"], re.DOTALL | re.MULTILINE)
    assert reward["flags"] == ["dotall", "multiline"]
    assert pattern.search("<think>\nso\n</think>\n<answer>\n7\n</answer>")
    assert not pattern.search("<think>so</think>\n<answer>\n7\n</answer>")
    assert not pattern.search("Well.\n<think>\nso\n</think>\n<answer>\n7\n</answer>")


def test_open_r1_code():
    report = read("open_r1_code")
    check(
        report,
        {
            "name": "open_r1_code",
            "dataset.eval_fraction": 0.1,
            "dataset.prompt.system": "{% raw %}Answer in {{ language }}.{% endraw %}",
            "generation.vllm.mode": "colocate",
            "training.loss_type": "dr_grpo",
        },
    )
    assert [reward["kind"] for reward in report.recipe["rewards"]] == ["regex", "soft_overlong"]
    assert "```cpp" in report.recipe["rewards"][0]["pattern"]
    dropped = reasons(report)
    assert "verification_info" in dropped["reward_funcs.0"]
    first, second = report.recipe["dataset"]["sources"]
    assert first["path"] == "open-r1/verifiable-coding-problems-python"
    assert first["name"] == "verifiable-coding-problems-python" != second["name"]
    assert targets(report)["dataset_mixture.datasets.1.weight"] == "dataset.sources.1.ratio"
    assert "sandbox" in dropped["code_provider"]


def test_axolotl_lora_server():
    report = read("axolotl_lora_server")
    assert report.dialect == "axolotl"
    check(
        report,
        {
            "name": "grpo-output",
            "seed": 3,
            "model.dtype": "bfloat16",
            "model.attn_implementation": "flash_attention_2",
            "model.lora": {
                "r": 32,
                "lora_alpha": 64,
                "lora_dropout": 0.05,
                "target_modules": "all-linear",
            },
            "dataset": {
                "kind": "hub",
                "path": "openai/gsm8k",
                "name": "main",
                "split": "train",
                "eval_fraction": 0.05,
            },
            "generation.vllm": {
                "mode": "server",
                "tensor_parallel_size": 2,
                "gpu_memory_utilization": 0.85,
                "max_model_length": 2048,
                "server_args": {"enable-prefix-caching": True},
            },
            "generation.temperature": 0.7,
            "training.per_device_train_batch_size": 8,
            "training.per_device_eval_batch_size": 8,
            "training.num_train_epochs": 2,
            "training.lr_scheduler_type": "cosine",
            "training.save_steps": 0.125,
            "training.eval_steps": 0.25,
            "training.eval_strategy": "steps",
            "training.warmup_steps": 0.05,
            "training.ref_model_sync_steps": 64,
            "launch": {"strategy": "zero2"},
        },
    )
    rewards = report.recipe["rewards"]
    assert rewards[0] == {"kind": "python", "path": "./rewards.py:accuracy_reward", "weight": 1.0}
    assert rewards[2] == {"kind": "model", "path": "my-org/reward-model", "weight": 0.3}
    assert "rewards.oai_gsm8k_transform" in report.to_do["dataset.prompt"]
    assert "learning_rate" in reasons(report)["learnign_rate"]
    assert "starts the server" in reasons(report)["trl.vllm_server_host"]


def test_axolotl_full():
    report = read("axolotl_full")
    check(
        report,
        {
            "name": "axolotl_full",
            "model": {
                "path": "meta-llama/Llama-3.2-3B-Instruct",
                "dtype": "float32",
                "init_kwargs": {"use_kernels": True},
            },
            "dataset.max_prompt_length": 700,
            "generation.vllm.mode": "colocate",
            "generation.vllm.structured_outputs_regex": "[0-9]+",
            "training.optim": "adamw_8bit",
            "training.multi_objective_aggregation": "normalize_then_sum",
            "training.gradient_checkpointing": True,
            "training.eval_strategy": "no",
            "training.save_strategy": "steps",
            "launch.strategy": "fsdp2",
            "logging": {"report_to": ["wandb"], "run_name": "llama-3b"},
        },
    )
    dropped = reasons(report)
    assert [source["train"] for source in report.recipe["dataset"]["sources"]] == [
        "data/train.jsonl",
        "data/more.jsonl",
    ]
    assert "adapter" in dropped["lora_r"]


AXOLOTL = "base_model: m\nrl: grpo\nmicro_batch_size: 2\ngradient_accumulation_steps: 3\n"


def test_axolotls_defaults_are_written_where_ours_differ():
    training = convert(AXOLOTL).recipe["training"]
    assert training == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "gradient_checkpointing": False,
        "save_strategy": "epoch",
        "save_total_limit": 4,
    }


def test_an_adapter_of_axolotls_has_no_dropout_or_is_gone_on_from():
    lines = "adapter: lora\nlora_r: 8\nlora_rank_pattern: {q_proj: 4}\n"
    lora = convert(AXOLOTL + lines).recipe["model"]["lora"]
    assert (lora["r"], lora["lora_dropout"], lora["rank_pattern"]) == (8, 0, {"q_proj": 4})
    model = convert(f"{AXOLOTL}adapter: lora\nlora_model_dir: ./old\n").recipe["model"]
    assert (model["adapter"], model["lora"]) == ("./old", {})


def test_keys_left_empty_as_in_axolotls_examples_have_no_effect():
    text = (
        AXOLOTL + "adapter:\nlora_r:\nwandb_project:\nspecial_tokens:\neval_steps:\nwarmup_steps:\n"
    )
    report = convert(text)
    assert "lora" not in report.recipe["model"]
    assert "logging" not in report.recipe
    assert reasons(report)["special_tokens"] == "empty, so the default applies"
    assert report.recipe["training"]["warmup_steps"] == 0.03


def test_a_server_of_axolotls_elsewhere_keeps_its_address():
    text = AXOLOTL + (
        "trl: {use_vllm: true, vllm_server_host: 10.0.0.9, vllm_server_port: 8100, beta: 0.1}\n"
        "vllm: {tensor_parallel_size: 4}\n"
    )
    report = convert(text)
    assert report.recipe["generation"]["vllm"] == {
        "mode": "server",
        "server_host": "10.0.0.9",
        "server_port": 8100,
    }
    assert "another machine" in reasons(report)["vllm.tensor_parallel_size"]
