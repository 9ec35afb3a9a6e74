"""The reward kind `model` with real, tiny classifiers, and against TRL's own reward path."""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from packaging.version import Version
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.integrations import deepspeed
from trl import GRPOTrainer

from grpo_cli.errors import RewardError, SetupError
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, RewardContext
from tests.tiny_models import BOS, make_tiny_classifier, make_tiny_model, make_tiny_tokenizer

CONTEXT = RewardContext(max_completion_length=64)
QUESTIONS = ["What is 2 + 2?", "Count to three, please.", "?", "Why " * 20]
ANSWERS = ["4", "one two three " * 6, "", "because it is"]
CHATS = Batch(
    [
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": q}]
        for q in QUESTIONS
    ],
    [[{"role": "assistant", "content": a}] for a in ANSWERS],
)
PLAIN = Batch(QUESTIONS, ANSWERS)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_tiny_classifier(tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="module")
def judge_of_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return make_tiny_classifier(folder, labels=("bad", "neutral", "good"))


def build(path, **params):
    [reward] = build_rewards([RewardConfig(kind="model", path=str(path), **params)], CONTEXT)
    return reward


def values(path, batch, **params):
    return [score.value for score in build(path, **params).score(batch)]


def close(expected):
    return pytest.approx(expected, abs=1e-4)


def logits_of(folder, text, **options):
    """One text alone, straight through transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = tokenizer(text, return_tensors="pt", **options)
    with torch.no_grad():
        return model(**inputs).logits[0].tolist()


def scores_of_trl(folder, batch):
    """What `GRPOTrainer` itself makes of a batch, with the model as a reward function."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    # As GRPOTrainer.__init__ does.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    trainer.accelerator = Accelerator(cpu=True)
    trainer.args = SimpleNamespace(device="cpu", past_index=-1, report_to=[])
    trainer.is_deepspeed_enabled = False
    trainer.state = SimpleNamespace(global_step=0)
    trainer.environments = None
    trainer.chat_template_kwargs = {}
    trainer.reward_funcs, trainer.reward_func_names = [model], ["rm"]
    trainer.reward_processing_classes = [tokenizer]
    inputs = [{"prompt": prompt} for prompt in batch.prompts]
    found = trainer._calculate_rewards(inputs, batch.prompts, batch.completions, None)
    return found[:, 0].tolist()


@pytest.mark.parametrize("batch", [CHATS, PLAIN], ids=["chat", "plain"])
@pytest.mark.parametrize("pad", [True, False], ids=["pad", "no pad"])
def test_scores_are_those_of_trl(tmp_path, batch, pad):
    folder = make_tiny_classifier(tmp_path / "rm", pad=pad)
    ours = values(folder, batch)
    assert ours == close(scores_of_trl(folder, batch))
    assert len({round(value, 3) for value in ours}) == len(ours)


def test_scores_are_those_of_each_text_alone(reward_model):
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    talks = [p + c for p, c in zip(CHATS.prompts, CHATS.completions, strict=True)]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
    assert values(reward_model, CHATS) == close([logits_of(reward_model, t)[0] for t in texts])


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_the_batch_size_changes_nothing(reward_model, size):
    assert values(reward_model, CHATS, batch_size=size) == close(values(reward_model, CHATS))


def test_scores_come_in_the_order_of_the_rows(reward_model):
    there = values(reward_model, CHATS, batch_size=2)
    back = CHATS.take([3, 2, 1, 0])
    assert values(reward_model, back, batch_size=2) == close(there[::-1])
    assert build(reward_model).score(CHATS.take([])) == []


def test_the_completion_may_stand_alone(reward_model):
    alone = values(reward_model, CHATS, input="completion")
    assert alone == close(values(reward_model, PLAIN, input="completion"))
    for answer, value in zip(ANSWERS, alone, strict=True):
        if answer:
            assert value == close(logits_of(reward_model, answer)[0])
    assert math.isfinite(alone[2])


def test_completions_of_conversations_may_be_texts(reward_model):
    texts = Batch(CHATS.prompts, ANSWERS)
    assert values(reward_model, texts) == close(values(reward_model, CHATS))


def test_special_tokens_are_added_to_plain_text_only(tmp_path):
    folder = make_tiny_classifier(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer._tokenizer.post_processor = template
    tokenizer.chat_template = f"{BOS}{tokenizer.chat_template}"
    tokenizer.save_pretrained(folder)
    plain = BOS + QUESTIONS[0] + ANSWERS[0]
    assert values(folder, PLAIN)[0] == close(logits_of(folder, plain, add_special_tokens=False)[0])
    chat = tokenizer.apply_chat_template(CHATS.prompts[0] + CHATS.completions[0], tokenize=False)
    once = logits_of(folder, chat, add_special_tokens=False)[0]
    assert values(folder, CHATS)[0] == close(once)
    assert once != close(logits_of(folder, chat)[0])
    cut = build(folder, max_length=10).score(CHATS)[0]
    tail = tokenizer(chat, add_special_tokens=False)["input_ids"][-9:]
    kept = BOS + tokenizer.decode(tail)
    assert cut.value == close(logits_of(folder, kept, add_special_tokens=False)[0])
    cut = build(folder, max_length=10).score(PLAIN)[0]
    kept = BOS + (QUESTIONS[0] + ANSWERS[0])[-9:]
    assert cut.value == close(logits_of(folder, kept, add_special_tokens=False)[0])


def test_too_long_texts_lose_their_beginning(reward_model):
    scores = build(reward_model, max_length=12).score(PLAIN)
    text = QUESTIONS[1] + ANSWERS[1]
    assert scores[1].value == close(logits_of(reward_model, text[-12:])[0])
    assert f"cut to the last 12 of {len(text)} tokens" in scores[1].reason
    assert scores[2].value == close(logits_of(reward_model, "?")[0])
    assert "cut" not in scores[2].reason


def test_the_models_own_limit_holds_where_none_is_given(tmp_path, capfd):
    folder = make_tiny_classifier(tmp_path / "rm", context_length=40)
    capfd.readouterr()
    score = build(folder).score(PLAIN.take([1]))[0]
    assert "cut to the last 40 of" in score.reason
    assert capfd.readouterr() == ("", "")
    with pytest.raises(RewardError, match="max_length: 41 is more than the 40 tokens"):
        build(folder, max_length=41)


def test_positions_that_are_padding_do_not_count(tmp_path):
    tokenizer = make_tiny_tokenizer()
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(
        vocab_size=len(tokenizer), intermediate_size=16, num_labels=1, pad_token_id=3, **shape
    )
    config.max_position_embeddings = 34
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(3)
    tokenizer.save_pretrained(tmp_path)
    assert "cut to the last 30 of" in build(tmp_path).score(PLAIN)[1].reason
    with pytest.raises(RewardError, match="31 is more than the 30"):
        build(tmp_path, max_length=31)


@pytest.mark.parametrize(("label", "index"), [("good", 2), (1, 1), ("bad", 0)])
def test_one_of_several_labels(judge_of_three, label, index):
    logits = logits_of(judge_of_three, QUESTIONS[0] + ANSWERS[0])
    score = build(judge_of_three, label=label).score(PLAIN)[0]
    assert score.value == close(logits[index])
    assert score.reason.startswith(("bad", "neutral", "good")[index] + ": logit ")
    sigmoid = values(judge_of_three, PLAIN, label=label, output="sigmoid")[0]
    assert sigmoid == close(1 / (1 + math.exp(-logits[index])))
    softmax = values(judge_of_three, PLAIN, label=label, output="softmax")[0]
    assert softmax == close(torch.tensor(logits).softmax(0)[index].item())


def test_labels_are_chosen_before_the_model_is_loaded(judge_of_three):
    with pytest.raises(RewardError, match="3 labels"):
        build(judge_of_three)
    with pytest.raises(RewardError, match="Fix: label: good"):
        build(judge_of_three, label="goood")


def test_a_language_model_is_refused(tmp_path):
    folder = make_tiny_model(tmp_path / "lm")
    with pytest.raises(RewardError, match="LlamaForCausalLM"):
        build(folder)


def test_random_heads_are_refused_whatever_the_config_says(tmp_path, capfd):
    folder = make_tiny_model(tmp_path / "lm")
    config = (folder / "config.json").read_text()
    head = '"id2label": {"0": "x"}, "label2id": {"x": 0}, '
    config = config.replace("LlamaForCausalLM", "LlamaForSequenceClassification")
    (folder / "config.json").write_text(config.replace("{", "{" + head, 1))
    capfd.readouterr()
    with pytest.raises(RewardError, match=r"lacks weights.*score\.weight.*would be random"):
        build(folder)
    assert capfd.readouterr() == ("", "")


def test_heads_of_another_size_are_refused(tmp_path):
    folder = make_tiny_classifier(tmp_path / "rm", labels=("a", "b"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RewardError, match=r"score\.weight"):
        build(folder, label=0)


def test_conversations_need_a_chat_template(tmp_path):
    folder = make_tiny_classifier(tmp_path / "rm", chat=False)
    reward = build(folder)
    assert reward.score(PLAIN)
    with pytest.raises(RewardError, match=r"no chat template\. Fix: input: completion"):
        reward.score(CHATS)
    assert build(folder, input="completion").score(CHATS)


def test_nan_names_the_row(tmp_path):
    folder = make_tiny_classifier(tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(model.score.weight, math.nan)
    model.save_pretrained(folder)
    with pytest.raises(RewardError, match=r"row 1 of the batch.*not finite"):
        build(folder).score(PLAIN)
    assert values(folder, PLAIN, on_error="skip") == [None] * 4


def test_what_is_missing_is_said(reward_model, tmp_path):
    with pytest.raises(RewardError, match="there is no folder"):
        build(tmp_path / "nowhere")
    with pytest.raises(SetupError, match=r"no device cuda:99.*Fix: device: cpu"):
        build(reward_model, device="cuda:99")
    (reward_model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        with pytest.raises(SetupError, match=r"Fix: put tokenizer\.json"):
            build(reward_model)
    finally:
        (tmp_path / "tokenizer.json").rename(reward_model / "tokenizer.json")


def test_hub_models_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SetupError, match=r"Fix: .*hf download nobody/nothing.*path: \./nobody"):
        build("nobody/nothing")


def test_folders_never_touch_the_network(reward_model, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("the network was touched")

    monkeypatch.setattr("socket.socket.connect", refuse)
    assert build(reward_model).score(PLAIN)


def test_precision_and_gradients(reward_model):
    reward = build(reward_model)
    model = reward.scorer.args[0].model
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    rough = values(reward_model, PLAIN, dtype="bfloat16")
    assert rough == pytest.approx(values(reward_model, PLAIN), abs=0.05)
    assert rough != close(values(reward_model, PLAIN))


def test_loading_leaves_random_numbers_alone(reward_model):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build(reward_model).score(PLAIN)
    assert torch.equal(torch.rand(2), expected)


def test_all_weights_are_loaded_beside_a_model_that_fsdp_shards(
    reward_model, tmp_path, monkeypatch
):
    expected = values(reward_model, PLAIN)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    monkeypatch.setenv("LOCAL_RANK", "1")
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        # transformers 5.17 loads nothing there; 5.24 loads all.
        if Version(transformers.__version__) < Version("5.24"):
            assert logits_of(reward_model, "4") == [0.0]
        assert values(reward_model, PLAIN) == close(expected)
    finally:
        torch.distributed.destroy_process_group()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"


def test_all_weights_are_loaded_beside_a_model_that_zero3_shards(reward_model):
    class Zero3:
        config: dict = {}  # noqa: RUF012

        def is_zero3(self):
            return True

    settings = Zero3()
    deepspeed.set_hf_deepspeed_config(settings)
    try:
        assert build(reward_model).score(PLAIN)
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()
