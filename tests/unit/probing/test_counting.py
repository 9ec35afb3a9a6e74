"""The sums behind `grpo probe`: signal, lengths, memory, time and disk, each against numbers by hand."""

import math
from dataclasses import replace

import pytest

from grpo_cli.analysis.samples import ScoredCompletion
from grpo_cli.batch.plan import BatchInputs, plan_batch
from grpo_cli.probing import cost, signal
from grpo_cli.probing.counting import ModelShape
from grpo_cli.probing.memory import (
    Device,
    MemoryInputs,
    estimate_memory,
    judge_memory,
    warmup_inputs,
)
from grpo_cli.recipe.recipe import Recipe

SHAPE = ModelShape(
    parameters=1000,
    trainable=1000,
    weight_bytes=4000,
    trainable_bytes=4000,
    value_bytes=4,
    layers=2,
    hidden=10,
    intermediate=20,
    vocabulary=50,
    cache_bytes_per_token=160,
    context=128,
    head_trained=True,
    saved_bytes_per_token=600.0,
    checkpoint_bytes_per_token=40.0,
    adapted_bytes=500,
)
PLAN = plan_batch(BatchInputs(dataset_size=100))
INPUTS = MemoryInputs(micro_batch=2, sampled=4, prompt_tokens=6, completion_tokens=4)


def scored(*groups, tokens=5, clipped=False):
    """Completions whose one reward is the number given; None is not a score."""
    return [
        ScoredCompletion(
            group=group,
            row=group,
            prompt="?",
            text=f"{value} {place}",
            tokens=tokens,
            clipped=clipped,
            rewards={"math": value},
            reasons={},
            failed=[],
            answers={},
            total=value or 0.0,
        )
        for group, values in enumerate(groups)
        for place, value in enumerate(values)
    ]


def recipe(**sections):
    told = {
        "name": "x",
        "model": {"path": "a/b"},
        "dataset": {"kind": "inline", "rows": [{"prompt": "?"}]},
        "rewards": [{"kind": "length", "target": 3}],
        **sections,
    }
    return Recipe.model_validate(told)


# --- signal ------------------------------------------------------------------------------------


def test_groups_without_spread_are_counted_and_prompts_sorted_by_difficulty():
    found = signal.read_signal(scored([0, 0], [1, 1], [0, 1], [1, 0]), {"math": 1.0})
    assert found.frac_reward_zero_std == 0.5
    (rate,) = found.pass_rates
    assert (rate.rate, rate.too_hard, rate.learnable, rate.too_easy) == (0.5, 1, 2, 1)
    assert found.total.mean == 0.5
    # TRL divides by n - 1: √(2 · 0.25 / 1) of each mixed pair.
    assert found.total.within == pytest.approx((0 + 0 + 2 * math.sqrt(0.5)) / 4)


def two_rewards(*groups, weights):
    """Groups of pairs of rewards, and their totals."""
    return [
        replace(each, rewards={"a": a, "b": b}, total=weights[0] * a + weights[1] * b)
        for group, pairs in enumerate(groups)
        for each, (a, b) in zip(scored(*[[0.0] * len(pairs)]), pairs, strict=True)
        for each in [replace(each, group=group, text=f"{a} {b} {each.text}")]
    ]


@pytest.mark.parametrize(
    ("pair", "weights", "advice"),
    [
        # They differ within the groups, and cancel each other.
        ([(0, 1), (1, 0)], (1, 1), "correct the weights"),
        # One is always 0, the other nearly always 1.
        ([(0, 1), (0, 1)], (1, 1), "add a reward in which"),
    ],
)
def test_weights_are_to_blame_only_where_rewards_differ_and_totals_do_not(pair, weights, advice):
    groups = [*[pair] * 19, [(0, 1), (0, 0)]]
    found = signal.read_signal(two_rewards(*groups, weights=weights), {})
    findings = list(signal.judge(found, signal.Lengths(5, 5, 5, 0.0, 64), masked=False))
    (told,) = [each for each in findings if each.subject == "signal: groups without spread"]
    assert told.fix.startswith(advice)


@pytest.mark.parametrize(
    ("groups", "clipped", "masked", "expected"),
    [
        ([[0, 0]] * 10, True, False, ("length: cut off", "error")),
        ([[0, 1]] * 10, True, False, ("length: cut off", "warning")),
        ([[0, 1]] * 10, True, True, ("length: cut off", "error")),
        ([[0, 0]] * 4, True, False, ("length: cut off", "warning")),
        ([[0, 0]] * 4, False, False, ("signal: groups without spread", "warning")),
        ([[0, 0]] * 10, False, False, ("signal: groups without spread", "error")),
        ([[0, 0]] * 8 + [[0, 1]] * 2, False, False, ("signal: groups without spread", "warning")),
        ([[0, 0]] * 9 + [[0, 1]], False, False, ("signal: difficulty", "warning")),
        ([[0, 1]] * 10, False, False, None),
    ],
)
def test_signal_and_lengths_are_judged(groups, clipped, masked, expected):
    completions = scored(*groups, clipped=clipped)
    found = signal.read_signal(completions, {"math": 1.0})
    lengths = signal.read_lengths(completions, 5)
    findings = list(signal.judge(found, lengths, masked=masked))
    told = {(finding.subject, finding.level) for finding in findings}
    assert told == set() if expected is None else expected in told
    assert all(finding.fix and finding.why for finding in findings)


def test_lengths_are_nearest_rank_percentiles():
    mixed = [replace(each, tokens=n + 1) for n, each in enumerate(scored(*[[0.0, 1.0]] * 10))]
    assert signal.read_lengths(mixed, 64) == signal.Lengths(10, 19, 20, 0.0, 64)


# --- memory ------------------------------------------------------------------------------------


def parts(inputs, shape=SHAPE):
    return {(part.name, part.moment): part.bytes for part in estimate_memory(shape, inputs).parts}


def test_memory_is_the_sum_of_its_parts_at_the_worst_moment():
    found = estimate_memory(SHAPE, INPUTS)
    told = parts(INPUTS)
    assert told["weights", "always"] == 4000
    assert told["optimizer states", "always"] == 8000
    assert told["gradients", "update"] == 4000
    # 2 sequences of 10 tokens; checkpoints of all of them, and one whole layer of two.
    assert told["activations", "loss"] == 20 * (40 + 300)
    # Tiles of 20 tokens and 50 words in float32, and a float32 gradient of the last layer.
    assert told["logits", "loss"] == 20 * 50 * 4 + 4 * 20 * 10
    # 4 completions of 10 tokens, and one of two layers while it grows.
    assert told["keys and values", "sampling"] == 4 * 10 * 160 * 3 // 2
    sums = {
        moment: sum(size for (_, when), size in told.items() if when in ("always", moment))
        for moment in ("sampling", "loss", "update")
    }
    assert found.peak_bytes == max(sums.values())
    assert sums[found.moment] == found.peak_bytes


@pytest.mark.parametrize(
    ("change", "part", "size"),
    [
        ({"checkpointing": False}, ("activations", "loss"), 20 * 600),
        ({"reference": True}, ("reference model", "always"), 4000),
        ({"optimizer": "adamw_8bit"}, ("optimizer states", "always"), 2000),
        ({"optimizer": "sgd"}, ("optimizer states", "always"), None),
        ({"processes": 2}, ("gradient exchange", "always"), 4000),
        ({"accumulation": 2}, ("gradients", "loss"), 4000),
        # A budget cuts passes of padded rows, and joins them.
        ({"budget": 9}, ("activations", "loss"), 10 * (40 + 300)),
        ({"budget": 19}, ("gradients", "loss"), 4000),
        ({"budget": 39, "accumulation": 8}, ("activations", "loss"), 39 * (40 + 300)),
        ({"budget": 99, "accumulation": 2}, ("activations", "loss"), 40 * (40 + 300)),
        ({"budget": 99, "accumulation": 2}, ("gradients", "loss"), None),
        ({"autocast": True}, ("16-bit copies", "loss"), 2000),
        ({"vllm_bytes": 77}, ("vLLM", "always"), 77),
        ({"vllm_bytes": 77, "vllm_sleeps": True}, ("vLLM", "sampling"), 77),
        ({"vllm_bytes": 77}, ("keys and values", "sampling"), None),
        ({"elsewhere": True}, ("keys and values", "sampling"), None),
        # The prompts' 6 tokens while they are copied to a cache of 64; caches of 576 and 1024 tokens.
        ({"graphs": True}, ("keys and values", "sampling"), 4 * 70 * 160 * 3 // 2),
        (
            {"graphs": True, "completion_tokens": 1000},
            ("keys and values", "sampling"),
            4 * 1600 * 160 * 3 // 2,
        ),
        ({"graphs": True}, ("merged adapters", "sampling"), 500),
        ({}, ("merged adapters", "sampling"), None),
    ],
)
def test_each_setting_changes_its_part(change, part, size):
    assert parts(replace(INPUTS, **change)).get(part) == size


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "states", "gathered"),
    [
        ("ddp", 4000, 4000, 8000, {}),
        ("fsdp2", 1000, 1000, 2000, {"loss": 2000}),
        ("zero1", 2000, 2000, 3000, {}),
        ("zero2", 2000, 500, 3000, {}),
        ("zero3", 500, 500, 3000, {"loss": 2000, "sampling": 2000}),
    ],
)
def test_each_process_holds_its_share(strategy, weights, gradients, states, gathered):
    told = parts(replace(INPUTS, processes=4, strategy=strategy, autocast=True))
    assert told["weights", "always"] == weights
    assert told["gradients", "update"] == gradients
    assert told["optimizer states", "always"] == states
    assert {when: size for (name, when), size in told.items() if "gathered" in name} == gathered
    # With DDP the gradients again, with ZeRO a bucket of them in 16 bits.
    exchanged = {"ddp": 4000, "fsdp2": None}.get(strategy, 10**9)
    assert told.get(("gradient exchange", "always")) == exchanged
    assert (("16-bit copies", "loss") in told) == (strategy == "ddp")


def test_zero3_keeps_what_is_used_again_soon_and_a_cpu_only_what_is_written():
    big = replace(SHAPE, parameters=7 * 10**9, trainable=7 * 10**9, layers=28)
    inputs = replace(INPUTS, processes=4, strategy="zero3", autocast=True)
    assert parts(inputs, big)["gathered weights", "loss"] == 2 * 10**9
    assert parts(replace(inputs, cpu=True))["gradient exchange", "always"] == 2000


def test_frozen_weights_are_not_copied_for_autocast():
    adapters = replace(SHAPE, weight_bytes=2040, trainable=10, trainable_bytes=40)
    assert parts(replace(INPUTS, autocast=True), adapters)["16-bit copies", "loss"] == 20


def test_a_7b_model_fits_eight_gpus_that_share_it():
    big = replace(
        SHAPE,
        parameters=7_615_616_512,
        trainable=7_615_616_512,
        weight_bytes=4 * 7_615_616_512,
        trainable_bytes=4 * 7_615_616_512,
        layers=28,
        hidden=3584,
        vocabulary=152_064,
    )
    peaks = {
        strategy: estimate_memory(
            big, replace(INPUTS, processes=8, strategy=strategy, autocast=True)
        ).peak_bytes
        for strategy in ("ddp", "fsdp2", "zero3")
    }
    assert peaks["ddp"] > 80 * 2**30
    assert max(peaks["fsdp2"], peaks["zero3"]) < 32 * 2**30


def test_a_cpu_holds_more_for_each_logit():
    assert parts(replace(INPUTS, cpu=True))["logits", "loss"] == 20 * 50 * 52 + 800


@pytest.mark.parametrize(
    ("change", "tokens", "scored"),
    [
        # One prompt of 6 tokens and 2 completions of 4.
        ({"sampled": 2}, 14, 8),
        # Completions of a step may have prompts of their own where more are sampled at a time.
        ({"sampled": 8}, 20, 8),
        # As many tokens at a time as two rows have with their padding.
        ({"sampled": 8, "accumulation": 4}, 20, 32 * 20 // 44),
        ({"sampled": 8, "accumulation": 4, "budget": 30}, 30, 32 * 30 // 44),
        ({"sampled": 8, "budget": 1}, 10, 8 * 10 // 20),
    ],
)
def test_prompts_that_are_computed_once_take_less(change, tokens, scored):
    told = parts(replace(INPUTS, group=4, checkpointing=False, cpu=True, **change))
    assert told["activations", "loss"] == tokens * 600
    assert told["logits", "loss"] == scored * (50 * 20 + 40)


def test_each_completion_has_a_copy_of_its_prompts_keys_and_values():
    shared = replace(INPUTS, group=4, sampled=2, checkpointing=False)
    copies = "copied keys and values", "loss"
    # 2 completions after 6 tokens of prompt; in 16 bits half of it, of one of two layers a quarter.
    assert parts(shared)[copies] == 2 * 6 * 160
    assert parts(replace(shared, autocast=True))[copies] == 2 * 6 * 80
    assert parts(replace(shared, autocast=True, checkpointing=True))[copies] == 2 * 6 * 40
    assert copies not in parts(replace(shared, group=None))


def test_logits_come_in_tiles_where_all_at_once_would_take_more():
    large = replace(INPUTS, group=4, cpu=True, completion_tokens=1000)
    told = parts(large, replace(SHAPE, vocabulary=150_000))
    assert told["logits", "loss"] == 2000 * 32768 * 52 + 2000 * 40


# --- time and disk -----------------------------------------------------------------------------


def test_time_is_extrapolated_from_what_was_measured():
    given = recipe(
        training={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.1},
        generation={"num_generations": 4},
    )
    plan = plan_batch(
        BatchInputs(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_steps=10,
            dataset_size=100,
        )
    )
    timings = cost.Timings(sample_s=1.0, score_s=0.5, forward_s=2.0, micro_step_s=6.0, update_s=3.0)
    found = cost.estimate_time(given, plan, timings, eval_rows=20)
    told = {part.name: part.seconds for part in found.parts}
    assert told == {
        "sampling": 10 * 8 * 1.0,
        "scoring": 10 * 8 * 0.5,
        "old and reference probabilities": 10 * 2 * 2.0,
        "forward and backward": 10 * 2 * 6.0,
        "update": 10 * 3.0,
        "measuring before and after": 2 * 20 * (1.0 + 0.5),
    }
    assert found.total_s == math.fsum(told.values())
    assert found.step_s == pytest.approx((found.total_s - 60) / 10)
    (part,) = (
        part
        for part in cost.estimate_time(given, plan, replace(timings, learned=0.25), 20).parts
        if part.name == "forward and backward"
    )
    assert part.seconds == 10 * 2 * 6.0 / 4
    assert "25% of the tokens" in part.formula
    more = cost.estimate_time(given, plan, replace(timings, resampled=0.5), 20).parts
    assert [part.seconds for part in more if part.name in ("sampling", "scoring")] == [120.0, 60.0]
    # Two evaluations of all 20 prompts; of 3 prompts also before the first step, and after the last, the tenth.
    during = {"during": [{"every": 4}, {"name": "few", "every": 5, "limit": 3}]}
    more = cost.estimate_time(recipe(evaluation=during), plan, timings, 20).parts
    seconds = [part.seconds for part in more if part.name == "held-out sets while training"]
    assert seconds == [2 * 20 * 1.5, 3 * 3 * 1.5]
    sources = [{"name": name, **given.dataset.model_dump()} for name in ("sums", "words")]
    during = {"during": [{"every": 10, "source": "words"}]}
    mixed = recipe(dataset={"sources": sources}, evaluation=during)
    more = cost.estimate_time(mixed, plan, timings, 20, {"sums": 13, "words": 7}).parts
    assert [part.seconds for part in more if part.name == "held-out sets while training"] == [
        2 * 7 * 1.5
    ]


@pytest.mark.parametrize(("every", "rounds"), [(5, 2), (4, 3), (20, 1), (0.25, 4)])
def test_an_evaluation_comes_every_so_many_steps_and_after_the_last(every, rounds):
    # As `DefaultFlowCallback` of transformers 5.17 has it.
    training = {"eval_strategy": "steps", "eval_steps": every}
    inputs = BatchInputs(max_steps=10, dataset_size=100, evaluates=True, eval_dataset_size=8)
    timings = cost.Timings(sample_s=1.0, forward_s=1.0, micro_step_s=1.0, update_s=1.0)
    found = cost.estimate_time(recipe(training=training), plan_batch(inputs), timings, 8)
    [part] = [each for each in found.parts if each.name == "evaluation while training"]
    assert part.seconds == rounds * 8 * 8


@pytest.mark.parametrize(
    ("training", "kept"),
    [
        ({"save_strategy": "no"}, 0),
        ({"save_strategy": "steps", "save_steps": 10}, 10),
        ({"save_strategy": "steps", "save_steps": 30}, 4),
        ({"save_strategy": "steps", "save_steps": 0.25}, 4),
        ({"save_strategy": "best"}, 1),
        ({"save_strategy": "steps", "save_steps": 10, "save_total_limit": 2}, 2),
        # Beside the newest one, the best is kept.
        (
            {
                "save_strategy": "steps",
                "save_steps": 10,
                "save_total_limit": 1,
                "eval_strategy": "steps",
            },
            2,
        ),
        # Epochs of 40 steps.
        ({"save_strategy": "epoch"}, 3),
    ],
)
def test_checkpoints_are_counted(training, kept):
    plan = plan_batch(BatchInputs(max_steps=100, dataset_size=40))
    found = cost.estimate_disk(recipe(training=training), plan, SHAPE)
    assert (found.checkpoints, found.checkpoint_bytes) == (kept, 4000 + 8000)
    rotating = "save_total_limit" in training
    assert found.total == (kept + rotating) * 12000 + 4000


@pytest.mark.parametrize(
    ("optimizer", "states"), [("adamw_torch", 8000), ("adamw_8bit", 2000), ("sgd", 0)]
)
def test_checkpoints_hold_the_states_of_their_own_optimizer(optimizer, states):
    plan = plan_batch(BatchInputs(max_steps=100, dataset_size=1000))
    found = cost.estimate_disk(recipe(training={"optim": optimizer}), plan, SHAPE)
    assert found.checkpoint_bytes == 4000 + states


def test_memory_that_is_not_there_is_an_error_with_an_edit():
    found = estimate_memory(SHAPE, INPUTS)

    def judge(available, *, cuda=False):
        device = Device("cuda" if cuda else "cpu", None, available, 0, autocast=False)
        return list(judge_memory(found, device, recipe(), PLAN))

    (over,), (near,) = judge(found.peak_bytes - 1), judge(int(found.peak_bytes * 1.05))
    assert (over.level, near.level) == ("error", "warning")
    # The estimate has not been measured there yet.
    assert judge(found.peak_bytes - 1, cuda=True)[0].level == "warning"
    assert judge(10 * found.peak_bytes) == []
    assert "Fix:" in str(over)


def test_a_warm_up_holds_its_own_batch_and_the_logits_of_its_answers():
    warm = recipe(warmup={"answer": "x", "per_device_train_batch_size": 8})
    inputs = warmup_inputs(replace(INPUTS, teacher_bytes=77, budget=1), warm.warmup, 3)
    found, told = estimate_memory(SHAPE, inputs), parts(inputs)
    assert told["activations", "loss"] == 8 * 9 * (40 + 300)
    assert told["logits", "loss"] == 8 * 3 * (50 * 4 + 4 * 10)
    assert not {name for name, _ in told} & {"teacher", "keys and values"}
    device = Device("cpu", None, found.peak_bytes - 1, 0, autocast=False)
    (over,) = judge_memory(found, device, warm, PLAN)
    assert over.path == "warmup.per_device_train_batch_size"
    assert "in the warm-up" in over.seen
    assert "`per_device_train_batch_size: 4` and `gradient_accumulation_steps: 2`" in over.fix


def test_hours_that_nothing_saves_are_a_warning():
    given = recipe(training={"save_strategy": "no"})
    long = cost.TimeEstimate((cost.TimePart("sampling", 7200.0, ""),), 72.0, 100, 7200.0)
    told = [finding.subject for finding in cost.judge_time(given, long)]
    assert told == ["cost: nothing is saved"]
    short = replace(long, steps=10)
    assert list(cost.judge_time(given, short)) == []
    slow = cost.TimeEstimate((cost.TimePart("scoring", 60.0, ""),), 1.0, 60, 60.0)
    assert [finding.subject for finding in cost.judge_time(given, slow)] == ["cost: scoring"]
