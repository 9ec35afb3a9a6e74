"""What `model.lora` names, against what the files of the model say."""

import json
import struct

import pytest

from grpo_cli.checks.adapter import check_adapter, check_lora
from grpo_cli.recipe.loading import load_recipe
from tests.contexts import make_context
from tests.recipe_texts import GOOD, write_recipe


@pytest.mark.parametrize("config", [{"num_hidden_layers": 2}, {"text_config": {"n_layer": 2}}])
@pytest.mark.parametrize(("layers", "missing"), [("[1, 2]", "2"), ("99", "99"), ("[0, 1]", "")])
def test_layers_that_the_model_does_not_have(tmp_path, config, layers, missing):
    (tmp_path / "config.json").write_text(json.dumps(config))
    lora = f"{{target_modules: [q_proj], layers_to_transform: {layers}}}"
    text = GOOD.replace("path: tiny", f"path: {tmp_path}\n  lora: {lora}")
    issues = list(check_lora(make_context(load_recipe(write_recipe(tmp_path, text)))))
    seen = [(each.seen, each.path, each.fix) for each in issues]
    path, fix = "model.lora.layers_to_transform", "its layers are numbered from 0 to 1"
    assert seen == ([(f"the model has no layer {missing}", path, fix)] if missing else [])


def tensors(**shapes):
    entries = {
        name.replace("__", "."): {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    ("layer", "shape", "said"),
    [
        ("base_model__model__", [4, 64], ""),
        ("", [4, 64], "none of the names in"),
        ("base_model__model__", [4, 128], "q_proj.lora_A.weight is 4 × 128, and"),
    ],
)
def test_an_adapter_of_another_model_is_named_by_its_header(tmp_path, layer, shape, said):
    name = "model__layers__0__self_attn__q_proj"
    for folder in ("base", "adapter"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base/config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "base/model.safetensors").write_bytes(tensors(**{f"{name}__weight": [32, 64]}))
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    weights = tensors(**{f"{layer}{name}__lora_A__weight": shape})
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(weights)
    paths = f"path: {tmp_path}/base\n  adapter: {tmp_path}/adapter"
    recipe = load_recipe(write_recipe(tmp_path, GOOD.replace("path: tiny", paths)))
    seen = [each.seen for each in check_adapter(make_context(recipe))]
    assert (len(seen) == 1 and said in seen[0]) if said else not seen
