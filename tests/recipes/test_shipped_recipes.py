"""Every shipped recipe passes the checks, fits the published schema, and names the schema."""

import json
from pathlib import Path

import jsonschema
import pytest

from grpo_cli.preflight.checks import check_recipe
from grpo_cli.preflight.hardware import Hardware
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.templates import list_templates, write_template
from grpo_cli.recipe.writing import write_yaml
from grpo_cli.recipe.yaml_tree import read_text

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
CPU, GPU = Hardware(gpus=0, cpus=2), Hardware(gpus=1, cpus=8)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_shipped_recipe_passes_the_checks(path, hardware, tmp_path):
    overrides = []
    if path.stem == "gsm8k-local":
        rows = "".join(f'{{"question": "{i}", "answer": "so #### {i}"}}\n' for i in range(40))
        (tmp_path / "rows.jsonl").write_text(rows)
        overrides = [f"dataset.{key}={tmp_path / 'rows.jsonl'}" for key in ("train", "eval")]
    checked = check_recipe(path, overrides, hardware)
    assert checked.errors == []
    assert checked.batch.valid


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_the_published_schema(path):
    text = path.read_text(encoding="utf-8")
    assert "# yaml-language-server: $schema=recipe.schema.json" in text.splitlines()[0]
    schema = json.loads((ROOT / "recipes" / "recipe.schema.json").read_text())
    plain = read_text(text, path.name).plain()
    assert plain["name"] == path.stem
    jsonschema.validate(plain, schema)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
def test_the_local_recipe_takes_the_real_gsm8k():
    overrides = [f"dataset.train={GSM8K / 'train.jsonl'}", f"dataset.eval={GSM8K / 'test.jsonl'}"]
    checked = check_recipe(ROOT / "recipes" / "gsm8k-local.yaml", overrides, CPU)
    assert checked.errors == []
    assert checked.peek.train_rows == 7473


@pytest.mark.parametrize("template", list_templates())
def test_a_template_passes_the_checks_once_its_data_is_there(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_template(template, "mine")
    (tmp_path / "data").mkdir()
    rows = "".join(f'{{"question": "{i}", "answer": "so #### {i}"}}\n' for i in range(400))
    (tmp_path / "data" / "train.jsonl").write_text(rows)
    assert check_recipe(path, hardware=CPU).errors == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_written_anew_reads_as_the_same(path, tmp_path):
    recipe = load_recipe(path)
    written = tmp_path / "written.yaml"
    written.write_text(write_yaml(recipe), encoding="utf-8")
    assert load_recipe(written) == recipe
