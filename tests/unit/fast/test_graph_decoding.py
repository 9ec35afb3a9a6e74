"""Sampling in steps of fixed shapes against `decode`: the same tokens, the same chances.

A CPU has no graphs; in their place the operators of a step are recorded and repeated, without its Python code.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from grpo_cli.fast import graph_decoding
from grpo_cli.fast.decoding import Decoding, decode, read_decoding
from grpo_cli.fast.graph_decoding import MODELS, decode_with_graphs, graph_unsupported_reason

PAD, WORDS, NEVER = 0, 24, 99
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [5, 6, 7], [14], [8, 9, 10, 11, 12, 13], [15, 16]]
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": PAD,
    "eos_token_id": 1,
    "bos_token_id": 3,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def make_model(kind="qwen2", **changes):
    torch.manual_seed(0)
    more = {"gpt2": NO_DROPOUT, "mistral": {"sliding_window": None}}.get(kind, {})
    config = AutoConfig.for_model(kind, **{**SHAPE, **more, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def make_lora_model(**changes):
    model = make_model(tie_word_embeddings=True)
    lora = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **changes}
    return get_peft_model(model, LoraConfig(**lora)).eval().get_base_model()


def read(ends=(NEVER,), **changes):
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, **changes}
    if changes.get("do_sample"):
        asked.setdefault("top_k", 0)
    config = GenerationConfig(**asked, eos_token_id=list(ends), disable_compile=True)
    return read_decoding(config, GenerationConfig())


@pytest.fixture(autouse=True)
def _little_room(monkeypatch):
    """Sampling checks often, and moves to a new cache twice."""
    monkeypatch.setattr(graph_decoding, "_ROOM", 3)
    monkeypatch.setattr(graph_decoding, "_CHECK_EVERY", 2)
    monkeypatch.setattr(graph_decoding, "_WARM_UP", 1)


class Recorder(TorchDispatchMode):
    """Keeps every operator, to repeat it with the same arguments or what took their place."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def replay(self):
        new = {}
        for func, args, kwargs, before in self.calls:
            args, kwargs = tree_map(lambda each, new=new: new.get(id(each), each), (args, kwargs))
            result = func(*args, **kwargs)
            pairs = zip(tree_leaves(before), tree_leaves(result), strict=True)
            new |= {id(old): each for old, each in pairs}


@pytest.fixture
def recorded(monkeypatch):
    """Replay recorded operators, as a GPU replays a graph; the list counts the replays."""
    replays = []

    def record(step, device):
        with Recorder() as recorder:
            step()
        # Unlike a capture, recording has computed the step.
        done = iter([True])
        return lambda: next(done, False) or replays.append(recorder.replay())

    monkeypatch.setattr(graph_decoding, "capture", record)
    return replays


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_the_likeliest_tokens_are_those_of_decode(kind, recorded):
    model = make_model(kind)
    free = decode(model, PROMPTS, read()).completion_ids
    # The ends are words that the rows say, each at its own time; one row says none.
    decoding = read(ends={free[0][2], free[1][6]})
    expected = decode(model, PROMPTS, decoding)
    found = decode_with_graphs(model, PROMPTS, decoding)
    assert found.completion_ids == expected.completion_ids
    assert len({len(row) for row in found.completion_ids}) > 1, "rows must end at different times"
    for row, other in zip(found.entropies, expected.entropies, strict=True):
        assert row == pytest.approx(other, abs=1e-5)
    assert recorded


def test_a_step_needs_nothing_but_its_operators(request):
    model, decoding = make_model(), read(do_sample=True, top_p=0.9, repetition_penalty=1.2)
    torch.manual_seed(0)
    expected = decode_with_graphs(model, PROMPTS * 2, decoding)
    replays = request.getfixturevalue("recorded")
    torch.manual_seed(0)
    assert decode_with_graphs(model, PROMPTS * 2, decoding) == expected
    # 12 tokens in caches with room for 3, 6 and 3, of which one warms up and one is recorded.
    assert len(replays) == 1 + 4 + 1
    assert decode_with_graphs(model, PROMPTS * 2, decoding) != expected, "no fixed random numbers"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.9},
        {"min_p": 0.05, "repetition_penalty": 1.5},
    ],
)
@pytest.mark.parametrize("lora", [False, True])
def test_each_token_is_drawn_by_its_probability(asked, lora, monkeypatch):
    model = make_lora_model() if lora else make_model()
    decoding = read(do_sample=True, **asked)
    drawn_from = []
    adjust = Decoding.adjust

    def note(self, ids, scores):
        adjusted = adjust(self, ids, scores)
        drawn_from.append(adjusted.softmax(dim=-1))
        return adjusted

    with monkeypatch.context() as patch:
        patch.setattr(Decoding, "adjust", note)
        found = decode_with_graphs(model, PROMPTS, decoding)
    longest = max(map(len, PROMPTS))
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, found.completion_ids, strict=True)):
        assert len(tokens) == 12
        with torch.no_grad():
            all_logits = model(torch.tensor([prompt + tokens])).logits
        # `generate()` counts padding as repeated too.
        padded = torch.tensor([[PAD] * (longest - len(prompt)) + prompt + tokens])
        for step in range(12):
            logits = all_logits[:, len(prompt) - 1 + step]
            expected = decoding.adjust(padded[:, : longest + step], logits).softmax(dim=-1)[0]
            torch.testing.assert_close(drawn_from[step][row], expected, atol=1e-5, rtol=1e-4)
            whole = (logits / decoding.temperature).softmax(dim=-1)
            entropy = float(torch.special.entr(whole).sum())
            assert found.entropies[row][step] == pytest.approx(entropy, abs=1e-4)


def test_a_token_comes_as_often_as_its_probability():
    model, rows = make_model(), 4000
    decoding = read(do_sample=True, temperature=1.3, top_k=9, max_new_tokens=1)
    torch.manual_seed(0)
    found = decode_with_graphs(model, [PROMPTS[1]] * rows, decoding, entropies=False)
    assert found.entropies == [[]] * rows
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[1]])).logits[:, -1]
    expected = rows * decoding.adjust(None, logits).softmax(dim=-1)[0]
    seen = torch.bincount(torch.tensor(found.completion_ids).flatten(), minlength=WORDS)
    possible = expected > 0
    assert 2 < possible.sum() <= 9
    assert seen[~possible].sum() == 0
    surprise = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    # Chi-square: with 8 degrees of freedom above 35 once in 30,000.
    assert surprise < 35


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_dora": True},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["q_proj"], "lora_bias": True},
    ],
)
def test_adapters_are_merged_in_a_copy(lora, monkeypatch):
    model = make_lora_model(**lora)
    weights = dict(model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    expected = decode(model, PROMPTS, read())
    found = decode_with_graphs(model, PROMPTS, read())
    assert found.completion_ids == expected.completion_ids
    with graph_decoding.merged_adapters(model):
        inside = dict(model.named_parameters())
    assert any(inside[name] is not weight for name, weight in weights.items())
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decode_with_graphs(model, PROMPTS, read())
    after = dict(model.named_parameters())
    assert all(after[name] is weight for name, weight in weights.items())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert decode(model, PROMPTS, read()) == expected, "the adapters are not merged"


def test_a_lone_token_is_a_prompt_and_rows_are_checked_before_the_room_ends(monkeypatch):
    monkeypatch.setattr(graph_decoding, "_ROOM", 64)
    model, steps = make_model(), []
    for prompts in ([[7]], [[7], [9], [7]]):
        assert decode_with_graphs(model, prompts, read()).completion_ids == (
            decode(model, prompts, read()).completion_ids
        )
    (tokens,) = decode(model, [[7]], read()).completion_ids
    step = graph_decoding._Steps._step
    monkeypatch.setattr(graph_decoding._Steps, "_step", lambda self: steps.append(1) or step(self))
    decoding = read(ends={tokens[0]}, max_new_tokens=50)
    assert decode_with_graphs(model, [[7]], decoding).completion_ids == [tokens[:1]]
    assert len(steps) == graph_decoding._CHECK_EVERY


def test_weights_that_are_no_numbers_end_the_sampling():
    model = make_model()
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="probability tensor contains either"):
        decode_with_graphs(model, PROMPTS, read(do_sample=True))


def test_what_a_graph_cannot_hold_is_left_to_decode():
    assert graph_unsupported_reason(make_model()) == "there is no GPU"
    assert "type phi" in graph_unsupported_reason(make_model("phi"))
    dropping = make_model("gpt2", attn_pdrop=0.1)
    assert graph_unsupported_reason(dropping).startswith("dropout")
    model = make_model()
    model.set_attn_implementation("eager")
    assert graph_unsupported_reason(model) == "attention eager needs other masks"
    model = make_model()
    model.is_quantized = True
    assert "quantized" in graph_unsupported_reason(model)
