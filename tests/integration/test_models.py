import json
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

from grpo_cli.errors import RecipeError, RunError, SetupError, install_extra
from grpo_cli.fast import completions as sampling
from grpo_cli.fast.completions import Completion, sample_completions
from grpo_cli.fast.decoding import find_prompt_ties
from grpo_cli.fast.tokens import all_eos_token_ids, count_prompt_tokens, encode_prompt
from grpo_cli.models import loading
from grpo_cli.models.loading import build_peft_config, check_weights, load_model, load_tokenizer
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.probing.counting import read_shape
from grpo_cli.recipe.model import LoraConfig, ModelConfig
from grpo_cli.recipe.training import FastConfig
from tests.tiny_models import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    PAD,
    TURN_END,
    make_tiny_model,
)

PROMPTS = ["a", "a much longer prompt", "of middling length", "b"]
MESSAGES = [{"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "base", kind="gpt2", chat=False)


@pytest.fixture
def pair(chat_folder: Path) -> tuple[Any, Any]:
    config = ModelConfig(path=str(chat_folder))
    tokenizer = load_tokenizer(config)
    return load_model(config, tokenizer), tokenizer


def copy_with(folder: Path, to: Path, name: str, **changes: Any) -> ModelConfig:
    """The model in `to`, with values of one of its JSON files changed, or removed where None."""
    shutil.copytree(folder, to)
    settings = json.loads((to / name).read_text()) | changes
    kept = {key: value for key, value in settings.items() if value is not None}
    (to / name).write_text(json.dumps(kept))
    return ModelConfig(path=str(to))


def sample(model: Any, tokenizer: Any, prompts: Any, **options: Any) -> list[list[Completion]]:
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}
    return sample_completions(model, tokenizer, prompts, **{**settings, **options})


# --- tokenizer ---------------------------------------------------------------------------------


def test_a_tokenizer_that_transformers_made_up_is_refused(base_folder: Path, tmp_path: Path):
    shutil.copy(base_folder / "config.json", tmp_path)
    with pytest.raises(SetupError, match=r"no vocabulary .* Fix: put tokenizer\.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_the_tokenizer_pads_on_the_left(chat_folder: Path):
    tokenizer = load_tokenizer(ModelConfig(path=str(chat_folder)))
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer.eos_token) == (
        "left",
        PAD,
        TURN_END,
    )


def test_a_missing_pad_token_becomes_the_eos_token(base_folder: Path, tmp_path: Path):
    model = copy_with(base_folder, tmp_path / "m", "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(model).pad_token == END_OF_TEXT


def test_a_tokenizer_without_eos_is_refused(base_folder: Path, tmp_path: Path):
    model = copy_with(base_folder, tmp_path / "m", "tokenizer_config.json", eos_token=None)
    with pytest.raises(RecipeError, match=r"^model\.path: .* has no end-of-sequence token"):
        load_tokenizer(model)


def test_a_base_model_has_no_chat_template(base_folder: Path):
    assert load_tokenizer(ModelConfig(path=str(base_folder))).chat_template is None


def test_the_chat_template_comes_from_text_or_file(base_folder: Path, tmp_path: Path):
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    for template in (CHAT_TEMPLATE, str(tmp_path / "chat.jinja")):
        model = ModelConfig(path=str(base_folder), chat_template=template)
        assert load_tokenizer(model).chat_template == CHAT_TEMPLATE


# --- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_dtype(dtype: str, chat_folder: Path):
    model = load_model(ModelConfig(path=str(chat_folder), dtype=dtype))
    assert model.dtype == (torch.float32 if dtype == "auto" else getattr(torch, dtype))


@pytest.mark.parametrize(
    ("native", "cuda", "expected"),
    [
        (True, False, "auto"),
        (None, False, "auto"),
        (False, True, "auto"),
        (False, False, torch.float32),
    ],
)
def test_a_processor_without_bfloat16_takes_float32(
    native: bool | None,
    cuda: bool,
    expected: Any,
    chat_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(loading, "has_bfloat16", lambda: native)
    coarse = ModelConfig(path=str(tmp_path / "coarse"))
    load_model(ModelConfig(path=str(chat_folder), dtype="bfloat16")).save_pretrained(coarse.path)
    assert loading.pick_dtype(coarse, cuda=cuda) == expected
    asked = coarse.model_copy(update={"dtype": "bfloat16"})
    assert loading.pick_dtype(asked, cuda=cuda) == torch.bfloat16
    assert loading.pick_dtype(ModelConfig(path=str(chat_folder)), cuda=cuda) == "auto"


def test_options_reach_the_model(chat_folder: Path):
    kwargs = {"attention_dropout": 0.25}
    model = load_model(
        ModelConfig(path=str(chat_folder), attn_implementation="eager", init_kwargs=kwargs)
    )
    assert model.config._attn_implementation == "eager"
    assert model.config.attention_dropout == 0.25


def test_trl_gets_the_folder(chat_folder: Path):
    assert model_folder_or_id(ModelConfig(path=str(chat_folder))) == str(chat_folder)
    assert model_folder_or_id(ModelConfig(path="org/model")) == "org/model"


def test_a_tokenizer_of_another_model_is_refused(chat_folder: Path, tmp_path: Path):
    larger = make_tiny_model(tmp_path / "larger", vocab_words=["yes", "no"])
    tokenizer = load_tokenizer(ModelConfig(path=str(larger)))
    with pytest.raises(RecipeError, match="the tokenizer knows 263 tokens, the model 261"):
        load_model(ModelConfig(path=str(chat_folder)), tokenizer)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"model_type": "no_such_type"}, "pip install --upgrade transformers"),
        ({"model_type": "t5"}, "name a model that writes text from left to right"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "M"}},
            "trust_remote_code: true",
        ),
    ],
)
def test_a_model_of_another_kind(changes: dict, fix: str, chat_folder: Path, tmp_path: Path):
    model = copy_with(chat_folder, tmp_path / "m", "config.json", **changes)
    with pytest.raises(SetupError, match=fix):
        load_model(model)


def rewrite_weights(folder: Path, change: Any) -> None:
    """Pass the tensors of a model's only file through a function, by name."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        ({"num_hidden_layers": 4}, None, r"lacks 18 .* model\.layers\.2\..* number of layers"),
        ({"num_hidden_layers": 1}, None, r"leaves out layers .* 9 weights, .* model\.layers\.1\."),
        ({"intermediate_size": 60}, None, "6 weights .* is 32 × 64, and should be 32 × 60"),
        ({"hidden_size": "many"}, None, "'hidden_size' expected int.* correct that value"),
        ({"num_attention_heads": 3}, None, r"not a multiple .* heads \(3\)\. Fix: correct"),
        (
            {},
            lambda old: {"v_head": old.pop("lm_head.weight"), **old},
            r"lm_head\.weight; .* v_head",
        ),
        ({}, lambda old: {f"_orig_mod.{n}": w for n, w in old.items()}, "the prefix `_orig_mod.`"),
    ],
)
def test_weights_that_do_not_fit_are_refused_without_reading_them(
    config: dict, change: Any, said: str, chat_folder: Path, tmp_path: Path
):
    model = copy_with(chat_folder, tmp_path / "m", "config.json", **config)
    if change:
        rewrite_weights(tmp_path / "m", change)
    for check in (check_weights, load_model):
        with pytest.raises(SetupError, match=said) as caught:
            check(model, load_tokenizer(ModelConfig(path=str(chat_folder))))
        assert caught.value.path == "model.path"


def test_what_else_loading_would_refuse_is_seen_without_values(chat_folder: Path, tmp_path: Path):
    model = copy_with(chat_folder, tmp_path / "m", "tokenizer_config.json", pad_token="[PAD]")
    with pytest.raises(RecipeError, match=r"the padding token \[PAD\] has no embedding"):
        check_weights(model, load_tokenizer(model))
    unknown = ModelConfig(path=str(chat_folder), init_kwargs={"low_cpu_mem": True})
    with pytest.raises(SetupError, match="'low_cpu_mem'") as caught:
        check_weights(unknown, None)
    assert caught.value.path == "model.init_kwargs"


def test_weights_that_are_not_finite_are_refused_by_name(chat_folder: Path, tmp_path: Path):
    folder = shutil.copytree(chat_folder, tmp_path / "m")
    rewrite_weights(
        folder, lambda old: {**old, "model.norm.weight": old["model.norm.weight"] * 1e39}
    )
    model = ModelConfig(path=str(folder))
    for refuse in (lambda: check_weights(model, None), lambda: load_model(model)):
        with pytest.raises(SetupError, match=r"NaN or infinite values in model\.norm\.weight"):
            refuse()


def test_whole_checkpoints_of_every_form_pass(base_folder: Path, tmp_path: Path):
    tokenizer = load_tokenizer(ModelConfig(path=str(base_folder)))
    old = shutil.copytree(base_folder, tmp_path / "old")  # tied heads, and names without a prefix
    rewrite_weights(old, lambda w: {n.removeprefix("transformer."): v for n, v in w.items()})
    pickled = shutil.copytree(base_folder, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    sizes = {"hidden_size": 32, "moe_intermediate_size": 8, "head_dim": 8, "num_attention_heads": 4}
    experts = Qwen3MoeConfig(num_hidden_layers=1, num_experts=2, vocab_size=300, **sizes)
    # Its experts are several tensors in the file, and one in the model.
    Qwen3MoeForCausalLM(experts).save_pretrained(tmp_path / "experts", max_shard_size="30KB")
    for folder in (base_folder, old, pickled, tmp_path / "experts"):
        assert (
            load_model(ModelConfig(path=str(folder)), tokenizer, device="meta").device.type
            == "meta"
        )
        check_weights(ModelConfig(path=str(folder)), tokenizer)
        load_model(ModelConfig(path=str(folder)), tokenizer)


def test_missing_and_torn_files(chat_folder: Path, tmp_path: Path):
    folder = shutil.copytree(chat_folder, tmp_path / "m")
    model = ModelConfig(path=str(folder))
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(SetupError, match="the weights are torn"):
        load_model(model)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SetupError, match=r"put the weights \(\*\.safetensors\)"):
        load_model(model)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(SetupError, match=r"put tokenizer\.json"):
        load_tokenizer(model)


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"attn_implementation": "no_such"}, r"remove `model\.attn_implementation`"),
        ({"attn_implementation": "flash_attention_2"}, "or install that kernel"),
        ({"init_kwargs": {"no_such": 1}}, r"correct `model\.init_kwargs`"),
    ],
)
def test_options_that_do_not_work(fields: dict, fix: str, chat_folder: Path):
    with pytest.raises(SetupError, match=fix):
        load_model(ModelConfig(path=str(chat_folder), **fields))


def test_a_hub_model_without_network(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (load_tokenizer, load_model):
        with pytest.raises(SetupError, match="hf download no-such-org/no-such-model") as caught:
            load(ModelConfig(path="no-such-org/no-such-model"))
        assert "HF_HUB_OFFLINE=1" in str(caught.value)


def test_an_unknown_error_keeps_its_traceback(chat_folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match="a bug"):
        load_model(ModelConfig(path=str(chat_folder)))


def test_quantization_needs_cuda_and_bitsandbytes(
    chat_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    model = ModelConfig(path=str(chat_folder), quantization="4bit", lora=LoraConfig())
    with pytest.raises(SetupError, match="needs a CUDA device"):
        load_model(model, device_is_cuda=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SetupError, match=re.escape(install_extra("quantization"))):
        load_model(model, device_is_cuda=True)


# --- adapters ----------------------------------------------------------------------------------


def test_no_lora_no_adapters():
    assert build_peft_config(None) is None


def test_every_field_of_lora_reaches_peft():
    given = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        target_modules=("q_proj", "v_proj"),
        modules_to_save=("lm_head",),
        use_rslora=True,
        use_dora=True,
    )
    config = build_peft_config(given)
    assert config is not None
    for name, value in given.model_dump().items():
        expected = set(value) if isinstance(value, tuple) else value
        found = getattr(config, name)
        assert (set(found) if isinstance(value, tuple) else found) == expected
    assert config.task_type == "CAUSAL_LM"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "config.json",
            {"rope_parameters": {"rope_type": "yarm", "rope_theta": 1.0}},
            r"config.json of .*: KeyError: 'yarm'\. Fix: correct config",
        ),
        (
            "config.json",
            {"pad_token_id": 32000},
            r"Padding_idx must be within.* Fix: correct config",
        ),
        (
            "generation_config.json",
            {"do_sample": False, "top_p": 0.9},
            r"is invalid \(top_p\): .* Fix: remove top_p from it",
        ),
        ("tokenizer_config.json", {"eos_token": "</s>"}, r"the eos token </s> has no embedding"),
    ],
)
def test_settings_that_no_model_can_be_built_from_name_their_file(
    name: str, changes: dict, said: str, chat_folder: Path, tmp_path: Path
):
    model = copy_with(chat_folder, tmp_path / "m", name, **changes)
    with pytest.raises(RecipeError, match=said):
        check_weights(model, load_tokenizer(model))
    if name == "config.json":
        with pytest.raises(RecipeError, match=said):
            read_shape(model, batch=1, length=8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": ("q_proj", "v_porj")}, r"target_modules: .* v_porj\. .* mean v_proj\?"),
        ({"modules_to_save": ("lm_heads",)}, r"modules_to_save: .* lm_heads\. .* mean lm_head\?"),
    ],
)
def test_adapters_for_modules_that_are_not_there_are_refused(
    fields: dict, said: str, chat_folder: Path
):
    model = load_model(ModelConfig(path=str(chat_folder)), device="meta")
    with pytest.raises(RecipeError, match=said):
        loading.add_adapters(model, LoraConfig(**fields))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_on_all_linear_layers(kind: Any, tmp_path: Path):
    from peft import get_peft_model

    model = load_model(ModelConfig(path=str(make_tiny_model(tmp_path / "m", kind=kind))))
    adapted = get_peft_model(model, build_peft_config(LoraConfig(r=2)))
    assert sum(weight.requires_grad for weight in adapted.parameters()) > 0


# --- prompts as tokens -------------------------------------------------------------------------


def test_messages_go_through_the_chat_template(pair: tuple[Any, Any]):
    tokenizer = pair[1]
    text = tokenizer.decode(encode_prompt(tokenizer, MESSAGES))
    assert text == "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    assert count_prompt_tokens(tokenizer, MESSAGES) == len(encode_prompt(tokenizer, MESSAGES))
    assert count_prompt_tokens(tokenizer, "four") == 4


def test_the_chat_template_gets_its_variables(pair: tuple[Any, Any]):
    tokenizer = pair[1]
    tokenizer.chat_template = "{{ messages[0].content }}{{ 'quick' if fast else 'slow' }}"
    assert tokenizer.decode(encode_prompt(tokenizer, MESSAGES, {"fast": True})) == "Hi!quick"


def test_messages_need_a_chat_template(base_folder: Path):
    tokenizer = load_tokenizer(ModelConfig(path=str(base_folder)))
    with pytest.raises(RecipeError, match=r"model\.chat_template: .* no chat template"):
        encode_prompt(tokenizer, MESSAGES)


# --- sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["chat_folder", "base_folder"])
def test_a_batch_answers_as_one_by_one(folder: str, request: pytest.FixtureRequest):
    config = ModelConfig(path=str(request.getfixturevalue(folder)))
    model, tokenizer = load_model(config), load_tokenizer(config)
    alone = [sample(model, tokenizer, [prompt])[0] for prompt in PROMPTS]
    assert sample(model, tokenizer, PROMPTS) == alone
    assert sample(model, tokenizer, PROMPTS, batch_size=3) == alone
    assert [len(found) for found in alone] == [1, 1, 1, 1]


def test_generate_alone_is_for_what_only_it_knows(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    from peft import PromptTuningConfig, get_peft_model

    model, tokenizer = pair
    greedy = sample(model, tokenizer, PROMPTS, samples_per_prompt=2)
    decode = sampling.decode
    decoded: list[Any] = []

    def noted(*given: Any, **more: Any) -> Any:
        decoded.append(given)
        return decode(*given, **more)

    monkeypatch.setattr(sampling, "decode", noted)
    plain = FastConfig(sampling=False)
    assert sample(model, tokenizer, PROMPTS, samples_per_prompt=2, fast=plain) == greedy
    sample(model, tokenizer, PROMPTS, temperature=1.0, options={"typical_p": 0.5})
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    sample(get_peft_model(model, adapter), tokenizer, PROMPTS)
    assert decoded == []
    assert sample(model, tokenizer, PROMPTS, samples_per_prompt=2) == greedy
    assert len(decoded) == 1


def test_an_adapter_that_begins_within_the_prompt_sees_it_whole(pair: tuple[Any, Any]):
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    model, tokenizer = pair
    assert find_prompt_ties(model) is None
    asked = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, PeftLoraConfig(**asked, alora_invocation_tokens=[5]))
    assert "looks for in the prompt" in (find_prompt_ties(adapted) or "")
    assert len(sample(adapted, tokenizer, PROMPTS)) == len(PROMPTS)


def test_texts_and_messages_may_be_mixed(pair: tuple[Any, Any]):
    text, messages = sample(*pair, ["a", MESSAGES])
    assert [text] == sample(*pair, ["a"])
    assert [messages] == sample(*pair, [MESSAGES])


def test_samples_follow_the_seed(pair: tuple[Any, Any]):
    def draw(seed: int) -> list[list[Completion]]:
        return sample(*pair, PROMPTS, temperature=1.0, samples_per_prompt=3, seed=seed)

    first = draw(1)
    assert [len(found) for found in first] == [3, 3, 3, 3]
    assert len({completion.token_ids for found in first for completion in found}) > 6
    assert draw(1) == first
    assert draw(2) != first


def test_greedy_samples_are_all_the_same(pair: tuple[Any, Any]):
    (found,) = sample(*pair, ["a"], samples_per_prompt=3)
    assert found == sample(*pair, ["a"])[0] * 3


def test_nothing_to_do(pair: tuple[Any, Any]):
    assert sample(*pair, []) == []


def test_a_prompt_without_tokens_is_refused(pair: tuple[Any, Any]):
    with pytest.raises(RunError, match="a prompt has no tokens"):
        sample(*pair, ["a", ""])


def test_progress_counts_completions(pair: tuple[Any, Any]):
    calls: list[tuple[int, int]] = []
    options = {"temperature": 1.0, "samples_per_prompt": 2, "batch_size": 3}
    sample(*pair, PROMPTS, **options, on_progress=lambda *counts: calls.append(counts))
    assert calls == [(3, 8), (6, 8), (8, 8)]


def test_a_completion_ends_at_any_eos_token(pair: tuple[Any, Any]):
    model, tokenizer = pair
    (whole,) = sample(model, tokenizer, ["a"])[0]
    assert whole.clipped
    assert len(whole.token_ids) == 12
    third = whole.token_ids[2]
    stop = whole.token_ids.index(third)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, third]
    (short,) = sample(model, tokenizer, ["a"])[0]
    assert not short.clipped
    assert short.token_ids == whole.token_ids[: stop + 1]
    assert all_eos_token_ids(model.generation_config, tokenizer) == [tokenizer.eos_token_id, third]


@pytest.mark.parametrize("end", [None, 5])
def test_another_end_may_be_asked_for_as_a_number_or_none(end: int | None, pair: tuple[Any, Any]):
    found = sample(*pair, PROMPTS, temperature=1.0, seed=1, options={"eos_token_id": end})
    for (completion,) in found:
        assert (completion.token_ids[-1] == end) != completion.clipped


def test_special_tokens_are_not_in_the_text(pair: tuple[Any, Any]):
    model, tokenizer = pair
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(END_OF_TEXT)] = 1.0
        model.model.norm.weight.fill_(1.0)
    for (completion,) in sample(model, tokenizer, PROMPTS):
        tokens = tokenizer.decode(completion.token_ids)
        assert completion.text == tokens.replace(END_OF_TEXT, "")


def test_the_models_own_sampling_settings_do_not_get_in(pair: tuple[Any, Any]):
    options = {"temperature": 1.0, "seed": 3}
    plain, greedy = sample(*pair, PROMPTS, **options), sample(*pair, PROMPTS)
    own = pair[0].generation_config
    own.update(
        do_sample=True, top_k=1, top_p=0.1, temperature=0.1, repetition_penalty=5.0, min_p=0.9
    )
    assert sample(*pair, PROMPTS, **options) == plain
    assert sample(*pair, PROMPTS) == greedy
    assert pair[0].generation_config is own


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_warnings(
    temperature: float, fast: bool, pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
):
    pair[0].generation_config.update(do_sample=True, top_k=20, top_p=0.8, temperature=0.7)
    transformers_logging.enable_propagation()
    try:
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
            warnings.simplefilter("error")
            options = {"min_p": 0.1, "top_p": 0.9, "repetition_penalty": 1.1}
            sample(
                *pair,
                PROMPTS,
                temperature=temperature,
                options=options,
                fast=FastConfig(sampling=fast),
            )
    finally:
        transformers_logging.disable_propagation()
    assert caplog.records == []


@pytest.mark.parametrize("seed", [None, 5])
def test_the_model_and_the_random_state_are_left_alone(seed: int | None, pair: tuple[Any, Any]):
    model, _ = pair
    model.train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    before = torch.get_rng_state(), str(numpy.random.get_state())
    sample(*pair, PROMPTS, temperature=1.0, seed=seed)
    # As vLLM's engines on a GPU.
    drawn = [
        sample(
            *pair,
            PROMPTS,
            temperature=1.0,
            seed=seed,
            generate=lambda rows: numpy.random.randint(3, 200, (len(rows), 8)).tolist(),
        )
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(numpy.random.get_state()) == before[1]
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training
    assert model.is_gradient_checkpointing
    assert model.config.use_cache is False


def test_the_model_is_left_alone_after_an_error(pair: tuple[Any, Any]):
    model, _ = pair
    model.train()
    own, before = model.generation_config, torch.get_rng_state()

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(*pair, PROMPTS, temperature=1.0, seed=1, on_progress=fail)
    assert model.training
    assert model.generation_config is own
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_with_adapters(pair: tuple[Any, Any]):
    from peft import get_peft_model

    model, tokenizer = pair
    plain = sample(model, tokenizer, PROMPTS)
    adapted = get_peft_model(model, build_peft_config(LoraConfig(r=2)))
    assert sample(adapted, tokenizer, PROMPTS) == plain  # B is zero at first
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(weight, 1.0)
    assert sample(adapted, tokenizer, PROMPTS) != plain


@pytest.mark.parametrize(("kind", "chat"), [("llama", True), ("gpt2", False)])
def test_trl_trains_and_reads_prompts_as_we_do(kind: Any, chat: bool, tmp_path: Path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = ModelConfig(path=str(make_tiny_model(tmp_path / "m", kind=kind, chat=chat)))
    tokenizer = load_tokenizer(config)
    prompts: list[Any] = [MESSAGES if chat else "Hi!"] * 4
    trainer = GRPOTrainer(
        model=load_model(config, tokenizer),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=lambda completions, **_: [float(len(str(text))) for text in completions],
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            max_steps=2,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=8,
            report_to=[],
            bf16=False,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    assert trainer.state.global_step == 2
    ours = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    assert list(trainer._tokenize_prompts(prompts)[0]) == ours
    assert sorted(trainer.eos_token_ids) == sorted(
        all_eos_token_ids(trainer.model.generation_config, tokenizer)
    )


def test_tiny_models_are_the_same_each_time(tmp_path: Path):
    first, second = (make_tiny_model(tmp_path / name) for name in ("a", "b"))
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
