"""Every shipped recipe passes the checks, fits the published schema, and names the schema."""

import json
from pathlib import Path

import jsonschema
import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.templates import list_templates, write_template
from grpo_cli.recipe.yaml_tree import read_text, write_yaml

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
CPU, GPU, GPUS = Hardware(gpus=0, cpus=2), Hardware(gpus=1, cpus=8), Hardware(gpus=8, cpus=64)


def named(path):
    """A recipe's name: the folder counts, where there is one."""
    folder = path.parent.name
    return {"recipes": path.stem, "offline": f"{path.stem}-offline"}.get(
        folder, f"{folder}-{path.stem}"
    )


def flags_for(path, made):
    """Where the files are that a recipe names and that are not shipped."""
    flags = {
        "gsm8k-local": {"dataset.train": "rows.jsonl", "dataset.eval": "held_out.jsonl"},
        "zen-offline": {"dataset.train": "zen.jsonl", "model.path": "tiny-qwen2"},
        "shapes-offline": {"dataset.train": "shapes.jsonl", "model.path": "tiny-llava"},
        "higher-lower-offline": {"model.path": "tiny-guesser"},
        "gpt2-scored-offline": {"dataset.train": "scored.jsonl", "model.path": "tiny-gpt2"},
    }
    return [f"{key}={made / name}" for key, name in flags.get(named(path), {}).items()]


@pytest.mark.parametrize("path", RECIPES, ids=named)
@pytest.mark.parametrize("hardware", [CPU, GPU, GPUS], ids=["cpu", "gpu", "gpus"])
def test_a_shipped_recipe_passes_the_checks(path, hardware, made):
    checked = check_recipe(path, flags_for(path, made), hardware)
    # A package need not be on this machine; a server needs a GPU beside that of training.
    errors = [each for each in checked.errors if not each.package]
    if "three-gpus" in path.name and hardware is GPU:
        assert [each.path for each in errors] == ["launch.num_processes"]
        return
    if "mode: server" in path.read_text() and hardware is GPU:
        assert [each.path for each in errors] == ["generation.vllm.mode"]
        return
    assert errors == []
    assert checked.batch.valid


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_a_shipped_recipe_fits_the_published_schema(path):
    text = path.read_text(encoding="utf-8")
    up = "" if path.parent.name == "recipes" else "../"
    first = f"# yaml-language-server: $schema={up}recipe.schema.json"
    assert text.splitlines()[0] == first
    schema = json.loads((ROOT / "recipes" / "recipe.schema.json").read_text())
    plain = read_text(text, path.name).plain()
    assert plain["name"] == named(path)
    jsonschema.validate(plain, schema)


def test_the_arithmetic_of_the_tutorial_comes_out():
    """24 completions a step, 48,000 in all, 2,000 steps."""
    plan = check_recipe(ROOT / "recipes" / "three-gpus.yaml", hardware=CPU).batch
    assert plan.completions_per_optimizer_step == 24
    assert plan.total_completions == 48_000
    assert plan.total_optimizer_steps == 2_000


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
def test_the_local_recipe_takes_the_real_gsm8k():
    overrides = [f"dataset.train={GSM8K / 'train.jsonl'}", f"dataset.eval={GSM8K / 'test.jsonl'}"]
    checked = check_recipe(ROOT / "recipes" / "gsm8k-local.yaml", overrides, CPU)
    assert checked.errors == []
    assert checked.preview.train_rows == 7473


@pytest.mark.parametrize("template", list_templates())
def test_a_template_passes_the_checks_once_its_data_is_there(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *_, path = write_template(template, "mine")
    (tmp_path / "data").mkdir()
    row = '{{"question": "{0}", "answer": "so #### {0}", "chart": null}}\n'
    rows = "".join(map(row.format, range(400)))
    (tmp_path / "data" / "train.jsonl").write_text(rows)
    assert check_recipe(path, hardware=CPU).errors == []


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_a_recipe_written_anew_reads_as_the_same(path, tmp_path):
    recipe = load_recipe(path)
    written = tmp_path / "written.yaml"
    written.write_text(write_yaml(recipe), encoding="utf-8")
    assert load_recipe(written) == recipe
