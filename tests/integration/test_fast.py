"""The fast step against TRL's own: the same completions, the same weights after it."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GlmMoeDsaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RecurrentGemmaConfig,
)
from trl import GRPOConfig, GRPOTrainer

from grpo_cli.fast import attention
from grpo_cli.fast.decoding import has_dropout, sharing_unsupported_reason
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.recipe.training import FastConfig
from tests.tiny_models import make_tiny_model

GROUP = 4
ALL = FastConfig()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = ("llama", "gpt2")
    return {kind: make_tiny_model(tmp_path_factory.mktemp(kind), kind=kind) for kind in kinds}


class Rollouts:
    """Completions that depend on the prompt and the call alone; some end early, some are cut off."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0

    def __call__(self, prompts, trainer):
        found = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for number, prompt in enumerate(prompts):
            dice = random.Random(f"{prompt} {self.calls} {number % GROUP}")
            length = min(int(dice.expovariate(1 / 6)) + 1, 30)
            ids = [dice.randrange(5, 200) for _ in range(length)]
            if length < 30:
                ids[-1] = self.tokenizer.eos_token_id
            found["prompt_ids"].append(self.tokenizer(prompt)["input_ids"])
            found["completion_ids"].append(ids)
            found["logprobs"].append([-1.0] * length)
        self.calls += 1
        return found


def reward(prompts, completion_ids, **_):
    """Half of the prompts have no signal."""
    lengths = zip(prompts, completion_ids, strict=True)
    return [1.0 if "easy" in prompt else float(len(ids)) for prompt, ids in lengths]


PROMPTS = [f"{'easy' if n % 2 else 'hard'} {'so ' * (n % 5)}question {n}" for n in range(40)]


def load(folder, *, lora=False, dropout=0.0):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return model


def train(trainer_class, model, tokenizer, folder, *, fast=None, prompts=PROMPTS, **settings):
    """Trains; returns the trainer, the records of steps, and what was left off."""
    given = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": GROUP,
        "max_completion_length": 30,
        "max_steps": 3,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        **settings,
    }
    args = GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **given,
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=[reward],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
        eval_dataset=Dataset.from_dict({"prompt": list(prompts[:4])}),
        processing_class=tokenizer,
        rollout_func=Rollouts(tokenizer),
    )
    left_off = {}
    if fast is not None:
        trainer.speed_up(fast, left_off.update)
    trainer.train()
    return trainer, [record for record in trainer.state.log_history if "loss" in record], left_off


def compare(folder, tmp_path, *, fast=ALL, lora=False, **settings):
    """Trains in both ways; returns the records of both, and what was left off."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    start = {name: weight.clone() for name, weight in load(folder, lora=lora).named_parameters()}
    found = [
        train(GRPOTrainer, load(folder, lora=lora), tokenizer, tmp_path, **settings),
        train(FastTrainer, load(folder, lora=lora), tokenizer, tmp_path, fast=fast, **settings),
    ]
    plain, fast_ = (dict(trainer.model.named_parameters()) for trainer, _, _ in found)
    apart = max((plain[name] - fast_[name]).abs().max().item() for name in plain)
    moved = max((plain[name] - start[name]).abs().max().item() for name in plain)
    print(f"apart {apart:.1e}, moved {moved:.1e}")
    assert apart < 1e-6 < moved
    return found[0][1], found[1][1], found[1][2]


def same(plain, fast, *names, rel=1e-4):
    for name in names:
        for records in zip(plain, fast, strict=True):
            # What is only logged where completions are sampled is missing from both.
            wanted, seen = (record.get(name, math.nan) for record in records)
            assert seen == pytest.approx(wanted, rel=rel, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="dapo"),
        pytest.param({"loss_type": "grpo", "scale_rewards": "none"}, id="grpo"),
        pytest.param({"loss_type": "bnpo"}, id="bnpo"),
        pytest.param({"loss_type": "dr_grpo", "gradient_checkpointing": True}, id="dr_grpo"),
        pytest.param({"loss_type": "sapo", "num_iterations": 2}, id="sapo"),
        pytest.param({"loss_type": "cispo", "steps_per_generation": 4}, id="cispo"),
        pytest.param({"loss_type": "vespo", "mask_truncated_completions": True}, id="vespo"),
        pytest.param({"loss_type": "luspo", "importance_sampling_level": "sequence"}, id="luspo"),
        # Generation batches of different widths meet in one step.
        pytest.param({"steps_per_generation": 1}, id="two generations a step"),
        pytest.param({"temperature": 0.7, "delta": 2.0, "epsilon_high": 0.1}, id="clipped"),
    ],
)
@pytest.mark.parametrize(
    "budget", [None, pytest.param(40, marks=pytest.mark.slow)], ids=["one pass", "40 tokens"]
)
def test_the_weights_are_trls(folders, tmp_path, settings, budget):
    fast = FastConfig(max_tokens_per_micro_batch=budget)
    plain, found, left_off = compare(folders["llama"], tmp_path, fast=fast, **settings)
    assert not left_off
    same(plain, found, "loss", "grad_norm", "reward", "frac_reward_zero_std")
    assert set(plain[0]) == set(found[0])


def test_the_weights_are_trls_by_its_own_head(folders, tmp_path, monkeypatch):
    """Where all logits at once would take too much memory, or a GPU computes them."""
    asked = []
    monkeypatch.setattr(attention, "holds_logits", lambda *sizes: asked.append(sizes))
    plain, found, left_off = compare(folders["llama"], tmp_path, temperature=0.7)
    assert asked
    assert not left_off
    same(plain, found, "loss", "grad_norm")


@pytest.mark.parametrize(
    "part", [{"no_signal": True}, {"shared_prompts": True}, {"max_tokens_per_micro_batch": 40}]
)
def test_each_part_alone_gives_the_same_weights(folders, tmp_path, part):
    fast = FastConfig(**{"no_signal": False, "shared_prompts": False} | part)
    plain, found, _ = compare(folders["llama"], tmp_path, fast=fast)
    same(plain, found, "loss", "grad_norm")


def test_learned_positions_and_adapters_give_the_same_weights(folders, tmp_path):
    compare(folders["gpt2"], tmp_path)
    compare(folders["llama"], tmp_path, lora=True, learning_rate=0.1, max_steps=4)


def test_adam_moves_weights_that_get_no_gradient_as_it_would(folders, tmp_path):
    """A step in which nobody learns still has momentum and decay."""
    # Adam divides by the gradient's size: with its usual epsilon, rounding of what is nearly 0 shows.
    settings = {"optim": "adamw_torch", "weight_decay": 0.1, "adam_epsilon": 1e-3}
    prompts = ["hard one"] * 4 + ["easy one"] * 8
    compare(folders["llama"], tmp_path, shuffle_dataset=False, prompts=prompts, **settings)


def test_the_kl_term_is_learned_from_in_all_rows(folders, tmp_path):
    plain, found, left_off = compare(folders["llama"], tmp_path, beta=0.1, loss_type="grpo")
    assert set(left_off) == {"no_signal"}
    assert "a KL term, of weight 0.1" in left_off["no_signal"]
    same(plain, found, "loss", "grad_norm")
    same(plain, found, "kl", rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"entropy_coef": 0.1},
        {"top_entropy_quantile": 0.5},
        {"beta": 0.1, "loss_type": "bnpo"},
    ],
)
def test_what_would_not_be_exact_is_left_off_and_equal_to_the_bit(folders, tmp_path, settings):
    plain, found, left_off = compare(folders["llama"], tmp_path, **settings)
    assert set(left_off) == {"no_signal", "shared_prompts"}
    same(plain, found, "loss", "grad_norm", rel=0)


@pytest.mark.parametrize("fast", [None, ALL], ids=["trl's step", "fast step"])
def test_a_step_has_one_value_however_its_micro_batches_are_cut(folders, tmp_path, fast):
    """The same six prompts: in micro-batches of different size, the last alone in its step, or in one."""
    settings = {"prompts": PROMPTS[:6], "beta": 0.1, "num_iterations": 2, "learning_rate": 0.1}
    settings |= {"shuffle_dataset": False, "loss_type": "dapo"}
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    found = [
        train(
            FastTrainer, load(folders["llama"]), tokenizer, tmp_path, fast=fast, **settings, **cut
        )[1]
        for cut in (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3},
            {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 1},
        )
    ]
    clips = [name for name in found[0][1] if name.startswith("clip_ratio/")]
    assert found[0][1]["clip_ratio/region_mean"] > 0
    same(*found, "loss", "kl", "entropy", *clips, rel=1e-3)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo"])
def test_the_loss_of_the_policy_is_the_loss_without_the_bonus(folders, tmp_path, loss_type):
    settings = {"entropy_coef": 1e-9, "loss_type": loss_type, "gradient_accumulation_steps": 3}
    settings |= {"steps_per_generation": 4, "num_iterations": 2}
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    _, found, _ = train(
        FastTrainer, load(folders["llama"]), tokenizer, tmp_path, fast=ALL, max_steps=4, **settings
    )
    for record in found:
        assert record["policy_loss"] == pytest.approx(record["loss"], rel=1e-4, abs=1e-6)
    assert any(abs(record["loss"]) > 1e-3 for record in found)


def test_metrics_keep_their_meaning(folders, tmp_path):
    """With one micro-batch a step TRL's mean over micro-batches is one over tokens, as ours is."""
    settings = {"gradient_accumulation_steps": 1, "num_iterations": 3, "learning_rate": 0.3}
    plain, found, _ = compare(folders["llama"], tmp_path, max_steps=6, **settings)
    clips = [name for name in plain[0] if name.startswith("clip_ratio/")]
    assert len(clips) == 5
    assert any(record["clip_ratio/high_mean"] for record in plain)
    same(plain, found, *clips)
    # Entropies of rows left out are those of the pass over the whole generation batch.
    same(plain, found, "entropy", rel=0.01)


def test_a_model_that_mixes_tokens_otherwise_is_read_as_trl_does(tmp_path, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    sizes = {**SIZES, "vocab_size": len(tokenizer)}
    window = MistralForCausalLM(MistralConfig(**sizes, sliding_window=4))
    _, _, left_off = train(FastTrainer, window, tokenizer, tmp_path, fast=ALL)
    assert "sliding" in left_off["shared_prompts"]
    grouped = Qwen2ForCausalLM(Qwen2Config(**sizes))
    _, _, left_off = train(FastTrainer, grouped, tokenizer, tmp_path, fast=ALL)
    assert not left_off


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_entropy_is_known_where_prompts_are_not_shared(folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    config = MistralConfig(**SIZES, vocab_size=len(tokenizer), sliding_window=4)
    folder = save(MistralForCausalLM(config), tokenizer, tmp_path / "model")
    settings = {"gradient_accumulation_steps": 1, "num_iterations": 2}
    plain, found, left_off = compare(folder, tmp_path, **settings)
    assert set(left_off) == {"shared_prompts", "sampling"}
    same(plain, found, "entropy", rel=0.01)


def test_an_evaluation_before_the_first_step_reads_as_trl_does(folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    config = MistralConfig(**SIZES, vocab_size=len(tokenizer), sliding_window=4)
    model = MistralForCausalLM(config)
    trainer, _, _ = train(
        FastTrainer,
        model,
        tokenizer,
        tmp_path,
        fast=ALL,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=1,
        per_device_eval_batch_size=8,
    )
    assert sum("eval_reward" in record for record in trainer.state.log_history) == 4


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_move_with_the_batch_are_read_as_trl_does(folders, tmp_path, kind):
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        rope |= {"original_max_position_embeddings": 20}
    config = LlamaConfig(
        **SIZES, vocab_size=len(tokenizer), max_position_embeddings=20, rope_parameters=rope
    )
    folder = save(LlamaForCausalLM(config), tokenizer, tmp_path / "model")
    _, _, left_off = compare(folder, tmp_path)
    assert "longest row" in left_off["shared_prompts"]


def test_dropout_that_is_no_layer_is_found():
    model = OPTForCausalLM(
        OPTConfig(
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=64,
            word_embed_proj_dim=16,
            max_position_embeddings=64,
            dropout=0.1,
        )
    )
    assert has_dropout(model)
    assert not has_dropout(LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64)))


def test_16_bits_are_told_from_a_model_that_reads_otherwise(folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    half = load(folders["llama"]).to(torch.bfloat16)
    assert train(FastTrainer, half, tokenizer, tmp_path, fast=ALL, max_steps=1)[2] == {}
    mixed = load(folders["llama"])
    assert train(FastTrainer, mixed, tokenizer, tmp_path, fast=ALL, max_steps=1, bf16=True)[2] == {}
    learned = load(folders["gpt2"]).to(torch.bfloat16)
    left_off = train(FastTrainer, learned, tokenizer, tmp_path, fast=ALL, max_steps=1)[2]
    assert "16 bits" in left_off["shared_prompts"]


def test_windows_that_only_a_mask_tells_and_noise_of_routers_are_found():
    class Routed(torch.nn.Module):
        def __init__(self, jitter):
            super().__init__()
            self.router_jitter_noise = jitter

    assert has_dropout(Routed(0.01))
    assert not has_dropout(Routed(0.0))
    config = SimpleNamespace(sliding_window=8, layer_types=None)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    assert sharing_unsupported_reason(model, model) == "the model has sliding windows"


def test_a_model_with_dropout_is_read_as_trl_does(folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders["gpt2"], padding_side="left")
    model = load(folders["gpt2"], dropout=0.1)
    _, records, left_off = train(FastTrainer, model, tokenizer, tmp_path, fast=ALL)
    assert set(left_off) == {"shared_prompts"}
    assert "dropout" in left_off["shared_prompts"]
    assert all(math.isfinite(record["loss"]) for record in records)


@pytest.mark.parametrize("off", [{}, {"no_signal": False}], ids=["signal alone", "a budget alone"])
def test_padding_is_cut_where_prompts_are_not_shared(folders, tmp_path, off):
    """The columns that the model reads are those with a token that is learned from."""
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    model = load(folders["llama"])
    shapes = note_shapes(model)
    fast = FastConfig(**off, shared_prompts=False, max_tokens_per_micro_batch=40)
    train(FastTrainer, model, tokenizer, tmp_path, fast=fast, max_steps=1)
    assert len({width for _, width in shapes}) > 2


def note_shapes(model):
    """Rows and columns of each pass that is learned from."""
    shapes = []

    def note(module, args, named):
        if module.training:
            shapes.append(tuple(named["input_ids"].shape))

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


RECURRENT = RecurrentGemmaConfig(
    **SIZES,
    head_dim=8,
    vocab_size=261,
    block_types=["recurrent", "attention"],
    attention_window_size=512,
    initializer_range=0.3,
)
BEYOND_SCALED = Ministral3Config(
    **SIZES,
    head_dim=8,
    vocab_size=261,
    initializer_range=0.3,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 20,
        "llama_4_scaling_beta": 0.5,
    },
)
SPARSE = GlmMoeDsaConfig(
    **{**SIZES, "num_key_value_heads": 4},
    head_dim=4,
    vocab_size=261,
    initializer_range=0.3,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    index_topk=24,
    index_n_heads=2,
    index_head_dim=8,
)


@pytest.mark.parametrize(
    "config", [RECURRENT, BEYOND_SCALED, SPARSE], ids=lambda config: config.model_type
)
def test_padding_that_is_read_stays(folders, tmp_path, config):
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    torch.manual_seed(0)
    folder = save(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path / "model")
    fast = FastConfig(shared_prompts=False, max_tokens_per_micro_batch=150)
    plain, found, _ = compare(folder, tmp_path, fast=fast, max_steps=1)
    same(plain, found, "loss", "grad_norm")


def test_padding_that_is_read_counts_for_the_budget(folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    model = AutoModelForCausalLM.from_config(RECURRENT)
    shapes = note_shapes(model)
    fast = FastConfig(max_tokens_per_micro_batch=150)
    train(FastTrainer, model, tokenizer, tmp_path, fast=fast, max_steps=1)
    assert max(rows for rows, _ in shapes) > 1
    assert all(rows == 1 or rows * width <= 150 for rows, width in shapes)
