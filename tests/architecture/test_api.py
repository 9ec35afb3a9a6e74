"""The Python API: its names and arguments stay, and importing it loads nothing heavy."""

import inspect
import subprocess
import sys

import grpo_cli

ARGUMENTS = {
    "Run": "folder name",
    "check": "path overrides",
    "evaluate": "source overrides *model *checkpoint *baseline *split *limit *samples *temperature *backend *out "
    "*num_processes *reporter",
    "export": "run to *format *checkpoint *dtype *gguf_type *converter *max_shard_size *verify *force *push_to "
    "*private *on_progress *trust_checkpoint",
    "load_recipe": "path overrides",
    "probe": "path overrides *prompts *quick *runs",
    "register_reward": "params",
    "train": "path overrides *runs *run_id *resume *force *probe *reporter",
}
"""Name → arguments; `*` marks those that are given by name. Adding to the end of this is no break; the rest is."""


def test_names_and_arguments_are_those_of_the_last_release():
    assert {name: _arguments(getattr(grpo_cli, name)) for name in grpo_cli.__all__} == ARGUMENTS


def _arguments(function):
    parameters = inspect.signature(function).parameters.values()
    return " ".join("*" * (each.kind is each.KEYWORD_ONLY) + each.name for each in parameters)


def test_every_name_has_help():
    assert [name for name in grpo_cli.__all__ if not inspect.getdoc(getattr(grpo_cli, name))] == []


def test_importing_all_of_it_loads_no_torch():
    program = (
        "import sys; from grpo_cli import *\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'accelerate', 'peft', 'vllm'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
