"""What a command may import: none of the libraries that take seconds."""

import json
import subprocess
import sys

import pytest

from tests.recipe_texts import write_recipe
from tests.run_folders import make_finished_run

HEAVY = [
    "torch",
    "transformers",
    "trl",
    "vllm",
    "datasets",
    "accelerate",
    "peft",
    "numpy",
    "pandas",
]
PROBE = """
import json, sys
sys.argv = ["grpo", *json.loads(sys.argv[1])]
from grpo_cli.cli.app import main
try:
    main()
except SystemExit:
    pass
print("\\nLOADED", json.dumps(sorted(set(json.loads(sys.argv_heavy)) & set(sys.modules))))
"""


def loaded_by(arguments, cwd):
    script = PROBE.replace("sys.argv_heavy", repr(json.dumps(HEAVY)))
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=True,
    )
    return json.loads(done.stdout.rpartition("LOADED")[2])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["check", "recipe.yaml"],
        ["check-batch", "recipe.yaml"],
        ["check-batch", "--dataset-size", "100"],
        ["check-batch", "recipe.yaml", "--explain"],
        ["doctor", "--quick"],
        ["schema"],
        ["rewards", "list"],
        ["runs", "list"],
        ["runs", "path"],
        ["runs", "show"],
        ["watch"],
        ["watch", "--help"],
        ["init", "fresh"],
        ["train", "recipe.yaml", "--dry-run"],
        ["train", "recipe.yaml", "--slurm", "--dry-run"],
        ["convert", "config.yaml"],
        ["convert", "recipe.yaml", "--to", "trl"],
    ],
    ids=" ".join,
)
def test_commands_without_a_model_import_nothing_heavy(arguments, tmp_path):
    make_finished_run(tmp_path / "runs")
    write_recipe(tmp_path)
    write_recipe(tmp_path, "model_name_or_path: tiny\ndataset_name: sums\n", "config.yaml")
    assert loaded_by(arguments, tmp_path) == []


def test_help_imports_no_library_that_commands_need():
    program = (
        "import sys, grpo_cli.cli.app; print({'pydantic', 'yaml', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_bands_from_runs_import_nothing_heavy(tmp_path):
    run = str(make_finished_run(tmp_path, rewards=[0.4, 0.6] * 20).path)
    assert loaded_by(["expect", run], tmp_path) == []


@pytest.mark.parametrize("flags", [["--rules"], ["--json"]], ids=" ".join)
def test_a_diagnosis_imports_nothing_heavy(flags, tmp_path):
    run = str(make_finished_run(tmp_path).path)
    assert loaded_by(["diagnose", run, *flags], tmp_path) == []


def test_a_page_imports_nothing_heavy(tmp_path):
    pytest.importorskip("plotly")
    run = make_finished_run(tmp_path, rewards=[0.4, 0.6] * 20).path
    assert loaded_by(["report", str(run)], tmp_path) == []
    assert (run / "report.html").is_file()
