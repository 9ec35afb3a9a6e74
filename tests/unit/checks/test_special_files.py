"""Files that a recipe names and that are pipes: one would be waited for, for ever."""

import os

import pytest
import yaml

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import ProblemsError
from grpo_cli.machine import Hardware
from tests.recipe_texts import GOOD, write_recipe

NAMED = [
    ("extends", {"extends": "pipe.yaml"}),
    ("dataset.train", {"dataset": {"kind": "files", "train": "pipe.jsonl"}}),
    ("dataset.eval", {"dataset": {"kind": "files", "train": "rows.jsonl", "eval": "pipe.jsonl"}}),
    ("dataset.difficulty.samples", {"dataset": {"kind": "files", "train": "rows.jsonl",
                                                "difficulty": {"kind": "adaptive", "samples": "pipe.jsonl"}}}),
    ("rewards.0.path", {"rewards": [{"kind": "json", "path": "./pipe.json"}]}),
    ("rewards.0.path", {"rewards": [{"kind": "python", "path": "./pipe.py:f"}]}),
    ("tools.0.path", {"tools": [{"kind": "function", "path": "./pipe.py:f"}]}),
    ("tools.0.command", {"tools": [{"kind": "mcp", "command": ["python", "./pipe.py"]}]}),
    ("environment.path", {"environment": {"kind": "python", "path": "./pipe.py:Env"}}),
    ("model.path", {"model": {"path": "./pipe.gguf"}}),
    ("model.chat_template", {"model": {"chat_template": "./pipe.jinja"}}),
    ("launch.accelerate_config", {"launch": {"accelerate_config": "pipe.yaml"}}),
]  # fmt: skip


@pytest.mark.parametrize(("place", "sections"), NAMED)
def test_a_pipe_that_a_recipe_names_is_refused(tmp_path, place, sections):
    for ending in ("yaml", "jsonl", "json", "py", "gguf", "jinja"):
        os.mkfifo(tmp_path / f"pipe.{ending}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "answer": "1"}\n')
    recipe = yaml.safe_load(GOOD)
    for section, value in sections.items():
        keeps = isinstance(value, dict) and "train" not in value
        recipe[section] = recipe.get(section, {}) | value if keeps else value
    path = write_recipe(tmp_path, yaml.safe_dump(recipe))
    try:
        problems = check_recipe(path, hardware=Hardware(gpus=0, cpus=2)).problems
    except ProblemsError as error:
        problems = error.problems
    found = [each for each in problems if "is a pipe, a socket or a device" in str(each)]
    assert [each.path for each in found if each.level == "error" and each.fix] == [place], problems
