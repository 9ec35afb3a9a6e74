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
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    for name, content in {**WHOLE, **files}.items():
        if isinstance(content, Path):
            (folder / name).symlink_to(content)
        elif content is not None:
            (folder / name).write_bytes(content)
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
            "model.safetensors.index.json:1:21: not JSON: Expecting value",
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
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "gptqmodel is not installed"),
        ({}, {"vocab_size": 9, "pad_token_id": 9}, "config.json: pad_token_id is 9, outside the"),
        (
            {"generation_config.json": b'{"eos_token_id": [9, 12]}'},
            {"vocab_size": 9},
            "generation_config.json: eos_token_id is [9, 12], outside the vocabulary",
        ),
        ({"config.json": b'{"a": 1,\n  // two\n  "b": 2}'}, {}, "config.json:2:3: not JSON: "),
        ({"config.json": b'{"a": "\xff"}'}, {}, "config.json is not UTF-8 text (byte 7)"),
        ({"generation_config.json": b"[]"}, {}, "generation_config.json cannot be read as a JSON"),
        (
            {"tokenizer.json": b'{"model": {'},
            {},
            "tokenizer.json:1:12: not JSON: Expecting property",
        ),
        (
            {"model.safetensors": Path("../../blobs/4cf0")},
            {},
            "is a link to ../../blobs/4cf0, which",
        ),
        (
            {"model.safetensors": None, "latest": b"global_step100"},
            {},
            "holds no weights but config.json, latest",
        ),
        ({}, OWN, "mine.py is missing, which `auto_map`"),
    ],
)
def test_faults_are_named_with_their_file_and_fix(tmp_path, files, config, said):
    found = problems(tmp_path, files, config)
    assert len([each for each in found if said.format(tmp_path) in each]) == 1
    assert all(str(tmp_path) in each and ". Fix: " in each for each in found)
    assert len(found) == 1 or "quantization_config" in config or "is a link" in said


@pytest.mark.parametrize(
    ("files", "config"),
    [
        ({"mine.py": b"x = 1"}, OWN),
        ({}, {"auto_map": {"AutoTokenizer": ["mine.Mine", None], "AutoConfig": "a/b--mine.Mine"}}),
        ({}, {"architectures": "LlamaForCausalLM"}),
        ({"generation_config.json": b'{"eos_token_id": [8, 12]}'}, {"vocab_size": 9}),
        ({"pytorch_model.bin": POINTER, "tokenizer.model": POINTER}, {}),  # neither is read
        ({"model.safetensors": None, "pytorch_model.bin": b"PK"}, {}),
        ({"model.safetensors": None}, {"transformers_weights": "other.safetensors"}),
    ],
)
def test_whole_folders_have_no_problems(tmp_path, files, config):
    assert problems(tmp_path, files, config) == []
