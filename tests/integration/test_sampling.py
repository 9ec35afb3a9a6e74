"""Faster sampling against plain `generate()`: the same tokens, the same chances."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DogeConfig,
    DogeForCausalLM,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MegatronBertConfig,
    MegatronBertForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl import GRPOConfig, GRPOTrainer

from grpo_cli.fast import attention, decoding, graph_decoding
from grpo_cli.fast.decoding import decode, draw_tokens, read_decoding, unsupported_reason
from grpo_cli.recipe.training import FastConfig
from grpo_cli.training.rollout.samplers import TokenSampler
from grpo_cli.training.trainer import RunTrainer
from tests.plain_rewards import scored_by

PAD, END, OTHER_END = 0, 1, 2
WORDS = 24
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": 3,
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [5, 6, 7], [14], [8, 9, 10, 11, 12, 13], [15, 16]]
"""Of unequal length; equal ones are not beside each other."""


def make_qwen(seed=0):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()


def make_llama_with_lora(folder):
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    return model.get_base_model().eval()


def settings(**changes):
    asked = {
        "max_new_tokens": 12,
        "do_sample": False,
        **({"top_k": 0} if changes.get("do_sample") else {}),
        "pad_token_id": PAD,
        "eos_token_id": [END],
        **changes,
    }
    return GenerationConfig(**asked, disable_compile=True)


def answers_of_generate(model, prompts, config):
    """Tokens after the prompts up to the first end, by `generate()` alone."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    rows = found[:, longest:].tolist()
    ends = config.eos_token_id
    return [
        row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1]
        for row in rows
    ]


def answers(model, prompts, config, **more):
    return decode(model, prompts, read_decoding(config, model.generation_config), **more)


@pytest.fixture(params=["llama", "gpt2", "qwen2", "lora"])
def model(request, chat_model, base_model):
    if request.param == "qwen2":
        return make_qwen()
    if request.param == "lora":
        return make_llama_with_lora(chat_model)
    folder = chat_model if request.param == "llama" else base_model
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("width", [1, 8])
def test_the_likeliest_tokens_are_those_of_generate(model, width):
    config = settings()
    found = answers(model, PROMPTS, config, width=width)
    assert found.completion_ids == answers_of_generate(model, PROMPTS, config)
    assert [len(row) for row in found.entropies] == [len(row) for row in found.completion_ids]


def test_one_row_and_rows_of_one_token(model):
    for prompts in ([PROMPTS[1]], [[7], [9], [7]]):
        expected = answers_of_generate(model, prompts, settings())
        assert answers(model, prompts, settings()).completion_ids == expected


def test_rows_that_end_at_different_times_leave_the_others_as_they_are():
    model = make_qwen(seed=3)
    prompts = [[word] * (1 + word % 5) for word in range(4, WORDS)] * 2
    plain = answers_of_generate(model, prompts, settings(max_new_tokens=40, eos_token_id=[99]))
    # The ends are words that the rows do say, each at its own time.
    config = settings(
        max_new_tokens=40, eos_token_id=sorted({row[len(row) // 3] for row in plain})[:3]
    )
    expected = answers_of_generate(model, prompts, config)
    lengths = {len(row) for row in expected}
    assert len(lengths) > 3, "rows must end at different times"
    assert answers(model, prompts, config).completion_ids == expected


def test_a_penalty_on_repetition_counts_the_prompt():
    model = make_qwen()
    config = settings(repetition_penalty=1.7)
    expected = answers_of_generate(model, PROMPTS, config)
    assert expected != answers_of_generate(model, PROMPTS, settings())
    assert answers(model, PROMPTS, config).completion_ids == expected


def test_the_first_word_comes_as_often_as_its_chance():
    model = make_qwen()
    config = settings(do_sample=True, temperature=1.3, top_k=9, top_p=0.9, max_new_tokens=1)
    rows = 3000
    torch.manual_seed(0)
    found = answers(model, [PROMPTS[1]] * rows, config).completion_ids
    with torch.no_grad():
        scores = model(torch.tensor([PROMPTS[1]])).logits[0, -1:] / 1.3
    for narrow in read_decoding(config, model.generation_config).warpers:
        scores = narrow(None, scores)
    expected = rows * scores.softmax(-1)[0]
    seen = torch.bincount(torch.tensor(found).flatten(), minlength=WORDS)
    possible = expected > 0
    assert 2 < possible.sum() <= 9
    assert seen[~possible].sum() == 0
    surprise = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    # Chi-square: with 8 degrees of freedom above 35 once in 30,000.
    assert surprise < 35


def test_words_without_a_chance_are_never_drawn_and_small_chances_are_kept():
    chances = torch.tensor([[0.0, 1e-3, 0.0, 0.999, 0.0]]).expand(20_000, 5)
    torch.manual_seed(0)
    seen = torch.bincount(draw_tokens(chances).flatten(), minlength=5).tolist()
    assert seen[0] == seen[2] == seen[4] == 0
    assert 5 < seen[1] < 50


def test_chances_that_are_no_numbers_end_the_sampling():
    with pytest.raises(RuntimeError, match="probability tensor contains either"):
        draw_tokens(torch.tensor([[0.5, float("nan")]]))


def test_the_same_seed_gives_the_same_completions():
    model, config = make_qwen(), settings(do_sample=True, temperature=1.0)
    found = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        found.append(answers(model, PROMPTS * 3, config).completion_ids)
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][2], "equal prompts are answered independently"


def test_a_prompt_that_is_asked_for_often_is_read_once(monkeypatch):
    model = make_qwen()
    read = []
    forward = model.model.forward
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda *given, **more: (
            read.append(tuple(more["input_ids"].shape)) or forward(*given, **more)
        ),
    )
    answers(model, [PROMPTS[1], PROMPTS[0]] * 4, settings(max_new_tokens=2))
    assert read == [(2, 5), (8, 1), (8, 1)]


def attention_of_one_token(heads=4, key_heads=2, tokens=1):
    """Query, key, value and a mask of rows of unequal length."""
    torch.manual_seed(0)
    query = torch.randn(3, tokens, heads, 8).transpose(1, 2)
    key, value = torch.randn(2, 3, key_heads, 10, 8)
    mask = torch.arange(10) >= torch.tensor([0, 4, 9])[:, None, None, None]
    return query, key, value, mask.expand(3, 1, tokens, 10)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_heads_that_share_keys_attend_as_if_each_had_its_own(key_heads, masked, scaling):
    query, key, value, mask = attention_of_one_token(key_heads=key_heads)
    seen = mask if masked else None
    module = SimpleNamespace(num_key_value_groups=4 // key_heads)
    expected, _ = sdpa_attention_forward(module, query, key, value, seen, scaling=scaling)
    found = attention.attend_one_token(query, key, value, seen, scaling)
    assert found.shape == expected.shape == (3, 1, 4, 8)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_what_is_not_one_tokens_attention_is_left_to_transformers():
    query, key, _, mask = attention_of_one_token()
    assert attention.is_one_token(query, key, mask, {"dropout": 0.0, "scaling": 0.3})
    assert attention.is_one_token(query, key, None, {})
    assert not attention.is_one_token(query, key.repeat(1, 2, 1, 1), mask, {})
    assert not attention.is_one_token(query, key, mask.expand(3, 4, 1, 10), {})
    assert not attention.is_one_token(query, key, mask, {"dropout": 0.1})
    assert not attention.is_one_token(query, key, mask, {"position_bias": torch.zeros(1, 4, 1, 10)})
    query, key, _, mask = attention_of_one_token(tokens=2)
    assert not attention.is_one_token(query, key, mask, {})


def test_a_model_that_passes_its_mask_by_name_is_sampled():
    torch.manual_seed(0)
    model = DogeForCausalLM(DogeConfig(**SHAPE)).eval()
    assert unsupported_reason(model) is None
    found = answers(model, PROMPTS, settings(max_new_tokens=4))
    assert found.completion_ids == answers_of_generate(model, PROMPTS, settings(max_new_tokens=4))


class CountsLogits(Qwen2ForCausalLM):
    """As many models of remote code, it takes how many logits to keep as a number, and not as places."""

    def forward(self, input_ids=None, cache=None, position_ids=None, logits_to_keep=0, **named):
        found = self.model(
            input_ids=input_ids,
            cache=cache,
            position_ids=position_ids,
            **{name: named[name] for name in ("attention_mask", "use_cache")},
        )
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, cache=found.cache)


def test_a_model_that_counts_the_logits_to_keep_is_sampled():
    torch.manual_seed(0)
    model = CountsLogits(Qwen2Config(**SHAPE)).eval()
    assert unsupported_reason(model) is None
    expected = answers_of_generate(make_qwen(), PROMPTS, settings())
    assert answers(model, PROMPTS, settings()).completion_ids == expected


def test_shared_keys_are_copied_for_prompts_alone_and_as_before_afterwards(monkeypatch):
    copied = []
    monkeypatch.setattr(
        sdpa_attention,
        "repeat_kv",
        lambda states, times: copied.append(states.shape[2]) or repeat_kv(states, times),
    )
    model, usual = make_qwen(), AttentionInterface()["sdpa"]
    answers(model, PROMPTS, settings(max_new_tokens=4))
    layers_by_keys_and_values = SHAPE["num_hidden_layers"] * 2
    assert copied == [len(PROMPTS[1]) - 1] * layers_by_keys_and_values
    monkeypatch.setattr(model, "generate", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answers(model, PROMPTS, settings())
    assert AttentionInterface()["sdpa"] is usual


def test_dropout_falls_on_each_row_by_itself(base_model):
    model = AutoModelForCausalLM.from_pretrained(base_model, attn_pdrop=0.5, resid_pdrop=0.5)
    model.train()
    torch.manual_seed(0)
    found = answers(model, [PROMPTS[1]] * 8, settings(max_new_tokens=1))
    assert len({tuple(row) for row in found.entropies}) == 8


def test_what_only_generate_honours_is_left_to_it():
    own = GenerationConfig()
    assert read_decoding(settings(), own) is not None
    for other in (
        {"num_beams": 2},
        {"no_repeat_ngram_size": 2},
        {"stop_strings": ["x"]},
        {"min_new_tokens": 3},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
    ):
        assert read_decoding(settings(**other), own) is None, other
    assert read_decoding(settings(), GenerationConfig(suppress_tokens=[4])) is None


def test_settings_that_are_left_open_are_the_models():
    open_ones = GenerationConfig(
        max_new_tokens=3, do_sample=True, pad_token_id=PAD, eos_token_id=[END]
    )
    found = read_decoding(open_ones, GenerationConfig(top_k=7, temperature=0.5))
    assert found.temperature == 0.5
    assert [narrow.top_k for narrow in found.warpers] == [7]
    assert not read_decoding(settings(do_sample=True), GenerationConfig(top_k=7)).warpers


def test_the_models_own_settings_stay_out_where_others_are_asked_for():
    model = make_qwen()
    expected = answers_of_generate(model, PROMPTS, settings(repetition_penalty=1.0))
    own = {
        "repetition_penalty": 3.0,
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.8,
        "do_sample": True,
    }
    model.generation_config = GenerationConfig(**own, pad_token_id=PAD, eos_token_id=[END])
    assert answers(model, PROMPTS, settings(repetition_penalty=1.0)).completion_ids == expected
    assert answers(model, PROMPTS, settings()).completion_ids != expected


def test_models_that_read_otherwise_are_left_to_generate():
    assert unsupported_reason(make_qwen()) is None
    windowed = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4))
    assert unsupported_reason(windowed) == "the model has sliding windows"
    bert = MegatronBertForCausalLM(MegatronBertConfig(**SHAPE, is_decoder=True))
    assert "encoder" in unsupported_reason(bert)
    hybrid = Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]))
    assert unsupported_reason(hybrid) == "the model has layers of the kind conv"
    mamba = MambaForCausalLM(MambaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=1))
    assert "linear_attention" in unsupported_reason(mamba)


def count_letters(completions, **_):
    return [float(len(text)) for text in completions]


def build_trainer(trainer, folder, where, fast=None, **changes):
    given = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 16,
        "gradient_checkpointing": False,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "temperature": 0.8,
        **changes,
    }
    built = trainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        **scored_by(trainer, count_letters),
        args=GRPOConfig(output_dir=str(where), **given),
        train_dataset=Dataset.from_list([{"prompt": f"count {i}"} for i in range(8)]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    if isinstance(built, RunTrainer):
        built.told = {}
        built.model.train()
        built.speed_up(fast or FastConfig(), built.told.update)
        built._settle(built.model)
    return built


def sample_tokens(trainer, prompts):
    return TokenSampler(trainer, trainer.reader).sample(prompts, group_size=4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_entropies_are_those_that_trl_computes(tmp_path, chat_model, checkpointing):
    trainer = build_trainer(
        RunTrainer, chat_model, tmp_path, gradient_checkpointing=checkpointing, top_k=20
    )
    prompts = [[40, 41, 42, 43], [50, 51], [40, 41, 42, 43]]
    if checkpointing:
        trainer.model.gradient_checkpointing_enable()
    sampled = sample_tokens(trainer, prompts)
    assert sampled.logprobs is None
    assert trainer.model.is_gradient_checkpointing == checkpointing
    for prompt, completion, entropies in zip(prompts, sampled.ids, sampled.entropies, strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            _, expected, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), len(completion), compute_entropy=True
            )
        assert entropies == pytest.approx(expected[0].tolist(), abs=1e-4)


def test_the_trainer_samples_what_trl_would(tmp_path, chat_model):
    prompts = [[40, 41, 42, 43], [50, 51], [40, 41, 42, 43]]
    greedy = {"generation_kwargs": {"do_sample": False}}
    ours = build_trainer(RunTrainer, chat_model, tmp_path, **greedy)
    trls = build_trainer(GRPOTrainer, chat_model, tmp_path, **greedy)
    expected = trls._generate_single_turn(prompts, None, {}, 4)
    sampled = sample_tokens(ours, prompts)
    assert (sampled.ids, sampled.logprobs) == expected
    assert len(sampled.entropies) == len(prompts)


def test_graphs_are_left_off_without_a_gpu_and_sample_the_same(tmp_path, chat_model, monkeypatch):
    prompts = [[40, 41, 42, 43], [50, 51], [40, 41, 42, 43]]
    options = {"fast": FastConfig(cuda_graphs=True), "generation_kwargs": {"do_sample": False}}
    plain = build_trainer(RunTrainer, chat_model, tmp_path, **options)
    assert plain.told == {"cuda_graphs": "there is no GPU"}
    monkeypatch.setattr(graph_decoding, "graph_unsupported_reason", lambda model: None)
    monkeypatch.setattr(decoding, "decode", lambda *given, **more: 1 / 0)
    trainer = build_trainer(RunTrainer, chat_model, tmp_path, **options)
    sampled = sample_tokens(trainer, prompts)
    monkeypatch.undo()
    expected = sample_tokens(plain, prompts)
    assert sampled.ids == expected.ids
    pairs = zip(sampled.entropies, expected.entropies, strict=True)
    assert all(row == pytest.approx(other, abs=1e-4) for row, other in pairs)


def test_entropies_are_noted_for_learning_alone(tmp_path, chat_model):
    prompts = [[40, 41, 42, 43], [50, 51], [40, 41, 42, 43]]
    trainer = build_trainer(RunTrainer, chat_model, tmp_path)
    trainer.model.eval()
    sampled = sample_tokens(trainer, prompts)
    assert (len(sampled.ids), sampled.entropies) == (3, None)
    assert answers(make_qwen(), PROMPTS, settings(), entropies=False).entropies == [[]] * 6


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"eos_token_id": 7}, "end completions with other tokens"),
    ],
)
def test_the_trainer_leaves_other_settings_to_trl(tmp_path, chat_model, asked, told):
    trainer = build_trainer(RunTrainer, chat_model, tmp_path, generation_kwargs=asked)
    sampled = sample_tokens(trainer, [[40, 41, 42]] * 4)
    assert (len(sampled.ids), sampled.entropies) == (4, None)
    assert told in trainer.told["sampling"]


def test_rows_are_left_out_as_soon_as_half_have_ended(monkeypatch):
    model = make_qwen(seed=3)
    sizes = []
    generate = model.generate
    monkeypatch.setattr(
        model,
        "generate",
        lambda **given: sizes.append(len(given["input_ids"])) or generate(**given),
    )
    torch.manual_seed(0)
    config = settings(do_sample=True, max_new_tokens=60, temperature=2.0)
    found = answers(model, [PROMPTS[0]] * 16, config)
    assert sizes[0] == 16
    assert all(
        after <= before * (1 - decoding._ENDED_SHARE) for before, after in itertools.pairwise(sizes)
    )
    assert len(sizes) > 2
    assert len(found.completion_ids) == 16
