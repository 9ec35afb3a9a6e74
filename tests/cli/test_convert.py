"""`grpo convert` as a person runs it: what goes where, how it ends, what it leaves alone."""

import json

import pytest
import yaml

from tests.cli.test_commands import grpo
from tests.recipe_texts import GOOD, write_recipe

WHOLE = """\
model_name_or_path: org/model
dataset_name: org/rows
reward_funcs: [think_format_reward]
per_device_train_batch_size: 8
num_generations: 8
max_steps: 5
evaluation_strategy: "no"
output_dir: out/mine
"""
AXOLOTL = """\
base_model: org/model
rl: grpo
micro_batch_size: 4
gradient_accumulation_steps: 1
learning_rate: 1e-6
trl: {num_generations: 4, reward_funcs: [scores.right]}
datasets: [{path: org/rows, type: scores.transform}]
"""


def test_a_recipe_on_stdout_the_account_on_stderr_and_nothing_left_behind(tmp_path):
    path = write_recipe(tmp_path, WHOLE, "config.yaml")
    done = grpo("convert", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = yaml.safe_load(done.stdout)
    assert recipe["name"] == "mine"
    assert recipe["training"]["eval_strategy"] == "no"
    assert "evaluation_strategy → training.eval_strategy" in done.stderr
    assert "config.yaml:8:1: output_dir: every run gets a folder of its own" in done.stderr
    assert "a config of TRL (recognised by model_name_or_path" in done.stderr
    assert "passes `grpo check`" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]


def test_a_file_is_written_once_and_passes_check(tmp_path):
    path = write_recipe(tmp_path, WHOLE, "config.yaml")
    done = grpo("convert", path, "-o", "new.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert grpo("check", "new.yaml", cwd=tmp_path).returncode == 0
    before = (tmp_path / "new.yaml").read_bytes()
    again = grpo("convert", path, "-o", "new.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert "new.yaml exists" in again.stderr
    assert (tmp_path / "new.yaml").read_bytes() == before


def test_a_recipe_that_does_not_pass_check_is_written_all_the_same_and_ends_with_1(tmp_path):
    path = write_recipe(tmp_path, AXOLOTL, "config.yaml")
    done = grpo("convert", path, "-o", "new.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "new.yaml:" in done.stderr
    assert "scores.py" in done.stderr
    assert "to do: dataset.prompt" in done.stderr
    (tmp_path / "scores.py").write_text("def right(completions):\n    return [1.0]\n")
    assert (
        "dataset.prompt: is still to be written" in grpo("check", "new.yaml", cwd=tmp_path).stderr
    )
    (tmp_path / "new.yaml").write_text((tmp_path / "new.yaml").read_text().replace("TO DO", ""))
    assert grpo("check", "new.yaml", cwd=tmp_path).returncode == 0


def test_paths_are_relative_to_the_recipe_wherever_it_is_written(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "one"}\n' * 4)
    (tmp_path / "scores.py").write_text("def right(completions):\n    return [1.0]\n")
    text = AXOLOTL.replace("path: org/rows", "path: data/train.jsonl")
    config = write_recipe(tmp_path, text, "config.yaml")
    done = grpo("convert", config, "-o", "recipes/new.yaml", cwd=tmp_path)
    assert "1 TO DO line" in done.stderr
    recipe = yaml.safe_load((tmp_path / "recipes" / "new.yaml").read_text())
    assert recipe["dataset"]["train"] == "../data/train.jsonl"
    assert recipe["rewards"][0]["path"] == "../scores.py:right"


def test_as_json_it_is_data(tmp_path):
    path = write_recipe(tmp_path, AXOLOTL, "config.yaml")
    done = grpo("convert", path, "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["dialect"] == "axolotl"
    assert told["recipe"]["model"]["path"] == "org/model"
    assert {"key": "base_model", "line": 1, "target": "model.path", "note": None} in told["mapped"]
    assert [each["key"] for each in told["dropped"]] == ["datasets.0.type"]
    assert told["valid"] is False
    assert told["problems"][0]["path"] == "rewards.0.path"
    assert "dataset.prompt" in told["to_do"]


def test_a_script_becomes_a_recipe_and_lines_to_do(tmp_path):
    script = (
        "from trl import GRPOConfig, GRPOTrainer\n"
        "def right(completions):\n    return [1.0]\n"
        'if __name__ == "__main__":\n'
        '    args = GRPOConfig(output_dir="out/mine", learning_rate=rate())\n'
        '    GRPOTrainer("org/model", right, args, load_dataset("org/rows"))\n'
    )
    path = write_recipe(tmp_path, script, "train.py")
    done = grpo("convert", path, "-o", "new.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "to do: training.learning_rate: train.py:5 has `rate()`" in done.stderr
    recipe = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert recipe["rewards"] == [{"kind": "python", "path": "./train.py:right"}]
    assert grpo("check", "new.yaml", cwd=tmp_path).returncode == 2
    flags = ["--set", "training.learning_rate=1e-5"]
    assert grpo("check", "new.yaml", *flags, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("generations", [1, 4])
def test_problems_are_counted_as_check_counts_them(generations, tmp_path):
    script = (
        "def right(completions, gold, level):\n    return [1.0]\n"
        'if __name__ == "__main__":\n'
        f"    args = GRPOConfig(beta=read(), num_generations={generations})\n"
        '    GRPOTrainer("org/model", right, args, load_dataset("org/rows").map(f))\n'
    )
    path = write_recipe(tmp_path, script, "train.py")
    done = grpo("convert", path, "-o", "new.yaml", cwd=tmp_path)
    checked = grpo("check", "new.yaml", cwd=tmp_path)
    errors, to_do = done.stderr.count("\nerror: "), done.stderr.count("\nto do: ")
    parts = [*[f"{errors} error to fix"] * errors, f"{to_do} TO DO lines to write"]
    assert f" {' and '.join(parts)} before the recipe passes" in done.stderr
    assert f"{errors + to_do} problems" in checked.stdout + checked.stderr


def test_a_dataset_without_prompts_is_a_line_to_do(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "one", "solution": "1"}\n' * 8)
    files = "datasets: [{path: json, data_files: rows.jsonl}]"
    path = write_recipe(tmp_path, WHOLE.replace("dataset_name: org/rows", files), "config.yaml")
    done = grpo("convert", path, "-o", "new.yaml", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "to do: dataset.prompt: the rows have no column `prompt`" in done.stderr
    text = (tmp_path / "new.yaml").read_text()
    line = '  # prompt: {system: "Think step by step.", user: "{{ question }}"}\n'
    assert line in text
    (tmp_path / "new.yaml").write_text(text.replace(line, line.replace("# ", "")))
    assert grpo("check", "new.yaml", cwd=tmp_path).returncode == 0


def test_what_is_left_to_do_does_not_hide_what_is_wrong(tmp_path):
    path = write_recipe(tmp_path, "use_vllm: false\nnum_generations: 3\n", "dump.yaml")
    done = grpo("convert", path, cwd=tmp_path)
    assert done.returncode == 1
    assert "generation.num_generations: " in done.stderr.partition("error: ")[2]
    assert "is missing" not in done.stderr


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (GOOD, (), "is a recipe of grpo already"),
        ("colour: blue\n", (), "--from trl|open-r1|axolotl|ms-swift"),
        ("a: [1\n", (), "not valid YAML"),
        (WHOLE, ("--from", "verl"), "there is no dialect `verl`"),
        (GOOD, ("--to", "trl"), "copy its keys under `training:`, `generation:` and `logging:`"),
        (WHOLE, ("-o", "no/such/folder.yaml"), "cannot be written"),
    ],
)
def test_what_cannot_be_converted_ends_with_2(text, arguments, said, tmp_path):
    done = grpo("convert", write_recipe(tmp_path, text, "c.yaml"), *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_missing_file_ends_with_2(tmp_path):
    done = grpo("convert", "nothing.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing.yaml" in done.stderr
