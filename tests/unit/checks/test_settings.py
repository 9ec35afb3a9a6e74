"""Settings that nothing reads, that contradict each other, or with which nothing is learned."""

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from tests.recipe_texts import GOOD, write_recipe

OPTIONS = "generation.generation_kwargs"
SLURM = "launch={slurm: {partition: gpu, time: '04:00:00', gpus_per_node: 4, mem: 64G}}"
EXPECT = "expect={metrics: [{metric: reward, step: 15, band: [0, 1]}]}"
STOPPING = ["dataset.eval_rows=[{question: q, answer: '1'}]", "training.eval_strategy=steps",
            "training.eval_steps=1", "training.early_stopping.patience=1"]  # fmt: skip
DELAYED = ["training.eval_delay=5", STOPPING[0]]
LONG = ["training.max_steps=20", "logging.logging_steps=10"]
CASES = [
    (["training.torch_compile=false", "training.torch_compile_mode=default"], "training.torch_compile_mode",
     "error", "compiles the model although `torch_compile` is false"),
    ([*DELAYED, "training.eval_strategy=steps"], "training.eval_delay", "warning", "this training (2)"),
    ([*DELAYED, "training.eval_strategy=epoch", "training.max_steps=-1"], "training.eval_delay", "warning",
     "this training (3)"),
    (["warmup={answer: '{{ answer }}', eval_fraction: 0, patience: 3}"], "warmup.patience", "warning",
     "there is no held-out loss"),
    (["model.lora={target_modules: [q_proj], layers_pattern: h}"], "model.lora.layers_pattern", "error",
     "`layers_to_transform`, which is missing"),
    (["training.max_steps=99999999999999999999999"], "training.max_steps", "error", "fit in 64 bits"),
    (["training.save_total_limit=-9223372036854775809"], "training.save_total_limit", "error", "64 bits"),
    (["name=" + "a" * 101], "name", "error", "is not a valid name"),
    ([f"{OPTIONS}.stop_strings=[x, 3]"], f"{OPTIONS}.stop_strings", "error", "texts that end"),
    ([f"{OPTIONS}.max_new_tokens=64"], f"{OPTIONS}.max_new_tokens", "error",
     "64 overrides `generation.max_completion_length`, which is 8"),
    ([f"{OPTIONS}.do_sample=false"], f"{OPTIONS}.do_sample", "error", "greedy decoding"),
    (["generation.min_p=1.0"], "generation.min_p", "error", "only the most likely token"),
    (["training.delta=0.5"], "training.delta", "error", "not above 1 + epsilon (1.2)"),
    (["training.delta=1.1"], "training.delta", "warning", "not above 1 + epsilon (1.2)"),
    (["training.epsilon=0.28", "training.epsilon_high=0.2"], "training.epsilon_high", "warning",
     "0.2 is below `epsilon` (0.28)"),
    (["training.beta=0.1", "training.sync_ref_model=true", "model.lora.r=8", "launch.strategy=zero3"],
     "training.sync_ref_model", "error", "sharded by zero3"),
    (["rewards=[{kind: math, answer: answer}, {kind: repetition, weight: -0.5}]"], "rewards.1.weight",
     "warning", "rewards what it is a penalty for"),
    (["rewards=[{kind: math, answer: answer}, {kind: math, answer: answer}]"], "rewards.1", "warning",
     "is the same as rewards.0"),
    (["rewards=[{kind: math, weight: 0.5}, {kind: cosine_length, of: {kind: math, answer: answer}}]"],
     "rewards.1.of", "warning", "judges answers as rewards.0 does"),
    (["training.adam_beta1=0.999", "training.adam_beta2=0.9"], "training.adam_beta1", "warning",
     "above `adam_beta2` (0.9)"),
    ([*STOPPING, "training.early_stopping.min_delta=5"], "training.early_stopping.min_delta", "warning",
     "`reward` changes by 1 at most"),
    ([*STOPPING, "evaluation={during: [{every: 1}]}", "training.early_stopping.metric=accuracy/math"],
     "training.early_stopping.metric", "error", "no evaluation logs `eval_accuracy/math`"),
    (["dataset.prompt.user='{{ question }} {{ answer }}'"], "dataset.prompt.user", "warning",
     "the column `answer`, which holds the gold of `math`"),
    (["dataset.rows.1.answer='1.234,50'"], "rewards.0.answer", "warning", "it has a decimal comma (row 2"),
    (["dataset.rows.0.answer='\\frac{3}{4'"], "rewards.0.answer", "warning", "a brace without its partner"),
    (["dataset.rows.0.answer=null"], "rewards.0.answer", "warning", "there is no gold"),
    (["rewards=[{kind: choice}]", "dataset.rows.0.answer=(E)"], "rewards.0.choices", "warning",
     "the gold E is not a choice of ABCD"),
    ([SLURM, "launch.slurm.time='04:00'"], "launch.slurm.time", "warning", "`04:00` is 4 minutes"),
    (["training.learning_rate=0"], "training.learning_rate", "warning", "the weights never change"),
    (["training.eval_steps=1"], "training.eval_steps", "warning", "`eval_strategy` is `no`"),
    (["logging.run_name=a"], "logging.run_name", "warning", "there is no tracker"),
    (["evaluation.limit=16"], "evaluation.limit", "warning", "no evaluation rows"),
    (["training.gradient_checkpointing=false", "training.gradient_checkpointing_kwargs.use_reentrant=false"],
     "training.gradient_checkpointing_kwargs", "warning", "`gradient_checkpointing` is false"),
    (["training.max_steps=20", "training.eval_strategy=steps", "training.eval_steps=10",
      "dataset.eval_rows=[{question: q, answer: '1'}]", "training.early_stopping.patience=5"],
     "training.early_stopping.patience", "warning", "5 is never reached: there are 2 evaluations"),
    (["training.max_steps=20", "training.eval_strategy=steps", "training.eval_steps=9",
      "dataset.eval_rows=[{question: q, answer: '1'}]", "training.early_stopping.patience=5"],
     "training.early_stopping.patience", "warning", "5 is never reached: there are 3 evaluations"),
    (["training.max_steps=20", "training.eval_strategy=steps", "training.eval_steps=50",
      "dataset.eval_rows=[{question: q, answer: '1'}]"],
     "training.eval_steps", "warning", "(20); only the last step is evaluated"),
    ([SLURM, "launch.slurm.time=30", "launch.slurm.signal_before_end_s=3600"],
     "launch.slurm.time", "error", "the job ends after 1800 s"),
    ([SLURM, "launch.slurm.mem=64"], "launch.slurm.mem", "error", "64 without a unit is 64 MiB"),
    ([SLURM, "launch.num_processes=2"], "launch.num_processes", "warning", "leaves 2 of the 4"),
    ([SLURM, "launch.strategy=single", "launch.num_processes=1"], "launch.strategy", "warning",
     "`single` leaves 3 of the 4"),
    (["launch.strategy=zero3", "dataset={kind: hub, path: a/b, eval_split: test, prompt: {user: '{{ q }}'}}"],
     "launch.strategy", "note", "does not measure before and after"),
    ([SLURM, "launch.num_processes=8"], "launch.num_processes", "error", "need a GPU each"),
    (["generation.vllm.max_model_length=8"], "generation.vllm.max_model_length", "error",
     "no room for a prompt"),
    (["model.chat_template='{{ messages }}{{ enable_thinking }}'",
      "generation.chat_template_kwargs.enable_thinkng=false"],
     "generation.chat_template_kwargs.enable_thinkng", "warning", "does not read it"),
    (["generation.vllm.max_model_length=64", "dataset.max_prompt_length=200"],
     "generation.vllm.max_model_length", "warning", "64 tokens are fewer than `dataset.max_prompt_length` (200)"),
    ([f"{OPTIONS}.min_new_tokens=8"], f"{OPTIONS}.min_new_tokens", "error", "8 is not below"),
    ([f"{OPTIONS}.seed=1", "generation.backend=vllm"], f"{OPTIONS}.seed", "error", "all the same"),
    (["training.epsilon=1.2"], "training.epsilon", "warning", "with 1.2 nothing is clipped from below"),
    (["dataset.eval_fraction=0.75"], "dataset.eval_fraction", "warning", "holds out 75% of the prompts"),
    (["logging.logging_strategy=no"], "logging.logging_strategy", "warning", "writes no metrics"),
    (["logging.trackio_space_id=a/b"], "logging.trackio_space_id", "warning", "does not name `trackio`"),
    (["launch.num_machines=2", "launch.main_process_ip=127.0.0.1"], "launch.main_process_ip", "warning",
     "is each machine itself"),
    (["warmup.answer='{answer}'"], "warmup.answer", "warning", "it is the text '{answer}' for all rows"),
    (["launch.stall_timeout_s=2"], "launch.stall_timeout_s", "warning", "2 seconds"),
    (["model.chat_template='{{ messages }}'", "generation.chat_template_kwargs.enable_thinking=false"],
     "generation.chat_template_kwargs.enable_thinking", "warning", "does not read it"),
    (["dataset.prompt.system='Put it in \\boxed{}.'", "rewards=[{kind: math, answer: answer, extract: hashes}]"],
     "rewards.0.extract", "warning", "the prompt asks for \\boxed"),
    (["dataset.rows.0.answer='We add both numbers and find that there are two.'"], "rewards.0.answer", "warning",
     "it has 9 words (row 1"),
    (["model.quantization=4bit", "model.lora.r=8", "launch.use_cpu=true"], "model.quantization", "error",
     "4bit needs a GPU"),
    (["dataset.limit=1", "generation.num_generations=2"], "dataset.limit", "error",
     "fewer than one generation batch"),
    ([*LONG, EXPECT], "expect.metrics.0.step", "warning", "step 15 has no record"),
    ([*LONG, EXPECT, "expect.metrics.0.window=30"], "expect.metrics.0.window", "warning",
     "30 is more than the records up to step 15"),
]  # fmt: skip
TIMES = {
    "30": 1800,
    "90:30": 5430,
    "01:00:01": 3601,
    "1-2": 93600,
    "2-0:30": 174600,
    "1-1:1:1": 90061,
}


@pytest.mark.parametrize(("flags", "path", "level", "seen"), CASES)
def test_a_setting_is_explained_where_it_stands(tmp_path, flags, path, level, seen):
    checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2))
    found = [each for each in checked.problems if (each.path, each.level) == (path, level)]
    assert any(seen in each.seen and each.fix for each in found), checked.problems


def test_a_job_whose_only_gpu_the_server_takes_is_refused_once(tmp_path):
    server = ["generation.backend=vllm", "generation.vllm.mode=server"]
    flags = [SLURM, "launch.slurm.gpus_per_node=1", "launch.num_processes=1", *server]
    checked = check_recipe(
        write_recipe(tmp_path), flags, Hardware(gpus=1, cpus=2), environment=False
    )
    assert [each.path for each in checked.errors] == ["generation.vllm.mode"]


def test_settings_that_are_read_are_left_alone(tmp_path):
    flags = [
        *LONG,
        "training.delta=4",
        "training.num_iterations=2",
        "generation.min_p=0.1",
        f"{OPTIONS}.max_new_tokens=8",
        "generation.vllm.max_model_length=9",
        "expect={metrics: [{metric: reward, step: 20, band: [0, 1], window: 2}]}",
        "model.chat_template='{{ messages }}{{ enable_thinking }}'",
        "generation.chat_template_kwargs.enable_thinking=false",
        SLURM,
        "launch.num_processes=4",
        "training.per_device_train_batch_size=2",
    ]
    checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2))
    paths = {each.path for each in checked.problems if each.level != "note"}
    assert paths <= {"model.path", "generation.vllm", "generation.num_generations"}


@pytest.mark.parametrize(("time", "seconds"), TIMES.items())
def test_times_are_read_as_sbatch_reads_them(tmp_path, time, seconds):
    for early, is_error in ((seconds, True), (seconds - 1, False)):
        flags = [SLURM, f"launch.slurm.time='{time}'", f"launch.slurm.signal_before_end_s={early}"]
        if early > 65535:
            continue
        checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2))
        assert ("launch.slurm.time" in {each.path for each in checked.errors}) is is_error


def test_a_key_of_another_section_is_sent_there(tmp_path):
    text = f"{GOOD}  lora: {{r: 8}}\nevaluation:\n  eval_strategy: steps\n"
    checked = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2))
    fixes = {each.path: each.fix for each in checked.errors}
    assert fixes["training.lora"] == "move it to `model.lora`"
    assert fixes["evaluation.eval_strategy"] == "move it to `training.eval_strategy`"


def test_an_end_token_that_the_model_does_not_have_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 100}')
    flags = [f"model.path={tmp_path}", f"{OPTIONS}.eos_token_id=[99, x, 100]"]
    checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2))
    found = [each.seen for each in checked.errors if each.path == f"{OPTIONS}.eos_token_id"]
    assert found == [
        "the model has 100 tokens and none with the id 100, so no completion ends with it"
    ]
