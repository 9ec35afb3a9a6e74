"""What an asynchronous training learns from, without a training: order, head start, advantages, packed rows."""

import math
import threading
from itertools import islice
from types import SimpleNamespace as Namespace

import numpy
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention

from grpo_cli.errors import RewardError, RunError
from grpo_cli.recipe.generation import GenerationConfig
from grpo_cli.rewards.contract import RewardParams, Score
from grpo_cli.rewards.scoring import Reward, weighted_sum
from grpo_cli.training.asynchronous import trainer
from grpo_cli.training.asynchronous.rollouts import (
    Rollouts,
    Sampled,
    ServerSampler,
    group_advantages,
)
from grpo_cli.training.asynchronous.trainer import attend, register_attention
from tests.sampling_server import SamplingServer

PATIENCE_S = 60
ROWS = [{"prompt": f"{place}", "row_id": place, "answer": f"a{place}"} for place in range(3)]


class Params(RewardParams):
    """Of a reward that a test makes up."""


def reward_of(scorer, **more):
    return Reward(
        more.pop("name", "own"), more.pop("weight", 1.0), "python", Params(), scorer, **more
    )


def by_place(batch):
    return [Score(float(place)) for place in range(len(batch.completions))]


def same(prompt_ids, count):
    return [Sampled([7, 8], [-0.5, -0.25], clipped=False)] * count


def make(sampler=same, rewards=None, **plan):
    chosen = {"rows": ROWS, "group": 2, "ahead": 4, "seed": 0, **plan}
    return Rollouts(
        **chosen,
        sampler=sampler,
        rewards=rewards or [reward_of(by_place)],
        encode=lambda prompt: [int(prompt)],
        read=lambda prompt, prompt_ids, ids: [str(each) for each in ids],
        while_waiting=lambda: None,
    )


def take(rollouts, count):
    return [rollouts.rollout_buffer.get(timeout=PATIENCE_S) for _ in range(count)]


@pytest.fixture
def started():
    running = []

    def start(*args, **given):
        running.append(make(*args, **given))
        running[-1].start()
        return running[-1]

    yield start
    for rollouts in running:
        rollouts.stop()


def test_every_epoch_asks_every_prompt_once_and_a_later_start_goes_on():
    rollouts = make()
    first = list(islice(rollouts.order(), 9))
    assert [number for number, _ in first] == list(range(9))
    epochs = [[row["row_id"] for _, row in first[start : start + 3]] for start in (0, 3, 6)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    behind = make(first=4)
    assert list(islice(behind.order(), 5)) == first[4:]


class Counting:
    """A scorer with state."""

    def __init__(self):
        self.seen = 0

    def __call__(self, batch):
        self.seen += len(batch.completions)
        return by_place(batch)

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def test_a_checkpoint_holds_the_states_of_rewards_and_how_many_completions_were_learned_from(
    tmp_path,
):
    def load(learned, seen, **more):
        given = object.__new__(trainer.AsyncRunTrainer)
        counting = Counting()
        counting.seen = seen
        given.rollout_worker = make(rewards=[reward_of(counting)])
        given.args, given.accelerator = Namespace(num_generations=2), Namespace(process_index=0)
        given.state, given._learned = Namespace(global_step=5), learned
        given.groups_per_step = 3
        vars(given).update(more)
        return given, counting

    load(8.0, 12)[0]._save_more(tmp_path)
    resumed, counting = load(0.0, 0)
    resumed._load_more(tmp_path)
    assert (resumed.rollout_worker.first, resumed._learned, counting.seen) == (4, 8, 12)
    (tmp_path / "process_0.pt").unlink()
    with pytest.raises(RewardError, match="no state of reward 'own'"):
        resumed._load_more(tmp_path)
    forced, _ = load(0.0, 0, forced=True)
    forced._load_more(tmp_path)
    assert forced.rollout_worker.first == 15


def test_a_sample_is_what_trl_learns_from(started):
    rollouts = started()
    rollouts.update_model_version(3)
    samples = take(rollouts, 6)[4:]
    for place, sample in enumerate(samples):
        assert sample.input_ids.tolist() == [int(sample.prompt), 7, 8]
        assert sample.completion_mask.tolist() == [0, 1, 1]
        assert sample.old_log_probs.tolist() == [0.0, -0.5, -0.25]
        assert sample.advantage == pytest.approx((place - 0.5) / (math.sqrt(0.5) + 1e-4))
        assert sample.model_version == 3
        assert sample.metrics["reward"] == place
        assert sample.metrics["completions/mean_length"] == 2
    assert samples[0].group_id == samples[1].group_id


def test_no_more_is_sampled_ahead_than_may_be(started):
    asked = threading.Semaphore(0)

    def sampler(prompt_ids, count):
        asked.release()
        return same(prompt_ids, count)

    rollouts = started(sampler)
    for _ in range(2):
        assert asked.acquire(timeout=PATIENCE_S)
    assert not asked.acquire(timeout=0.5)
    take(rollouts, 2)
    assert asked.acquire(timeout=PATIENCE_S)
    assert not asked.acquire(timeout=0.5)


def test_what_a_reward_or_the_sampler_raises_reaches_the_trainer(started):
    def gone(prompt_ids, count):
        raise RunError("the server has gone")

    def fail(batch):
        raise ValueError("no such answer")

    for rollouts, error, words in (
        (started(gone), RunError, "has gone"),
        (started(rewards=[reward_of(fail)]), RewardError, "no such answer"),
    ):
        assert rollouts._ended.wait(PATIENCE_S)
        with pytest.raises(error, match=words):
            rollouts.check_health(PATIENCE_S)


def test_silence_for_too_long_is_an_error(started):
    waiting = threading.Event()

    def stuck(prompt_ids, count):
        waiting.wait(PATIENCE_S)
        return same(prompt_ids, count)

    rollouts = started(stuck)
    rollouts.check_health(PATIENCE_S)
    with pytest.raises(RunError, match="no completion was sampled"):
        rollouts.check_health(-1)
    waiting.set()


def test_rewards_that_do_not_apply_are_left_out_of_sums_and_means():
    assert weighted_sum([1.0, 2.0], [0.5, 1.0]) == 2.5
    assert weighted_sum([1.0, 2.0], [0.5, None]) == 0.5
    assert weighted_sum([1.0, 2.0], [None, None]) is None
    totals, advantages, spread = group_advantages([1.0], [[1.0], [3.0], [None]])
    assert totals == pytest.approx([1.0, 3.0, math.nan], nan_ok=True)
    assert spread == pytest.approx(math.sqrt(2))
    assert advantages == pytest.approx([-1 / (spread + 1e-4), 1 / (spread + 1e-4), 0.0])
    assert group_advantages([1.0], [[1.0], [None]])[1:] == ([0.0, 0.0], 0.0)
    assert group_advantages([1.0], [[2.0]] * 3)[1:] == ([0.0] * 3, 0.0)


@pytest.mark.parametrize("window", [None, 3])
def test_a_path_may_be_cut_anywhere(window):
    """Two keys for four heads, and a window."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8, generator=draw) for heads in (4, 2, 2))

    def compute(edges):
        paths = [torch.arange(end) for end in edges[1:]]
        found, _ = attend(
            torch.nn.Identity(),
            query,
            key,
            value,
            None,
            tree_kv_index=torch.cat(paths),
            tree_cu_seqlens_q=torch.tensor(edges),
            tree_cu_seqlens_k=torch.tensor([0, *map(len, paths)]).cumsum(0),
            tree_max_seqlen_q=max(numpy.diff(edges)),
            tree_max_seqlen_k=max(map(len, paths)),
            sliding_window=window,
        )
        return found

    whole = compute([0, 6])
    assert whole.shape == (1, 6, 4, 8)
    assert torch.allclose(whole, compute([0, 2, 5, 6]), atol=1e-6)


def test_scores_that_a_model_limits_are_refused():
    """Gemma 2's would go on without the limit, and all log-probabilities be wrong."""
    none = torch.zeros(1, 1, 1, 8)
    tree = dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), none)
    sizes = {"tree_max_seqlen_q": 1, "tree_max_seqlen_k": 1}
    with pytest.raises(RunError, match="limits its attention scores to 50"):
        attend(torch.nn.Identity(), none, none, none, None, **tree, **sizes, softcap=50.0)


@pytest.mark.parametrize(
    ("capability", "lacks"), [((8, 0), True), ((9, 0), False), ((10, 0), True), ((12, 0), True)]
)
def test_trls_kernel_runs_on_hopper_alone(monkeypatch, capability, lacks):
    """FlashAttention 3 has no code for Blackwell, and fails there in the first step."""
    monkeypatch.setattr(trainer.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert trainer._lacks_kernel() is lacks


def test_packed_rows_attend_as_separate_ones_do(chat_model):
    """Two completions of one prompt, one of another, and the parameters' gradients through them."""
    texts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11, 12, 13], [6, 5, 9, 9]]
    register_tree_attention()
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(chat_model, attn_implementation=TREE_ATTENTION)
    assert AttentionInterface()[TREE_ATTENTION] is attend
    row = TreeRow()
    for text in texts:
        row.add(
            {
                "input_ids": numpy.array(text),
                "completion_mask": numpy.array([0] + [1] * (len(text) - 1)),
                "old_log_probs": numpy.zeros(len(text), dtype=numpy.float32),
                "advantage": 1.0,
                "group_id": 0,
            }
        )
    packed = row.pack()
    assert len(packed["input_ids"]) < sum(map(len, texts))
    hidden = model(
        packed["input_ids"][None],
        position_ids=packed["position_ids"][None],
        tree_max_seqlen_q=int(packed["tree_max_seqlens"][0]),
        tree_max_seqlen_k=int(packed["tree_max_seqlens"][1]),
        use_cache=False,
        **{
            name: packed[name]
            for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
        },
    ).logits[0][packed["token_index"]]
    hidden.logsumexp(-1).sum().backward()
    together = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    apart = torch.cat([model(torch.tensor([text])).logits[0][:-1] for text in texts])
    assert torch.allclose(hidden, apart, atol=1e-5)
    apart.logsumexp(-1).sum().backward()
    for name, value in model.named_parameters():
        assert torch.allclose(together[name], value.grad, atol=1e-4), name


def test_a_server_that_refuses_or_has_gone_is_told_in_its_words(chat_model):
    server = SamplingServer(chat_model)
    generation = GenerationConfig(max_completion_length=4)
    sampler = ServerSampler(server.url, generation, seed=0)
    found = sampler([65, 66], 3)
    assert [len(each.token_ids) for each in found] == [len(each.logprobs) for each in found]
    assert all(each.clipped == (len(each.token_ids) == 4) for each in found)
    server.fails = True
    with pytest.raises(RunError, match=r"answered 500.*no room for the key-value cache"):
        sampler([65, 66], 3)
    server.close()
    with pytest.raises(RunError, match="has gone"):
        sampler([65, 66], 3)
