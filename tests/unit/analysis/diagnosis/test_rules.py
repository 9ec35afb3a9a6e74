"""Each rule on series that show what it looks for, and on others that nearly do."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from grpo_cli.analysis.diagnosis.diagnosis import RULES
from grpo_cli.analysis.diagnosis.history import Answers
from grpo_cli.recipe.recipe import Recipe
from tests.histories import find, find_all, make_history, make_recipe

UP = [step / 40 for step in range(40)]
HALF = [0.5] * 40
TWO = [{"kind": "math", "answer": "q", "name": "right"}, {"kind": "think_format", "name": "form"}]
OWN = [{"kind": "python", "path": "own.py:score"}]
VLLM = {"backend": "vllm"}
TOOLS = {"tools": [{"kind": "function", "path": "tools.py:search"}]}


def ends(share, **by):
    """Series of how episodes end: by each limit, and the rest by an answer."""
    names = ("tokens", "cut_off", "turns")
    series = {f"episode/end/{name}": [by.get(name, 0.0)] * 10 for name in names}
    return {**series, "episode/end/answer": [share] * 10}


def calls(count=2.0, **kinds):
    """Series of calls an episode, and of those that fail."""
    shares = {
        f"tools/{name}": [kinds.get(name, 0.0)] * 10 for name in ("failed", "late", "unknown")
    }
    others = {f"tools/{name}": [kinds.get(name, 0.0)] * 10 for name in ("malformed", "repeated")}
    return {"tools/call_frequency": [count] * 10, **shares, **others}


def noisy(values, by=0.02, seed=0):
    chance = random.Random(seed)
    return [value + chance.gauss(0, by) for value in values]


def rewards(**means):
    """Series of rewards by name: their means, and a spread that goes with them."""
    series = {}
    for name, values in means.items():
        series[f"rewards/{name}/mean"] = values
        series[f"rewards/{name}/std"] = [0.4] * len(values)
    return series


def said(texts, **scores):
    """Answers of a measurement, one to a prompt, with what each reward gave them."""
    text, count = Counter(texts).most_common(1)[0]
    by_row = {f"rewards/{name}": dict(enumerate(values)) for name, values in scores.items()}
    totals = {row: sum(values[row] for values in by_row.values()) for row in range(len(texts))}
    return Answers(len(texts), text, count / len(texts), {"reward": totals, **by_row})


MIXED = {
    "dataset": {
        "sources": [
            {"name": name, "kind": "inline", "rows": [{"q": name}]} for name in ("sums", "words")
        ]
    }
}


def by_source(silent, sums):
    """Series of two sources: the groups of `sums` without signal, its reward, and as much for the whole."""
    return {
        "sources/sums/frac_reward_zero_std": [silent] * 40,
        "sources/words/frac_reward_zero_std": [0.3] * 40,
        "sources/sums/reward": noisy(sums),
        "sources/words/reward": noisy(UP),
        "reward": noisy(UP),
    }


APART = [f"answer {number}" for number in range(12)]
BEFORE = said(APART, right=[0.3, 0.2] * 6, form=[0.3] * 12)
"""Of rewards as in `TWO`."""
SHOWN = {
    "source_starves": (
        make_history(by_source(1.0, [0.0] * 40), make_recipe(**MIXED)),
        "100% of the groups of `sums` in its last 10 records had no two different rewards",
        "or a lower `dataset.sources.0.ratio`",
    ),
    "source_forgets": (
        make_history(by_source(0.3, UP[::-1]), make_recipe(**MIXED)),
        "the reward of `sums` began at 0.8",
        "a higher `dataset.sources.0.ratio` (it has 50% of the prompts)",
    ),
    "too_high_learning_rate": (
        make_history(
            {"learning_rate": [1.0] * 11, "entropy": [6.0] + [0.001] * 10, "reward": HALF[:11]},
            make_recipe(training={"learning_rate": 1.0}),
        ),
        "the highest learning rate is 1 (at most 5e-05 without LoRA), and it shows: entropy_collapse",
        "`training.learning_rate: 1e-06` (it is 1)",
    ),
    "constant_reward": (
        make_history(
            {**rewards(right=noisy(HALF), form=[0.0] * 40), "rewards/form/std": [0.0] * 40},
            make_recipe(rewards=TWO),
        ),
        "`form` gave every completion of the last 20 records the same score, 0",
        "remove `rewards.1`",
    ),
    "reward_failures": (
        make_history(
            {**rewards(right=HALF), "rewards/right/error_share": [0.0] * 35 + [0.5] * 5},
            failed={"right": (1234, "took longer than 5 s")},
        ),
        "`right` failed on 25% of the completions of the last 10 records (at most 5%), on 1,234 so far; the "
        "first: took longer than 5 s",
        "`rewards.0.timeout_s`",
    ),
    "absent_reward": (
        make_history({"rewards/right/mean": [None] * 10, "reward": [None] * 10}),
        "`right` gave no score to any completion of the last 10 records: nothing is learned",
        "shows what `right` gives",
    ),
    "held_out_collapse": (
        make_history(
            {"reward": HALF},
            make_recipe(rewards=TWO),
            answers_before=BEFORE,
            answers_after=said([""] * 12, right=[0.0] * 12, form=[0.3] * 12),
            checkpoints=(10, 40),
            run="runs/a/1",
        ),
        "100% of the held-out answers to 12 prompts are empty (should be below 90%); earlier, 8% were the "
        "same",
        "`training.learning_rate: 2e-06`, or an earlier checkpoint: `grpo eval runs/a/1 --checkpoint 10`",
    ),
    "held_out_loss": (
        make_history(
            {"reward": HALF},
            make_recipe(rewards=TWO),
            answers_before=BEFORE,
            answers_after=said(APART, right=[0.1, 0.02] * 6, form=[0.9] * 12),
        ),
        "`right` fell from 0.25 to 0.06 (95% interval of the change -0.195 to -0.185)",
        "`rewards.1.weight: 0.2` (it is 1)",
    ),
    "no_signal": (
        make_history({"frac_reward_zero_std": [0.9] * 10, "reward": [0.02] * 10}),
        "90% of the groups of the last 10 records",
        "`generation.num_generations: 16`",
    ),
    "all_solved": (
        make_history({"frac_reward_zero_std": UP[:20] + [0.9] * 20, "reward": UP}),
        "the reward rose from 0.05 to 0.863",
        "`training.max_steps: 40`",
    ),
    "repeated_answers": (
        make_history(
            {
                "completions/repeated_share": [0.7] * 10,
                "completions/mean_length": [50] * 10,
                "reward": HALF[:10],
            },
            make_recipe(generation={"temperature": 0.3}),
        ),
        "70% of the completions",
        "`generation.temperature: 1.0` (it is 0.3)",
    ),
    "truncation": (
        make_history({"completions/clipped_ratio": [0.6] * 10}),
        "60% of the completions of the last 10 records were cut off at 100 tokens",
        "`generation.max_completion_length: 200`",
    ),
    "length_explosion": (
        make_history({"completions/mean_length": [30] * 10 + [60] * 10 + [90] * 10}),
        "grew from 30 to 90 of 100 tokens",
        "soft_overlong",
    ),
    "length_collapse": (
        make_history(
            {"completions/mean_length": [80] * 10 + [4] * 10, "reward": [0.4] * 10 + [0.1] * 10}
        ),
        "shrank from 80 to 4 tokens",
        "`training.learning_rate: 2e-06`",
    ),
    "entropy_collapse": (
        make_history({"entropy": [0.3] * 10 + [0.004] * 10, "reward": HALF[:20]}),
        "entropy is 0.004 over the last 10 records (at least 0.01); it began at 0.3",
        "`training.learning_rate: 2e-06`, `training.beta: 0.01`",
    ),
    "entropy_explosion": (
        make_history({"entropy": [0.3] * 10 + [2.5] * 10, "reward": noisy(HALF[:20])}),
        "rose from 0.3 to 2.5",
        "`training.learning_rate: 2e-06`",
    ),
    "kl_runaway": (
        make_history({"kl": [3.0] * 10}, make_recipe(training={"beta": 0.04})),
        "the median KL of the last 10 records is 3",
        "`training.beta: 0.08`",
    ),
    "gradient_spike": (
        make_history({"grad_norm": [0.5] * 17 + [20.0, 30.0, 11.0]}),
        "3 of the last 20 gradient norms are above 10",
        "`training.learning_rate: 2e-06`",
    ),
    "nan_loss": (
        make_history({"loss": [0.1, 0.2, math.nan], "grad_norm": [1.0, 1.0, math.nan]}),
        "the loss of step 3 is NaN or infinite",
        "`training.learning_rate: 2e-06`",
    ),
    "clip_share": (
        make_history(
            {"clip_ratio/region_mean": [0.4] * 10}, make_recipe(training={"num_iterations": 4})
        ),
        "40% of the tokens",
        "`training.num_iterations: 2` (it is 4)",
    ),
    "reward_swamped": (
        make_history(
            {
                **rewards(right=HALF[:10], score=[40.0] * 10),
                "rewards/score/std": [30.0] * 10,
            },
            make_recipe(rewards=[TWO[0], {**OWN[0], "name": "score"}]),
        ),
        "`score` makes 99% of the spread of the total (at most 90%): its scores are 70 times as large",
        "`rewards.1.weight: 0.014` (it is 1)",
    ),
    "rewards_apart": (
        make_history(
            rewards(right=noisy([0.5] * 20 + [0.2] * 20), form=noisy([0.3] * 20 + [0.9] * 20)),
            make_recipe(rewards=TWO),
        ),
        "while `form` rose from",
        "`rewards.1.weight: 0.2` (it is 1)",
    ),
    "slow_reward": (
        make_history(
            {
                "rewards/right/seconds": [6.0] * 10,
                "rewards/right/mean": HALF[:10],
                "step_time": [8.0] * 10,
            }
        ),
        "scoring with `right` took 75% of the time",
        "`rewards.0.timeout_s: 10`",
    ),
    "early_peak": (
        make_history(
            {"reward": noisy([0.2] * 10 + [0.7] * 20 + [0.3] * 10)}, checkpoints=(10, 25, 40)
        ),
        "the reward was best around step",
        "keep checkpoint 25: `grpo eval RUN --checkpoint 25`, `grpo export RUN --checkpoint 25 --to DIR`",
    ),
    "falling_reward": (
        make_history({"reward": noisy([0.8] * 20 + [0.1] * 20)}, checkpoints=(10, 40)),
        "the reward began at 0.793 and is 0.0959 now",
        "keep checkpoint 10",
    ),
    "flat_reward": (
        make_history({"reward": noisy(HALF)}),
        "the reward began at 0.493 and is 0.496 now (the first and the last 10 of 40 records); its slope is 0.1",
        "or `training.learning_rate: 2e-05`",
    ),
    "held_out_gap": (
        make_history(
            {"reward": UP, "reward_std": HALF},
            before={"reward": 0.1, "prompts": 400},
            after={"reward": 0.2, "prompts": 400},
        ),
        "held out from 0.1 to 0.2",
        "more rows",
    ),
    "too_low_learning_rate": (
        make_history(
            {"learning_rate": [1e-6] * 40, "reward": noisy(HALF), "entropy": HALF},
            make_recipe(model={"lora": {"r": 8}}, training={"learning_rate": 1e-6}),
        ),
        "the highest learning rate is 1e-06 (at least 5e-06)",
        "`training.learning_rate: 0.0001` (it is 1e-06)",
    ),
    "sampling_mismatch": (
        make_history(
            {"sampling/sampling_logp_difference/mean": [0.3] * 10},
            make_recipe(generation={**VLLM, "top_p": 0.8}),
        ),
        "vLLM's log-probabilities are 0.3 from the trainer's",
        "`generation.top_p: 1.0` (it is 0.8)",
    ),
    "tools_unused": (
        make_history(
            {
                "tools/call_frequency": noisy([1.0] * 10 + [0.02] * 10, 0.005),
                "episode/turns": [2.0] * 10 + [1.0] * 10,
                "reward": HALF[:20],
            },
            make_recipe(**TOOLS),
        ),
        "the model made 0.02 calls an episode in the last 10 records (at least 0.1), in 1 turns; it began with 1",
        "`rewards: [..., {kind: tool_use, weight: 0.1}]`",
    ),
    "malformed_calls": (
        make_history({**calls(2, malformed=1), "reward": HALF[:10]}, make_recipe(**TOOLS)),
        "50% of the calls of the last 10 records cannot be parsed (at most 10%)",
        "a model that was trained to call tools",
    ),
    "tool_failures": (
        make_history(calls(2, failed=0.2, late=0.8), make_recipe(**TOOLS)),
        "50% of the calls of the last 10 records failed (at most 20%), and no fewer towards the end: 10% failed, "
        "40% late",
        "`episode.tool_timeout_s: 20`",
    ),
    "budget_ends_episodes": (
        make_history(
            ends(0.2, cut_off=0.7, turns=0.1), make_recipe(**TOOLS, episode={"max_turn_tokens": 8})
        ),
        "limits ended 80% of the episodes of the last 10 records (at most 50%), and no fewer towards the end: "
        "70% by max_turn_tokens, 10% by max_turns",
        "`episode.max_turn_tokens: 16`",
    ),
    "repeated_calls": (
        make_history(calls(2, repeated=1.5), make_recipe(**TOOLS)),
        "75% of the calls of the last 10 records repeat one of their episode and its result",
        "`episode.max_turns: 4`",
    ),
    "slow_tool": (
        make_history({"time/tools": [6.0] * 10, "time/learning": [4.0] * 10}, make_recipe(**TOOLS)),
        "tools and environments took 60% of the time of the last 10 records (at most 50%), 6 s a step",
        "`episode.parallel: 32`",
    ),
    "sampling_starves": (
        make_history({"time/sampling": [95.0] * 10, "time/learning": [5.0] * 10}),
        "sampling took 95% of the time",
        "`generation.backend: vllm`",
    ),
}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_rule_says_what_it_saw_and_what_mends_it(name):
    history, seen, fix = SHOWN[name]
    symptom = find(name, history)
    assert symptom is not None
    assert seen in symptom.seen
    assert fix in symptom.fix
    assert symptom.step == history.metrics.step


def test_groups_that_were_replaced_count_by_what_is_left():
    recipe = make_recipe(generation={"dynamic_sampling": {"max_resample": 2}})
    series = {"frac_reward_zero_std": [0.95] * 10, "reward": [0.02] * 10}
    left = "dynamic_sampling/frac_reward_zero_std"
    symptom = find("no_signal", make_history({**series, left: [0.85] * 10}, recipe))
    assert symptom is not None
    assert "85% of the groups of the last 10 records had no two" in symptom.seen
    assert "rewards after replacing" in symptom.seen
    assert "`generation.dynamic_sampling.max_resample: 4`" in symptom.fix
    assert find("no_signal", make_history({**series, left: [0.5] * 10}, recipe)) is None


SILENT = {
    # Nothing has a signal: `no_signal` tells. And all sources fall: `falling_reward` does.
    "source_starves": [
        {**by_source(1.0, HALF), "sources/words/frac_reward_zero_std": [1.0] * 40},
    ],
    "source_forgets": [
        {**by_source(0.3, UP[::-1]), "reward": noisy(UP[::-1])},
        by_source(0.3, HALF),
    ],
    "tools_unused": [
        {"tools/call_frequency": [0.2] * 10, "episode/turns": [1.2] * 10},
        {"tools/call_frequency": [0.0] * 10, "episode/turns": [1.0] * 10, "reward": [1.0] * 10},
        # Answers that are cut off call nothing, and another rule says so.
        {
            "tools/call_frequency": [0.0] * 10,
            "episode/turns": [1.0] * 10,
            "episode/end/cut_off": [0.9] * 10,
        },
    ],
    "malformed_calls": [
        calls(2, malformed=0.1),
        calls(0),
        {**calls(2), "tools/malformed": [1.0] * 5 + [0.4] * 5},
    ],
    "tool_failures": [
        calls(2, failed=0.3),
        {**calls(2), "tools/unknown": [2.0] * 5 + [0.6] * 5},
    ],
    "budget_ends_episodes": [
        ends(0.6, turns=0.4),
        ends(0.1, turns=0.9) | {"reward": [1.0] * 10},
        ends(0.0) | {"episode/end/tokens": [0.9] * 5 + [0.5] * 5},
    ],
    "repeated_calls": [calls(2, repeated=0.8), calls(2, repeated=2) | {"reward": [1.0] * 10}],
    "slow_tool": [
        {"time/tools": [4.0] * 10, "time/sampling": [5.0] * 10, "time/learning": [1.0] * 10}
    ],
    "too_high_learning_rate": [
        {"learning_rate": [1.0] * 10, "entropy": [6.0] * 10, "reward": HALF[:10]},
        {"learning_rate": [4e-5] * 10, "entropy": [0.001] * 10, "reward": HALF[:10]},
    ],
    "constant_reward": [
        {**rewards(right=HALF, form=[0.0] * 40), "rewards/form/std": [0.0] * 39 + [0.1]},
        {**rewards(right=HALF, form=[0.0] * 19), "rewards/form/std": [0.0] * 19},
        # A form that was learned.
        {
            **rewards(right=HALF, form=UP[:20] + [1.0] * 20),
            "rewards/form/std": [0.3] * 20 + [0.0] * 20,
        },
    ],
    "reward_failures": [
        {**rewards(right=HALF), "rewards/right/error_share": [0.5] * 30 + [0.05] * 10},
    ],
    "absent_reward": [
        {"rewards/right/mean": [None] * 9},
        {"rewards/right/mean": [0.0] + [None] * 9},
    ],
    "held_out_collapse": [{"reward": HALF}],
    "held_out_loss": [{"reward": HALF}],
    "no_signal": [
        {"frac_reward_zero_std": [0.75] * 10, "reward": [0.02] * 10},
        {"frac_reward_zero_std": [1.0] * 9, "reward": [0.0] * 9},
        {"frac_reward_zero_std": [1.0] * 10, "reward": [1.0] * 10},
        # It began so, as runs on hard prompts do.
        {"frac_reward_zero_std": [1.0] * 5 + [0.2] * 10, "reward": UP[:15]},
        # What the quickstart ends with: most groups agree, because they are right.
        {"frac_reward_zero_std": [0.5] * 20 + [0.85] * 20, "reward": UP},
    ],
    "all_solved": [
        {"frac_reward_zero_std": [0.7] * 10, "reward": [0.95] * 10},
        {"frac_reward_zero_std": [1.0] * 10, "reward": [0.0] * 10},
        # It rose, and then said one thing only.
        {
            "frac_reward_zero_std": [1.0] * 40,
            "reward": [0.1] * 20 + HALF[:20],
            "entropy": [0.001] * 40,
        },
    ],
    "repeated_answers": [
        {
            "completions/repeated_share": [0.7] * 10,
            "completions/mean_length": [5] * 10,
            "reward": HALF[:10],
        },
        {
            "completions/repeated_share": [0.4] * 10,
            "completions/mean_length": [50] * 10,
            "reward": HALF[:10],
        },
        {
            "completions/repeated_share": [1.0] * 10,
            "completions/mean_length": [50] * 10,
            "reward": [1.0] * 10,
        },
    ],
    "truncation": [
        {"completions/clipped_ratio": [0.5] * 10},
        {"completions/clipped_ratio": [0.9] * 9},
        {"completions/clipped_ratio": [0.9] * 5 + [0.6] * 5},
    ],
    "length_explosion": [
        {"completions/mean_length": [30] * 10 + [70] * 10},
        {"completions/mean_length": [60] * 10 + [95] * 10},
        {"completions/mean_length": [30] * 10 + [90] * 9},
    ],
    "length_collapse": [
        {"completions/mean_length": [80] * 10 + [4] * 10, "reward": [0.1] * 10 + [0.4] * 10},
        {"completions/mean_length": [80] * 10 + [30] * 10, "reward": [0.4] * 10 + [0.1] * 10},
    ],
    "entropy_collapse": [
        {"entropy": [0.02] * 20, "reward": HALF[:20]},
        {"entropy": [0.001] * 20, "reward": [0.95] * 20},
        {"entropy": [0.001] * 9, "reward": HALF[:9]},
    ],
    "entropy_explosion": [
        {"entropy": [0.2] * 10 + [0.9] * 10, "reward": HALF[:20]},
        {"entropy": [5.0] * 10 + [5.4] * 10, "reward": HALF[:20]},
        {"entropy": [0.3] * 10 + [2.5] * 10, "reward": UP[:20]},
    ],
    "kl_runaway": [{"kl": [1.9] * 10}, {"kl": [0.1] * 8 + [500.0, 900.0]}],
    "gradient_spike": [
        {"grad_norm": [0.5] * 18 + [20.0, 30.0]},
        {"grad_norm": [0.0, 0.4, 0.0, 0.9] * 5},
        {"grad_norm": [0.01] * 17 + [0.5, 0.6, 0.7]},
    ],
    "nan_loss": [{"loss": [math.nan, 0.1]}, {"loss": [0.0], "reward": [math.nan]}],
    "clip_share": [{"clip_ratio/region_mean": [0.3] * 10}],
    "reward_swamped": [
        {
            "rewards/right/mean": [0.01] * 10,
            "rewards/right/std": [0.03] * 10,
            "rewards/form/mean": [0.8] * 10,
            "rewards/form/std": [0.4] * 10,
        },
        # The form is always right, so it says nothing more.
        {
            "rewards/right/mean": [0.5] * 10,
            "rewards/right/std": [0.5] * 10,
            "rewards/form/mean": [1.0] * 10,
            "rewards/form/std": [0.001] * 10,
        },
    ],
    "rewards_apart": [
        rewards(right=noisy(UP), form=noisy(UP)),
        rewards(right=noisy([0.5] * 40), form=noisy([0.3] * 20 + [0.9] * 20)),
        # The answer's at the cost of the form.
        rewards(right=noisy([0.3] * 20 + [0.9] * 20), form=noisy([0.5] * 20 + [0.2] * 20)),
        rewards(right=noisy([0.5] * 20 + [0.2] * 20, by=0.6), form=noisy([0.3] * 40, by=0.6)),
    ],
    "slow_reward": [
        # Beside sampling: next to nothing of it is waited for.
        {
            "rewards/right/seconds": [6.0] * 10,
            "rewards/right/mean": HALF[:10],
            "time/scoring": [0.5] * 10,
            "step_time": [8.0] * 10,
        },
        {
            "rewards/right/seconds": [3.0] * 10,
            "rewards/right/mean": HALF[:10],
            "step_time": [8.0] * 10,
        },
        # The first call loads a model.
        {
            "rewards/right/seconds": [99.0] + [0.1] * 9,
            "rewards/right/mean": HALF[:10],
            "step_time": [107.0] + [8.0] * 9,
        },
    ],
    "early_peak": [
        {"reward": noisy(UP)},
        {"reward": noisy(HALF, by=0.3)},
        {"reward": noisy([0.2] * 10 + [0.7] * 20 + [0.6] * 10)},
        # It only ever fell.
        {"reward": noisy([0.7] * 10 + [0.2] * 30)},
    ],
    "falling_reward": [
        {"reward": noisy(UP)},
        {"reward": noisy(HALF, by=0.3)},
        {"reward": noisy([0.8] * 20 + [0.75] * 20)},
        # Of this early_peak tells.
        {"reward": noisy([0.3] * 10 + [0.7] * 20 + [0.1] * 10)},
    ],
    "flat_reward": [
        {"reward": noisy(UP)},
        # It learned at once.
        {"reward": noisy([0.2] * 6 + [0.7] * 34)},
        # Of this falling_reward tells.
        {"reward": noisy([0.8] * 20 + [0.1] * 20)},
        {"reward": [0.99] * 40},
    ],
    "held_out_gap": [{"reward": UP, "reward_std": HALF}],
    "too_low_learning_rate": [
        {"learning_rate": [1e-5] * 40, "reward": HALF, "entropy": HALF},
        {"learning_rate": [1e-8] * 40, "reward": UP, "entropy": HALF},
        {"learning_rate": [1e-8] * 40, "reward": HALF, "entropy": [0.5] * 20 + [0.4] * 20},
    ],
    "sampling_mismatch": [{"sampling/sampling_logp_difference/mean": [0.05] * 10}],
    "sampling_starves": [
        {"time/sampling": [60.0] * 10, "time/learning": [40.0] * 10},
        {"time/sampling": [0.0] * 10, "time/learning": [0.0] * 10},
    ],
}
RECIPES = {
    "source_starves": MIXED,
    "source_forgets": MIXED,
    **dict.fromkeys(
        "tools_unused malformed_calls tool_failures budget_ends_episodes repeated_calls slow_tool".split(),
        TOOLS,
    ),
    "kl_runaway": {"training": {"beta": 0.04}},
    "constant_reward": {"rewards": TWO},
    "reward_swamped": {"rewards": TWO},
    "rewards_apart": {"rewards": TWO},
    "sampling_mismatch": {"generation": VLLM},
}
NEARLY = [(name, place) for name, each in SILENT.items() for place in range(len(each))]


@pytest.mark.parametrize(("name", "place"), NEARLY)
def test_a_rule_is_silent_where_it_only_looks_like_it(name, place):
    recipe = make_recipe(**RECIPES.get(name, {}))
    assert find(name, make_history(SILENT[name][place], recipe)) is None


def test_every_rule_has_series_that_show_it_and_some_that_do_not():
    names = {rule.name for rule in RULES}
    assert SHOWN.keys() == SILENT.keys() == names
    assert len(names) == len(RULES)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (said([""] * 12, right=HALF[:12]), said([""] * 12, right=HALF[:12])),
        (said(APART[:4], right=HALF[:4]), said([""] * 4, right=HALF[:4])),
        (said(APART, right=HALF[:12]), said(["no"] * 10 + ["yes"] * 2, right=HALF[:12])),
        # The right answers coincide.
        (said(APART, right=HALF[:12]), said(["4"] * 12, right=[1.0] * 12)),
    ],
)
def test_equal_answers_are_no_collapse_where_they_were_so_or_are_right(before, after):
    history = make_history({"reward": HALF}, answers_before=before, answers_after=after)
    assert find("held_out_collapse", history) is None


def test_a_reward_that_grows_by_one_answer_to_everything_is_to_blame():
    after = said(["ideide"] * 12, right=[0.7] * 12)
    history = make_history(
        {"reward": HALF},
        make_recipe(rewards=OWN),
        answers_before=said(APART, right=[0.2] * 12),
        answers_after=after,
    )
    symptom = find("held_out_collapse", history)
    assert "are 'ideide'" in symptom.seen
    assert "`grpo rewards test RECIPE` shows what it rewards" in symptom.fix
    # Answers that were all the same before GRPO began.
    symptom = find("held_out_collapse", replace(history, answers_warmed=after))
    assert symptom.seen.endswith(", after the warm-up 100%")
    assert symptom.fix.startswith("a shorter warm-up")


@pytest.mark.parametrize(
    "after",
    [
        said(APART, right=[0.3, 0.2] * 6, form=[0.3] * 12),
        said(APART, right=[0.9, 0.0, 0.1, 0.0] * 3, form=[0.3] * 12),
        said(APART, right=[0.28, 0.19] * 6, form=[0.3] * 12),
        said(APART[:7], right=[0.0] * 7, form=[0.0] * 7),
    ],
)
def test_held_out_rewards_that_fall_within_their_noise_are_no_loss(after):
    recipe = make_recipe(rewards=TWO)
    history = make_history({"reward": HALF}, recipe, answers_before=BEFORE, answers_after=after)
    assert find("held_out_loss", history) is None


def test_a_form_that_gives_way_to_the_answer_is_a_note():
    after = said(APART, right=[0.9, 0.8] * 6, form=[0.0] * 12)
    recipe = make_recipe(rewards=TWO)
    history = make_history({"reward": HALF}, recipe, answers_before=BEFORE, answers_after=after)
    assert find("held_out_loss", history).level == "note"
    both = said(APART, right=[0.0] * 12, form=[0.0] * 12)
    history = make_history({"reward": HALF}, recipe, answers_before=BEFORE, answers_after=both)
    symptom = find("held_out_loss", history)
    assert symptom.level == "warning"
    assert "warm-up" not in symptom.fix
    assert find("held_out_loss", replace(history, answers_warmed=both)).fix.startswith(
        "a shorter warm-up"
    )
    assert "`form` fell from 0.3 to 0 (95% interval of the change -0.3 to -0.3)" in symptom.seen
    assert "`training.learning_rate: 2e-06`, or fewer steps" in symptom.fix


def test_an_absent_reward_among_others_is_a_warning():
    series = {"rewards/right/mean": HALF[:10], "rewards/form/mean": [None] * 10}
    symptom = find("absent_reward", make_history(series, make_recipe(rewards=TWO)))
    assert symptom.level == "warning"
    assert symptom.seen.startswith("`form` gave no score")
    both = dict.fromkeys(series, [None] * 10)
    symptom = find("absent_reward", make_history(both, make_recipe(rewards=TWO)))
    assert symptom.level == "error"
    assert "nor did any other reward" in symptom.seen


def test_a_constant_reward_matters_by_what_it_gives():
    form = {**rewards(right=HALF, form=[1.0] * 40), "rewards/form/std": [0.0] * 40}
    assert find("constant_reward", make_history(form, make_recipe(rewards=TWO))).level == "note"
    penalty = [TWO[0], {"kind": "soft_overlong", "cache": 10, "name": "form"}]
    spared = {**form, "rewards/form/mean": [0.0] * 40}
    assert find("constant_reward", make_history(spared, make_recipe(rewards=penalty))) is None
    assert (
        find("constant_reward", make_history(spared, make_recipe(rewards=TWO))).level == "warning"
    )


def test_a_gap_needs_more_than_a_start_that_was_lower():
    series = {"reward": [0.2 + value / 2 for value in UP], "reward_std": HALF}
    harder = {"before": {"reward": 0.0, "prompts": 400}, "after": {"reward": 0.4, "prompts": 400}}
    few = {"before": {"reward": 0.2, "prompts": 4}, "after": {"reward": 0.25, "prompts": 4}}
    for measured in (harder, few):
        assert find("held_out_gap", make_history(series, **measured)) is None


def test_a_gap_shows_in_evaluations_too():
    series = {"reward": UP, "eval_reward": [0.1, 0.1, 0.12, 0.1]}
    assert "held out from 0.1 to 0.11" in find("held_out_gap", make_history(series)).seen
    for few in ([0.1, 0.1, 0.12], [0.1, 0.9, 0.0, 0.2]):
        assert find("held_out_gap", make_history({**series, "eval_reward": few})) is None


def test_levels_follow_how_bad_it_is():
    masked = make_recipe(training={"mask_truncated_completions": True})
    cut = {"completions/clipped_ratio": [0.95] * 10}
    assert find("truncation", make_history(cut)).level == "error"
    assert "(at most 50%; above 80% an error)" in find("truncation", make_history(cut)).seen
    unjudged = find("truncation", make_history(cut, make_recipe(rewards=OWN)))
    assert (unjudged.level, "an error" in unjudged.seen) == ("warning", False)
    assert "take no part in the loss" in find("truncation", make_history(cut, masked)).seen
    risen = {"completions/clipped_ratio": [0.95] * 40, "reward": UP}
    assert find("truncation", make_history(risen)).level == "note"
    silent = {"frac_reward_zero_std": [1.0] * 10, "reward": [0.5] * 10, "reward_std": [0.0] * 10}
    assert find("no_signal", make_history(silent)).level == "error"
    assert "grpo rewards test" in find("no_signal", make_history(silent)).fix
    easy = {"frac_reward_zero_std": [1.0] * 10, "reward": [1.0] * 10}
    assert find("all_solved", make_history(easy)).level == "warning"
    far = {"sampling/sampling_logp_difference/mean": [1.5] * 10}
    assert (
        find("sampling_mismatch", make_history(far, make_recipe(generation=VLLM))).level == "error"
    )
    still = {"learning_rate": [0.0] * 40, "reward": HALF}
    assert find("too_low_learning_rate", make_history(still)).level == "error"


def test_a_reward_of_unknown_scale_is_solved_where_it_rose_until_all_scored_the_same():
    grown = [10.0] * 5 + [step * 2.0 for step in range(15)] + [50.0] * 20
    series = {
        "frac_reward_zero_std": [0.1] * 30 + [1.0] * 10,
        "reward": grown,
        "entropy": [0.001] * 40,
    }
    same = make_history({**series, "reward_std": [5.0] * 30 + [0.0] * 10}, make_recipe(rewards=OWN))
    apart = make_history({**series, "reward_std": [25.0] * 40}, make_recipe(rewards=OWN))
    assert find("all_solved", same).level == "note"
    assert find("no_signal", same) is find("entropy_collapse", same) is None
    assert find("all_solved", apart) is None
    assert find("no_signal", apart).level == find("entropy_collapse", apart).level == "error"


def test_right_answers_of_one_word_may_repeat():
    recipe = make_recipe(rewards=OWN)
    series = {
        "completions/repeated_share": [0.3] * 20 + [0.98] * 20,
        "completions/mean_length": [2] * 40,
        "frac_reward_zero_std": [0.1] * 20 + [0.9] * 20,
        "learning_rate": [1e-3] * 40,
        "entropy": [1.5] * 20 + [0.1] * 20,
    }
    right = {"reward": [0.05] * 20 + [0.96, 0.98] * 10, "reward_std": [0.2] * 40}
    # One word of four, whatever the prompt: it rose too.
    blind = {"reward": [0.05] * 20 + [0.24, 0.26] * 10, "reward_std": [0.2] * 20 + [0.43] * 20}
    solved = find_all(make_history({**series, **right}, recipe))
    assert not {"repeated_answers", "too_high_learning_rate"} & solved.keys()
    assert {"repeated_answers", "too_high_learning_rate"} <= find_all(
        make_history({**series, **blind}, recipe)
    ).keys()


@pytest.mark.parametrize(("total", "is_early"), [(40, False), (100, True)])
def test_the_steps_of_a_solved_run_are_enough_if_more_are_planned(total, is_early):
    series = {
        "frac_reward_zero_std": UP[:20] + [0.9] * 20,
        "reward": UP,
        "total_steps": [total] * 40,
    }
    fix = find("all_solved", make_history(series)).fix
    assert ("`training.max_steps: 40` is enough" in fix) is is_early


def test_gradients_that_fp16_skips_are_no_loss():
    half = make_recipe(training={"fp16": True})
    few = {"loss": [0.1] * 10, "grad_norm": [0.5] * 6 + [math.inf] * 4}
    assert find("nan_loss", make_history(few, half)) is None
    assert find("nan_loss", make_history(few)) is not None
    many = {"loss": [0.1] * 10, "grad_norm": [0.5] * 5 + [math.inf] * 5}
    assert find("nan_loss", make_history(many, half)) is not None


def test_a_loss_that_ended_the_run_before_its_record_is_seen():
    assert (
        "the loss of step 2 is NaN or infinite"
        in find("nan_loss", make_history({"reward": [0.1]}, lost_at=2)).seen
    )


def test_gradients_far_above_their_median_are_spikes_too():
    loose = make_recipe(training={"max_grad_norm": 0.0})
    series = {"grad_norm": [0.01] * 17 + [0.5, 0.6, 0.7]}
    symptom = find("gradient_spike", make_history(series, loose))
    assert "above 10 times their median 0.01" in symptom.seen
    assert "`training.max_grad_norm: 1.0`" in symptom.fix


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({}, {"kl_runaway", "sampling_mismatch", "rewards_apart", "reward_swamped"}),
        ({"training": {"beta": 0.1, "loss_type": "cispo"}}, {"clip_share"}),
        ({"rewards": TWO, "training": {"multi_objective_aggregation": "normalize_then_sum"}}, {"reward_swamped"}),
        ({"generation": {**VLLM, "vllm": {"importance_sampling_correction": False}}}, {"sampling_mismatch"}),
    ],
)  # fmt: skip
def test_rules_that_a_recipe_gives_nothing_to_look_at_say_why(changes, rules):
    history = make_history({"loss": [0.0]}, make_recipe(**changes))
    barred = {rule.name for rule in RULES if rule.skip_reason(history.recipe)}
    assert rules <= barred
    for rule in RULES:
        if rule.name in rules:
            assert rule.skip(history).reason == rule.skip_reason(history.recipe)


def test_scored_data_is_judged_by_what_it_trains_alone():
    scored = {
        "name": "scored",
        "model": {"path": "org/model"},
        "dataset": {"kind": "scored", "train": ["rows.jsonl"]},
    }
    recipe = Recipe.model_validate(scored)
    series = {
        "frac_reward_zero_std": [1.0] * 40,
        "reward": [0.1] * 40,
        "completions/clipped_ratio": [0.9] * 40,
        "entropy": [0.001] * 40,
        "loss": [0.0] * 40,
        "learning_rate": [1e-9] * 40,
    }
    assert find_all(make_history(series, recipe)).keys() == {"entropy_collapse"}


def test_what_need_not_matter_is_a_note():
    recipe = make_recipe(**TOOLS)
    rising = {**calls(2, failed=2), "reward": noisy(UP[:10], 0.001)}
    assert find("tool_failures", make_history(calls(2, failed=2), recipe)).level == "error"
    assert find("tool_failures", make_history(rising, recipe)).level == "note"
    # A game may have a number of turns.
    assert find("budget_ends_episodes", make_history(ends(0.1, turns=0.9), recipe)).level == "note"
    assert find("budget_ends_episodes", make_history(ends(0.1, tokens=0.9), recipe)).level == (
        "warning"
    )


def test_only_the_limits_of_episodes_count_for_recipes_with_tools():
    series = {"completions/clipped_ratio": [0.9] * 10, **ends(1.0)}
    assert find_all(make_history(series, make_recipe(**TOOLS))) == {}
    assert find_all(make_history(series)).keys() == {"truncation"}


def test_metrics_that_are_not_there_or_no_numbers_never_end_in_an_error():
    chance = random.Random(0)
    names = sorted({metric.replace("NAME", "right") for rule in RULES for metric in rule.metrics})
    names += [
        "reward_std",
        "eval_reward",
        "rewards/form/mean",
        "rewards/form/std",
        "completions/mean_length",
    ]
    values = [None, math.nan, math.inf, 0, -1, 1e30, 0.5, True, "text", [1], {}]
    recipes = [
        make_recipe(),
        make_recipe(rewards=TWO),
        make_recipe(generation=VLLM, training={"beta": 1.0}),
        make_recipe(**TOOLS),
    ]
    for _ in range(150):
        history = make_history(
            {"loss": []}, chance.choice(recipes), {"reward": None}, {"prompts": None}
        )
        for step in range(chance.choice((0, 1, 12, 45))):
            picked = chance.sample(names, chance.randint(0, len(names)))
            logged = {name: chance.choice(values) for name in picked}
            history.metrics.extend([{"event": "train", "step": step, **logged}])
        find_all(history)


@pytest.mark.parametrize("seconds", [(6.0, 2.0), (4.0, 4.0)])
def test_the_time_of_a_step_is_that_of_each_reward_where_a_batch_lasts_two(seconds):
    # Records of two steps each: the seconds of rewards are those of a batch, all others those of a step.
    series = {
        "rewards/right/seconds": [seconds[0]] * 12,
        "rewards/form/seconds": [seconds[1]] * 12,
        **rewards(right=HALF[:12], form=HALF[:12]),
        "time/scoring": [4.0] * 12,
        "step_time": [5.0] * 12,
    }
    symptom = find("slow_reward", make_history(series, make_recipe(rewards=TWO)))
    if seconds[0] == 4.0:
        assert symptom is None
    else:
        assert "`right` took 60% of the time" in symptom.seen
        assert "3 s a step" in symptom.seen


@pytest.mark.parametrize(("before", "now", "most"), [(0.3, 2.5, "1"), (1.5, 3.2, "3")])
def test_the_limit_of_entropy_is_told_where_it_began_high(before, now, most):
    series = {"entropy": [before] * 10 + [now] * 10, "reward": noisy(HALF[:20])}
    symptom = find("entropy_explosion", make_history(series))
    assert f"to {now:g} (at most {most})" in symptom.seen


def test_a_slow_reward_that_waits_is_scored_beside_sampling():
    judge = {"kind": "judge", "model": "m", "rubric": "r", "name": "right"}
    series = {
        "rewards/right/seconds": [6.0] * 10,
        "rewards/right/mean": HALF[:10],
        "time/scoring": [5.0] * 10,
        "step_time": [8.0] * 10,
    }
    symptom = find("slow_reward", make_history(series, make_recipe(rewards=[judge])))
    assert "took 62% of the time" in symptom.seen
    assert symptom.fix.startswith("`generation.sampling_parts: 2`, which scores one part")


@pytest.mark.parametrize(
    ("checkpoints", "training"),
    [((40,), {}), ((10, 40), {"load_best_model_at_end": True, "save_strategy": "best"})],
)
def test_the_checkpoint_that_was_measured_is_no_way_back(checkpoints, training):
    symptom = find(
        "held_out_collapse",
        make_history(
            {"reward": HALF},
            make_recipe(rewards=TWO, training=training),
            answers_before=BEFORE,
            answers_after=said([""] * 12, right=[0.0] * 12, form=[0.3] * 12),
            checkpoints=checkpoints,
        ),
    )
    assert "or fewer steps" in symptom.fix
    assert "--checkpoint" not in symptom.fix
