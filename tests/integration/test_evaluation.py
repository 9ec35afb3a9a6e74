"""TRL's evaluation and held-out measurements: one definition of each number, over all held-out prompts."""

import dataclasses
import json
from statistics import fmean, stdev

import pytest
from transformers import TrainerState

from grpo_cli.rewards.contract import RewardContext
from tests.integration.conftest import RECIPE

# What a row is worth, whatever is answered; some rows have one reward alone, and one has none.
WORTH = """\
def worth(completions, question, **kwargs):
    worths = {"held 0": 0.0, "held 1": 1.0, "held 2": 0.0, "held 3": None, "held 4": None}
    return [worths.get(each, 0.5) for each in question]

def style(completions, question, **kwargs):
    return [None if each == "held 4" else float(len(m[0]["content"])) for m, each in zip(completions, question)]
"""
# Logs how many completions it is called with, whether in the order of the rows, and the planned steps.
CORPUS = """\
def corpus(completions, row_id, log_metric, trainer_state, **kwargs):
    log_metric("rows", len(completions))
    log_metric("sorted", list(row_id) == sorted(row_id))
    log_metric("planned", trainer_state.max_steps)
    return [1 / trainer_state.max_steps for _ in completions]

def some(completions, question, log_metric, completion_ids, **kwargs):
    log_metric("some", len(completions) + all(map(len, completion_ids)) / 2)
    return [0.0] * len(completions)

def broken(completions, log_metric, **kwargs):
    log_metric("nothing", float("nan"))
    return [0.0] * len(completions)
"""
STATEFUL = """\
class Count:
    calls = 0
    def __call__(self, completions, log_metric, **kwargs):
        self.calls += 1
        log_metric("calls", self.calls)
        return [0.0] * len(completions)
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]
count = Count()
"""


def text_of(rewards, more="", rows=5, **training):
    held = "\n".join(f'    - {{{{question: "held {n}", answer: "{n}"}}}}' for n in range(rows))
    first, last = RECIPE.index("    - {{question"), RECIPE.index("rewards:")
    training = "".join(f"  {name}: {value}\n" for name, value in training.items())
    text = RECIPE[:first] + held + "\n" + RECIPE[last:]
    first, last = text.index("rewards:"), text.index("generation:")
    text = text[:first] + "rewards:\n" + rewards + "\n" + text[last:]
    return text.replace("training:\n", "training:\n" + training) + more


def own(path, **settings):
    more = "".join(f", {name}: {value}" for name, value in settings.items())
    return f"  - {{{{kind: python, path: ./mine.py:{path}{more}}}}}\n"


def logged_completions(workshop):
    """What evaluations sampled, each row's group once."""
    groups = {}
    for path in sorted((workshop.run / "completions").glob("rank_*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["split"] == "eval":
                groups.setdefault(record["row"], record)
    return groups


@pytest.mark.parametrize(
    ("size", "processes"), [(4, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_a_metric_of_trls_evaluation_is_over_all_prompts(workshop, size, processes):
    """Five prompts in batches of two, the last of which is uneven, or filled up with rows of the first."""
    (workshop.folder / "mine.py").write_text(WORTH)
    training = {"eval_strategy": "steps", "eval_steps": 2, "beta": 0.1}
    training["per_device_eval_batch_size"] = size
    recipe = workshop.write(text_of(own("worth") + own("style", weight=0.01), **training))
    if processes > 1:
        run = workshop.process("train", recipe, "--set", f"launch.num_processes={processes}")
    else:
        run = workshop.grpo("train", recipe)
    assert run.returncode == 0, run.stderr
    [record] = workshop.records("eval")
    [before, after] = workshop.records("measure")
    assert record["eval_rewards/worth/mean"] == pytest.approx(1 / 3)
    assert before["rewards"]["worth"] == after["rewards"]["worth"] == pytest.approx(1 / 3)
    groups = logged_completions(workshop)
    assert len(groups) == 5
    every = [each for group in groups.values() for each in group["tokens"]]
    assert record["eval_completions/mean_length"] == pytest.approx(fmean(every))
    assert record["eval_completions/min_length"] == min(every)
    assert record["eval_completions/max_length"] == max(every)
    clipped = [each for group in groups.values() for each in group["clipped"]]
    assert record["eval_completions/clipped_ratio"] == pytest.approx(fmean(clipped))
    ended = [length for length, cut in zip(every, clipped, strict=True) if not cut] or [0]
    assert record["eval_completions/mean_terminated_length"] == pytest.approx(fmean(ended))
    styles = {row: group["rewards"]["style"] for row, group in groups.items() if row != 4}
    means = [fmean(values) for values in styles.values()]
    assert record["eval_rewards/style/mean"] == pytest.approx(fmean(means))
    all_styles = [each for values in styles.values() for each in values]
    assert record["eval_rewards/style/std"] == pytest.approx(stdev(all_styles))
    worths = {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}
    totals = [worths[row] + 0.01 * fmean(values) for row, values in styles.items()]
    assert record["eval_reward"] == pytest.approx(fmean(totals), rel=1e-5)
    silent = [len({*values}) == 1 for values in styles.values()] + [True]
    assert record["eval_frac_reward_zero_std"] == pytest.approx(fmean(silent))
    assert record["eval_entropy"] > 0
    assert record["eval_num_tokens"] == workshop.records("train")[-1]["num_tokens"]


def test_metrics_of_rewards_are_of_all_rows_and_planned_steps_are_known(workshop):
    """Before, during and after training, in TRL's evaluation and in `grpo eval`; never of one batch."""
    (workshop.folder / "mine.py").write_text(CORPUS)
    some = own("some", when="\"question != 'held 1'\"", weight=0)
    rewards = own("corpus") + some + own("broken", weight=0)
    during = "evaluation: {{batch_size: 1, during: [{{every: 1, samples_per_prompt: 2, temperature: 1.0}}]}}\n"
    training = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    training |= {"metric_for_best_model": "eval_held_out/rows", "num_train_epochs": 1.5}
    text = text_of(rewards, during, **training).replace("  max_steps: 2\n", "")
    recipe = workshop.write(text, rows=4)
    done = workshop.grpo("train", recipe)
    assert done.returncode == 0, done.stderr
    assert workshop.status()["total_steps"] == 3
    by_trl = [each for each in workshop.records("eval") if "eval_loss" in each]
    names = ("rows", "sorted", "planned", "some")
    for record in by_trl:
        assert [record[f"eval_{name}"] for name in names] == [10, 1, 3, 8.5]
    during = [each for each in workshop.records("eval") if "eval_held_out/rows" in each]
    assert (len(by_trl), len(during)) == (3, 3 + 1)
    for record in during:
        assert [record[f"eval_held_out/{name}"] for name in names] == [10, 1, 3, 8.5]
        assert "eval_held_out/nothing" not in record
    wanted = {"rows": 5, "sorted": 1, "planned": 3, "some": 4.5}
    assert [each["logged"] for each in workshop.records("measure")] == [wanted] * 2
    measured = workshop.grpo("eval", workshop.run, "--json")
    assert measured.returncode == 0, measured.stderr
    result = json.loads(measured.stdout)
    for subject in result["subjects"].values():
        assert {name: subject["metrics"][name]["value"] for name in names} == wanted
    assert result["differences"]["final"]["rows"]["value"] == 0
    shown = workshop.grpo("runs", "show", workshop.run)
    assert shown.returncode == 0, shown.stderr
    tried = workshop.grpo("rewards", "test", recipe)
    assert tried.returncode == 0, tried.stderr + tried.stdout
    assert "0.333" in tried.stdout


@pytest.mark.slow
def test_the_probe_and_several_processes_know_them_too(workshop):
    (workshop.folder / "mine.py").write_text(CORPUS + STATEFUL)
    text = text_of(own("corpus") + own("count", weight=0)).replace("max_steps: 2", "max_steps: 7")
    recipe = workshop.write(text)
    two = ["--set", "launch.num_processes=2", "--set", "training.max_steps=2"]
    probed = workshop.process("probe", recipe)
    assert "the same score (0.142857)" in probed.stdout + probed.stderr
    done = workshop.process("train", recipe, *two)
    assert done.returncode == 0, done.stderr
    # The state of training does not change by measurements: each process called it twice.
    logged = [each["logged"] for each in workshop.records("measure")]
    assert logged == [{"rows": 5, "sorted": 1, "planned": 2, "calls": calls} for calls in (1, 3)]


def test_the_state_outside_of_training_has_what_the_trainers_has():
    names = {field.name for field in dataclasses.fields(TrainerState)}
    assert set(vars(RewardContext(8, max_steps=3).trainer_state())) == names


def test_an_evaluation_of_one_completion_a_prompt_has_no_share_of_silent_groups(workshop):
    (workshop.folder / "mine.py").write_text(WORTH)
    training = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    text = text_of(own("worth"), **training).replace(
        "num_generations: 2", "num_generations: 2\n  num_generations_eval: 1"
    )
    recipe = workshop.write(text)
    best = ("--set", "training.metric_for_best_model=eval_frac_reward_zero_std")
    best += ("--set", "training.load_best_model_at_end=true")
    seen = workshop.grpo("check", recipe, *best).stderr
    assert "no evaluation logs `eval_frac_reward_zero_std`" in seen
    done = workshop.grpo("train", recipe)
    assert done.returncode == 0, done.stderr
    [record] = workshop.records("eval")
    assert "eval_frac_reward_zero_std" not in record
    assert record["eval_reward"] == pytest.approx(1 / 3)
