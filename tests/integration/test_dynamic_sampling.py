"""Groups without signal give way to fresh prompts: the batch that comes of it, and whole runs."""

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.training.rollout.rollout import Aggregation, Context, Rollout
from tests.integration.conftest import RECIPE, Workshop
from tests.integration.test_resuming import assert_same, train
from tests.resampled_batches import ROWS, assert_same_batch, make_trainer, sample

ROOT = Path(__file__).parents[2]
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# Three rows in four teach nothing. The worker ends by SIGKILL while it scores, once.
REWARD = """\
import os
import signal
import zlib
from pathlib import Path

def by_row(completions, answer, trainer_state=None, **kwargs):
    wish = Path({wish!r})
    if wish.exists() and trainer_state.global_step >= int(wish.read_text()):
        wish.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    said = [zlib.crc32(str(each).encode()) / 2**32 for each in completions]
    return [0.25 if int(row) % 4 else value for value, row in zip(said, answer)]
"""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="as it is"),
        pytest.param({"scale_rewards": "batch"}, id="scaled by batch"),
        pytest.param({"multi_objective_aggregation": "normalize_then_sum"}, id="normalized first"),
        pytest.param({"beta": 0.04, "num_iterations": 2}, id="old and reference"),
        pytest.param({"mask_truncated_completions": True, "pad_to_multiple_of": 8}, id="padded"),
    ],
)
def test_a_batch_put_together_is_what_trl_makes_of_the_same_rows(tmp_path, chat_model, settings):
    torch.manual_seed(1)
    trainer = make_trainer(chat_model, tmp_path, **settings)
    merged = sample(trainer, [0, 1, 3])
    metrics = trainer._metrics["train"]
    assert metrics["dynamic_sampling/resampled_groups"][0] >= 2
    # Of three groups two have no signal, and at least one of these gave way.
    assert metrics["dynamic_sampling/frac_reward_zero_std"][0] < 0.5
    assert_same_batch(trainer, merged)


@pytest.mark.parametrize("first", [False, True], ids=["sum", "normalized first"])
def test_a_group_has_a_signal_where_two_scored_completions_differ_in_total(first):
    none = torch.nan
    groups = [
        [[5.3, 0.1], [5.3, 0.1], [5.3, 0.1]],
        [[1.0, 0.0], [1.0, 0.0], [1.0, 0.5]],
        [[none, none], [none, none], [none, none]],
        [[none, none], [1.0, 1.0], [none, none]],
        [[none, none], [1.0, 1.0], [0.0, 1.0]],
        [[1.0, none], [1.0, none], [1.0, none]],
    ]
    rewards = torch.tensor(groups).view(-1, 2)
    weights = torch.tensor([1.0, 0.5])
    assert find_silent(rewards, 3, weights, normalized_first=first) == [0, 2, 3, 5]
    # What differs in the second group has no weight.
    weights = torch.tensor([1.0, 0.0])
    assert find_silent(rewards, 3, weights, normalized_first=first) == [0, 1, 2, 3, 5]


def find_silent(rewards, size, weights, *, normalized_first):
    return Aggregation((), weights, normalized_first).find_silent(rewards, size)


DECIMALS = st.integers(-30, 30).map(lambda tenths: Fraction(tenths, 10))


@given(
    st.lists(DECIMALS, min_size=1, max_size=4),
    st.integers(2, 16),
    st.sampled_from([1, 1000]),
    st.randoms(use_true_random=False),
)
def test_totals_that_are_equal_but_for_rounding_give_no_signal(weights, size, unit, random):
    values = [random.choice([Fraction(k, 10) for k in range(4)]) * unit for _ in weights]
    flat = [values] * size
    varied = [[random.choice([value, value + unit]) for value in values] for _ in range(size)]
    sums = {sum(w * r for w, r in zip(weights, row, strict=True)) for row in varied}
    expected = [0] if len(sums) > 1 else [0, 1]
    rewards = torch.tensor([[float(r) for r in row] for row in flat + varied])
    factors = torch.tensor([float(weight) for weight in weights])
    assert find_silent(rewards, size, factors, normalized_first=False) == expected
    # Normalized first, totals of different rewards may cancel: one reward alone cannot.
    alone = rewards[:, :1]
    differs = len({row[0] for row in varied}) > 1 and weights[0] != 0
    silent = find_silent(alone, size, factors[:1], normalized_first=True)
    assert silent == ([0] if differs else [0, 1])


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_rewards": "group"},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_a_constant_reward_is_not_learned_from(tmp_path, chat_model, settings):
    trainer = make_trainer(chat_model, tmp_path, max_resample=None, num_generations=6, **settings)
    # In float32 the mean of six times 0.7 × 0.3 is not 0.7 × 0.3.
    trainer.reward_weights[:] = 0.7
    batch = sample(trainer, [1, 3])
    assert batch["advantages"].tolist() == [0.0] * 12
    assert trainer._metrics["train"]["frac_reward_zero_std"] == [1.0]


def test_what_a_sampler_returns_for_each_completion_stays_with_it():
    def make(names, entropies=None):
        rows = [{"prompt": name, "row_id": name} for name in names]
        ids = [[ord(name), 1] for name in names]
        return Rollout(
            Context(None, True, 1),
            rows,
            [[0]] * len(rows),
            ids,
            list(names),
            entropies=entropies,
            scores=torch.zeros(len(rows), 1),
        )

    first = make("ab", [[0.5, 0.5], [0.1, 0.2]])
    batch = first.copy()
    batch.put(1, make("c", [[0.3, 0.4]]).take(0))
    assert (batch.completions, batch.completion_ids[1]) == (["a", "c"], [99, 1])
    assert batch.entropies == [[0.5, 0.5], [0.3, 0.4]]
    assert [row["row_id"] for row in batch.rows] == ["a", "c"]
    # The rollout that it was copied from stays as it is.
    assert (first.completions, first.entropies) == (["a", "b"], [[0.5, 0.5], [0.1, 0.2]])
    batch.put(0, make("d").take(0))
    assert batch.entropies is None
    assert Rollout.join([make("ab"), make("c")]).completions == ["a", "b", "c"]


def test_metrics_are_of_the_first_sampling_and_counts_of_all(tmp_path, chat_model):
    trainer = make_trainer(chat_model, tmp_path, share=100)
    before = sample(trainer, [1, 2, 3])
    metrics = trainer._metrics["train"]
    # Row 0 alone teaches, and takes a place where it is drawn.
    left = metrics["dynamic_sampling/frac_reward_zero_std"][0]
    assert left in (2 / 3, 1.0)
    assert (metrics["dynamic_sampling/rounds"], metrics["frac_reward_zero_std"]) == ([3], [1.0])
    assert len(metrics["reward"]) == len(metrics["completions/mean_length"]) == 1
    assert metrics["calls"] == [1.0]
    assert metrics["rewards/by_tokens/seconds"][0] > 0
    resampled = metrics["dynamic_sampling/resampled_groups"][0]
    assert 6 <= resampled <= 9
    assert metrics["dynamic_sampling/prompts_seen"] == [3 + resampled]
    assert metrics["dynamic_sampling/epochs"] == [(3 + resampled) / ROWS]
    asked = int(before["prompt_mask"].sum())
    assert metrics["num_tokens"][0] > 2 * (asked + int(before["num_items_in_batch"]))


def test_a_batch_whose_groups_all_have_a_signal_is_left_alone(tmp_path, chat_model):
    trainer = make_trainer(chat_model, tmp_path, share=1)
    sample(trainer, [1, 2, 3])
    metrics = trainer._metrics["train"]
    assert metrics["dynamic_sampling/rounds"] == [0]
    assert metrics["dynamic_sampling/prompts_seen"] == [3]


@pytest.mark.slow
def test_groups_across_processes_are_put_together_on_each(tmp_path, chat_model):
    done = subprocess.run(
        [sys.executable, *LAUNCHER, "-m", "tests.resampled_batches", chat_model, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def workshop_of(folder, model, die_at=None):
    folder.mkdir()
    wish = folder / "die"
    if die_at is not None:
        wish.write_text(str(die_at))
    (folder / "mine.py").write_text(REWARD.format(wish=str(wish)))
    workshop = Workshop(folder, model)
    before, _, after = RECIPE.partition("rewards:\n")
    rewards = "rewards:\n  - {{kind: python, path: ./mine.py:by_row}}\n"
    sampling = "generation:\n  dynamic_sampling: {{max_resample: 3}}\n"
    workshop.write(before + rewards + sampling + after.partition("generation:\n")[2], rows=24)
    return workshop


def groups_of(workshop):
    """Whether each group that was sampled for training is learned from, by step and row."""
    found = {}
    for path in sorted((workshop.run / "completions").glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            part = json.loads(line)
            if part["split"] == "train":
                learned = found.setdefault((part["step"], part["row"]), set())
                learned.add(part.get("learned", True))
    assert all(len(learned) == 1 for learned in found.values())
    return {key: learned.pop() for key, learned in found.items()}


@pytest.mark.slow
def test_a_killed_run_draws_the_same_fresh_prompts(tmp_path, chat_model):
    values = {
        "launch.num_processes": 2,
        # Three groups a generation, of which the second lies across the processes.
        "training.per_device_train_batch_size": 3,
        "generation.num_generations": 4,
        # One generation feeds two steps: the checkpoint of step 3 lies between them.
        "generation.steps_per_generation": 2,
        "training.save_steps": 3,
        "evaluation.limit": 0,
    }
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    unbroken = workshop_of(tmp_path / "unbroken", chat_model)
    train(unbroken, *flags, steps=6)
    broken = workshop_of(tmp_path / "broken", chat_model, die_at=4)
    train(broken, *flags, steps=6, code=1)
    train(broken, *flags, "--resume", steps=6)
    assert_same(broken, unbroken)

    sampled = [each for each in unbroken.records("train") if "dynamic_sampling/rounds" in each]
    kept = fmean(each["dynamic_sampling/frac_reward_zero_std"] for each in sampled)
    assert kept < fmean(each["frac_reward_zero_std"] for each in sampled)
    groups = groups_of(unbroken)
    assert sampled[-1]["dynamic_sampling/prompts_seen"] == len(groups)
    assert sorted(step for (step, _), learned in groups.items() if learned) == sorted([1, 3, 5] * 3)
