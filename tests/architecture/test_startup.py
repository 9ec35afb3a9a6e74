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
from grpo_cli.cli.app import main
heavy, commands = map(json.loads, sys.argv[1:])
loaded = {}
for command in commands:
    sys.argv = ["grpo", *command]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    loaded[" ".join(command)] = [code, sorted({*heavy} & {*sys.modules})]
print("\\nLOADED", json.dumps(loaded))
"""
COMMANDS = [
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
    ["sweep", "recipe.yaml", "--grid", "training.learning_rate=1e-6,1e-5", "--dry-run"],
    ["convert", "config.yaml"],
    ["expect", "RUN"],
    ["diagnose", "RUN", "--rules"],
    ["diagnose", "RUN", "--json"],
    ["report", "RUN"],
]


def test_commands_without_a_model_import_nothing_heavy(tmp_path):
    pytest.importorskip("plotly")
    run = make_finished_run(tmp_path / "runs", rewards=[0.4, 0.6] * 20).path
    write_recipe(tmp_path)
    write_recipe(tmp_path, "model_name_or_path: tiny\ndataset_name: sums\n", "config.yaml")
    commands = [[str(run) if word == "RUN" else word for word in each] for each in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(HEAVY), json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    loaded = json.loads(done.stdout.rpartition("LOADED")[2])
    assert len(loaded) == len(COMMANDS)
    assert {command: modules for command, (_, modules) in loaded.items() if modules} == {}
    # What cannot be converted is named.
    failed = [command for command, (code, _) in loaded.items() if code]
    assert failed == ["convert config.yaml"], done.stderr
    assert (run / "report.html").is_file()


def test_help_imports_no_library_that_commands_need():
    program = (
        "import sys; from grpo_cli.cli.app import make_app; make_app(); "
        "print({'pydantic', 'yaml', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"
