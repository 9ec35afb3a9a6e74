"""What the files of a model folder show without torch."""

import json
import struct
from pathlib import Path

import pytest

from grpo_cli.models.source import check_data, check_folder
from grpo_cli.recipe.model import ModelConfig

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)
EMPTY = json.dumps({"a.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
GATHERED_NOT = struct.pack("<Q", len(EMPTY)) + EMPTY + b" "
INDEX = b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
WHOLE = {"tokenizer.json": b"{}", "model.safetensors": WEIGHTS}


def problems(folder: Path, files: dict, config: dict) -> list[str]:
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in {"model_type": "llama", **config}.items() if v is not None})
    )
    for name, content in {**WHOLE, **files}.items():
        if content is not None:
            (folder / name).write_bytes(content)
    model = ModelConfig(path=str(folder))
    return [str(each) for each in (*check_folder(folder, model), *check_data(folder))]


@pytest.mark.parametrize(
    ("files", "config", "said"),
    [
        ({"model.safetensors": POINTER}, {}, "model.safetensors is a Git LFS pointer"),
        ({"model.safetensors": b""}, {}, "has no safetensors header"),
        ({"model.safetensors": WEIGHTS[:-1]}, {}, "is cut short: "),
        ({"model.safetensors": WEIGHTS[:20]}, {}, "has no safetensors header"),
        ({"model.safetensors": GATHERED_NOT}, {}, "1 of 1 weights of "),
        ({"model.safetensors.index.json": INDEX}, {}, "lacks model-2.safetensors, which "),
        ({"tokenizer.json": b""}, {}, "tokenizer.json is empty"),
        ({"tokenizer.json": None}, {}, "holds no tokenizer but config.json, model.safetensors"),
        ({}, {"model_type": None}, "config.json has no `model_type`"),
        ({}, {"architectures": ["BertForMaskedLM"]}, "the model is BertForMaskedLM"),
        ({}, {"is_encoder_decoder": True}, "the model is an encoder-decoder (model)"),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq cannot be"),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "gptqmodel is not installed"),
        ({"config.json": b"[]"}, {}, "config.json holds no JSON object"),
        ({"generation_config.json": b'{"a": "\xff"}'}, {}, "generation_config.json holds no JSON"),
    ],
)
def test_faults_are_named_with_their_file_and_fix(tmp_path, files, config, said):
    found = problems(tmp_path, files, config)
    assert len([each for each in found if said in each]) == 1
    assert all(str(tmp_path) in each and ". Fix: " in each for each in found)
    assert len(found) == 1 or "quantization_config" in config


@pytest.mark.parametrize(
    ("files", "config"),
    [
        ({}, {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}),
        ({}, {"architectures": ["LlamaForCausalLM"]}),
        ({"pytorch_model.bin": POINTER, "tokenizer.model": POINTER}, {}),  # neither is read
        ({"model.safetensors": None, "pytorch_model.bin": b"PK"}, {}),
    ],
)
def test_whole_folders_have_no_problems(tmp_path, files, config):
    assert problems(tmp_path, files, config) == []
