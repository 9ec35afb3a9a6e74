"""Flags of shell scripts: where they are, and the YAML that a script writes."""

from pathlib import Path

import pytest

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import find
from grpo_cli.errors import RecipeError

FLAGS = "--model_name_or_path m/x --dataset_name d/x --reward_funcs think_format_reward"


def convert(text, folder=Path()):
    return translate(f"#!/bin/bash\n{text}\n", folder / "run.sh")


@pytest.mark.parametrize("mark", ["EOF", "'EOF'"])
def test_the_yaml_that_a_script_writes_is_read(mark):
    document = "learning_rate: 2.0e-6\nmax_steps: 5\nEOF\n"
    report = convert(f"cat > a/cfg.yaml <<{mark}\n{document}trl grpo --config a/cfg.yaml {FLAGS}")
    assert report.recipe["training"] == {"learning_rate": 2e-6, "max_steps": 5}


def test_a_yaml_with_expansions_is_to_do():
    report = convert(f"cat > c.yaml <<EOF\nmax_steps: $N\nEOF\ntrl grpo --config c.yaml {FLAGS}")
    assert "names a YAML that is known only when it runs" in report.to_do["training"]


def test_config_without_a_value_is_refused():
    with pytest.raises(RecipeError, match="`--config` has no value"):
        convert(f"trl grpo {FLAGS} --config")


def test_flags_of_a_script_have_the_lines_of_the_shell_script(tmp_path):
    (tmp_path / "t.py").write_text(
        "from transformers import HfArgumentParser\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "from datasets import load_dataset\n"
        "(args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()\n"
        "GRPOTrainer('m/x', 'r/m', args, load_dataset('d/x'))\n"
    )
    lines = "python t.py --num_train_epochs 6 \\\n    --logging_dir x --output_dir $X"
    report = convert(lines, tmp_path)
    assert find(report.recipe, "training.num_train_epochs") == 6
    places = {each.key: each.location for each in report.dropped}
    assert Path(places["logging_dir"].source).name == "run.sh"
    report = convert(f"trl grpo {FLAGS} --num_train_epochs 6 --vllm_max_model_len 9")
    assert report.recipe["training"] == {"num_train_epochs": 6}
    assert "vllm_max_model_len" in {each.key for each in report.entries}


def test_defaults_that_unknown_flags_may_change_are_named():
    rows = "--model m/x --dataset d.jsonl --reward_funcs format"
    report = convert(f'swift rlhf --rlhf_type grpo {rows} "${{EXTRA[@]}}"')
    assert "not written here: `generation.temperature: 0.9`" in report.to_do["training"]


def test_flags_that_a_script_does_not_have_are_named(tmp_path):
    (tmp_path / "t.py").write_text(
        "import argparse\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "from datasets import load_dataset\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float)\nargs = GRPOConfig(learning_rate=parser.parse_args().lr)\n"
        "GRPOTrainer('m/x', 'r/m', args, load_dataset('d/x'))\n"
    )
    report = convert("accelerate launch --num_processes 2 t.py --lr 1e-6 --steps 9", tmp_path)
    assert report.recipe["training"] == {"learning_rate": 1e-6}
    notes = {each.key: each.note for each in report.dropped}
    assert notes == {"--steps": "the script has no such argument"}
