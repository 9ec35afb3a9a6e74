"""Which settings may change between the attempts of a run."""

from pathlib import Path

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.launch.plan import plan_launch
from grpo_cli.launch.resume import list_changes
from grpo_cli.machine import Hardware
from grpo_cli.recipe.comparison import hash_code
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder
from tests.recipe_texts import GOOD, write_recipe

SERVER = GOOD.replace("generation:\n", "generation:\n  backend: vllm\n  vllm: {mode: server}\n")


@pytest.fixture
def change(tmp_path):
    """Returns what has changed since a run began, by settings of then and of now."""

    def compare(before: list[str], now: list[str]) -> list[str]:
        path = write_recipe(tmp_path, SERVER)
        run, recipe = RunFolder(tmp_path), load_recipe(path, now)
        run.write_recipe(load_recipe(path, before))
        plan = plan_launch(recipe, Path("RUN"), Hardware(gpus=1, cpus=4))
        return [each.path for each in list_changes(run, recipe, plan, force=False)]

    return compare


def test_a_requeued_job_finds_its_server_on_another_node(change):
    def job(node):
        return [f"generation.vllm.base_url=http://{node}:31007", "launch.main_process_ip=node1"]

    now = [*job("node9"), "generation.vllm.group_port=30007"]
    assert change(job("node4"), now) == [
        "generation.vllm.base_url",
        "generation.vllm.group_port",
    ]


def test_other_code_is_another_training(tmp_path):
    code = tmp_path / "rw.py"
    code.write_text("def score(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    text = GOOD.replace("kind: math, answer: answer", f"kind: python, path: '{code}:score'")
    path = write_recipe(tmp_path, text)
    run, recipe = RunFolder(tmp_path), load_recipe(path)
    run.write_recipe(recipe)
    write_json(run.manifest, {"code": hash_code(recipe)})
    plan = plan_launch(recipe, Path("RUN"), Hardware(gpus=1, cpus=4))
    assert list_changes(run, recipe, plan, force=False) == []
    code.write_text(code.read_text().replace("0.0", "1.0"))
    with pytest.raises(UsageError, match=r"the code in .*rw\.py: "):
        list_changes(run, recipe, plan, force=False)
    assert len(list_changes(run, recipe, plan, force=True)) == 1


def test_another_training_is_refused(change):
    with pytest.raises(UsageError, match=r"generation\.temperature: 1\.0 → 0\.5"):
        change([], ["generation.temperature=0.5"])
