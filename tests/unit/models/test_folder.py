"""What the files of a model folder show without torch."""

import json
import struct
from pathlib import Path

import pytest

from grpo_cli.models.folder import check_data, check_folder
from grpo_cli.recipe.model import ModelConfig

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
INDEX = b'{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}'
OWN = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
WHOLE = {"tokenizer.json": b"{}", "model.safetensors": WEIGHTS}


def problems(folder: Path, files: dict, config: dict) -> list[str]:
    for name, content in {**WHOLE, **files}.items():
        if content is not None:
            (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    model = ModelConfig(path=str(folder), trust_remote_code=True)
    return [str(each) for each in (*check_folder(folder, model), *check_data(folder, model))]


@pytest.mark.parametrize(
    ("files", "config", "said"),
    [
        ({"model.safetensors": POINTER}, {}, "model.safetensors is a Git LFS pointer"),
        ({"model.safetensors": b""}, {}, "model.safetensors is empty"),
        ({"model.safetensors": WEIGHTS[:-1]}, {}, "is cut short: "),
        ({"model.safetensors": WEIGHTS[:20]}, {}, "has no safetensors header"),
        ({"model.safetensors": None}, {}, "holds no weights but config.json, tokenizer.json"),
        (
            {"model.safetensors": None, "model.safetensors.index.json": INDEX[:20]},
            {},
            "model.safetensors.index.json cannot be read as a JSON object",
        ),
        (
            {
                "model.safetensors": None,
                "model.safetensors.index.json": INDEX,
                "a.safetensors": WEIGHTS,
            },
            {},
            "1 of 2 files that {}/model.safetensors.index.json names are missing: b.safetensors",
        ),
        (
            {"tokenizer.json": None, "tokenizer.model": b"\n<!DOCTYPE html>"},
            {},
            "tokenizer.model is an HTML page",
        ),
        ({}, {"architectures": ["BertForMaskedLM"]}, "the model is BertForMaskedLM"),
        ({}, {"is_encoder_decoder": True}, "the model is an encoder-decoder (model)"),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq cannot be"),
        ({}, OWN, "mine.py is missing, which `auto_map`"),
        ({"mine.py": b"x = 1\ny = = 2"}, OWN, "mine.py:2: invalid syntax: y = = 2"),
    ],
)
def test_faults_are_named_with_their_file_and_fix(tmp_path, files, config, said):
    (problem,) = problems(tmp_path, files, config)
    assert said.format(tmp_path) in problem
    assert str(tmp_path) in problem
    assert ". Fix: " in problem


@pytest.mark.parametrize(
    ("files", "config"),
    [
        ({"mine.py": b"x = 1"}, OWN),
        ({}, {"auto_map": {"AutoTokenizer": ["mine.Mine", None], "AutoConfig": "a/b--mine.Mine"}}),
        ({}, {"architectures": "LlamaForCausalLM"}),
        ({"pytorch_model.bin": POINTER, "tokenizer.model": POINTER}, {}),  # neither is read
        ({"model.safetensors": None, "pytorch_model.bin": b"PK"}, {}),
        ({"model.safetensors": None}, {"transformers_weights": "other.safetensors"}),
    ],
)
def test_whole_folders_have_no_problems(tmp_path, files, config):
    assert problems(tmp_path, files, config) == []
