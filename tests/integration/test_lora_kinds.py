"""Every kind of adapter: what is sampled, learned from, saved, merged and sent to vLLM is one model."""

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl.trainer.utils import add_fused_lm_head

from grpo_cli.errors import RecipeError
from grpo_cli.fast.graph_decoding import merged_adapters
from grpo_cli.models.loading import add_adapters, load_adapter, load_model
from grpo_cli.recipe.model import LoraConfig, ModelConfig
from tests.integration.test_merging import by_rollouts

IDS = torch.arange(3, 12)[None]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "plain": {},
    "patterns": {
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"v_proj": 3, "^model.layers.1": 5},
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 8}},
    "dora": {"use_dora": True, "rank_pattern": {"q_proj": 8}},
    "layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    "pattern": {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "excluded": {"exclude_modules": ["down_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "random": {"init_lora_weights": False},
    "gpt2 bias": {"bias": "all"},
    "gpt2 lora_only": {"bias": "lora_only", "target_modules": ["c_attn"]},
    "head": {"modules_to_save": ["lm_head"]},
    "vocabulary": {"target_modules": ["q_proj", "embed_tokens"]},
    "saved": {"modules_to_save": ["embed_tokens"]},
    "gpt2 dora": {"use_dora": True},
    "gpt2": {},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "experts": {"target_modules": [], "target_parameters": EXPERTS},
    "experts and attention": {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]},
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory, chat_model):
    """A model whose head has the weights of its embeddings."""
    folder = tmp_path_factory.mktemp("tied")
    config = AutoConfig.from_pretrained(chat_model, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = Qwen3MoeConfig(vocab_size=64, num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_one_model_wherever_it_is_used(request, tmp_path, kind):
    options, fixtures = KINDS[kind], {"gpt2": "base_model", "tied": "tied", "experts": "experts"}
    folder = request.getfixturevalue(fixtures.get(kind.split()[0], "chat_model"))
    source = ModelConfig(path=str(folder))
    base = logits_of(load_model(source))
    torch.manual_seed(1)
    model = add_adapters(load_model(source), LoraConfig(r=4, **options))
    starts_as_base = torch.allclose(logits_of(model), base, atol=1e-5)
    assert starts_as_base == (kind != "random")
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.05 * torch.randn_like(weight)
    trained = logits_of(model)
    assert not torch.allclose(trained, base, atol=1e-2)

    def same(other):
        return torch.allclose(other, trained, atol=1e-4)

    model.save_pretrained(tmp_path / "adapter")
    loaded = load_adapter(load_model(source), tmp_path / "adapter", source.path)
    assert same(logits_of(loaded))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded.merge_and_unload().save_pretrained(tmp_path / "whole")
    assert same(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")))
    if "target_parameters" not in options:
        server = load_model(source)
        server.load_state_dict(dict(by_rollouts(model)), strict=False)
        assert same(logits_of(server))
    with merged_adapters(model):
        assert same(logits_of(model))
    assert same(logits_of(model))
    if "bias" not in options:
        with model.disable_adapter():
            assert torch.allclose(logits_of(model), base, atol=1e-5)
    add_fused_lm_head(model.get_base_model())
    with torch.no_grad():
        learned = model(IDS, labels=IDS, fused_lm_head=True)["log_probs"]
    expected = trained.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    assert torch.allclose(learned[:, : expected.shape[1]], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"target_modules": ["lm_head"]}, "would never train its adapter"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "the head shares the weights"),
        ({"modules_to_save": ["embed_tokens"]}, "the head shares the weights"),
        ({"target_parameters": ["mlp.gate"]}, "no weight named mlp.gate"),
        ({"rank_pattern": {"c_attn": 8}}, "no module named c_attn"),
        ({"exclude_modules": ["q_porj"]}, "did you mean q_proj"),
        ({"target_parameters": ["down_proj.weight"]}, "not a valid target"),
    ],
)
def test_adapters_that_would_be_left_out(tied, options, seen):
    with pytest.raises(RecipeError, match=seen):
        add_adapters(load_model(ModelConfig(path=str(tied))), LoraConfig(r=4, **options))
