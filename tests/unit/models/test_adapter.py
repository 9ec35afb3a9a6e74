"""What `model.lora` names, against what the files of the model say."""

import json

import pytest

from grpo_cli.models.adapter import check_lora
from grpo_cli.recipe.loading import load_recipe
from tests.recipe_texts import GOOD, write_recipe


@pytest.mark.parametrize("config", [{"num_hidden_layers": 2}, {"text_config": {"n_layer": 2}}])
@pytest.mark.parametrize(("layers", "missing"), [("[1, 2]", "2"), ("99", "99"), ("[0, 1]", "")])
def test_layers_that_the_model_does_not_have(tmp_path, config, layers, missing):
    (tmp_path / "config.json").write_text(json.dumps(config))
    lora = f"{{target_modules: [q_proj], layers_to_transform: {layers}}}"
    text = GOOD.replace("path: tiny", f"path: {tmp_path}\n  lora: {lora}")
    issues = list(check_lora(load_recipe(write_recipe(tmp_path, text))))
    seen = [(each.seen, each.path, each.fix) for each in issues]
    path, fix = "model.lora.layers_to_transform", "its layers are numbered from 0 to 1"
    assert seen == ([(f"the model has no layer {missing}", path, fix)] if missing else [])
