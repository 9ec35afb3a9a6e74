"""Scoring beside sampling: when it happens, and that nothing else changes by it."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import RewardParams, Score
from grpo_cli.rewards.scoring import Reward
from grpo_cli.training.rollout.rollout import Aggregation, Context, Rollout, Scoring, cut
from grpo_cli.training.rollout.step import GenerationStep, PhaseClock
from tests.integration.conftest import RECIPE

PATIENCE_S = 60
"""Far longer than anything takes here: only what is wrong waits for it."""


class Params(RewardParams):
    """Of a reward that a test makes up."""


def reward_of(scorer, name="own"):
    return Reward(name, 1.0, "python", Params(), scorer, waits=True)


def ones(batch):
    return [Score(1.0) for _ in batch.completions]


class Texts:
    """A sampler of these texts, in their order."""

    in_parts = True

    def __init__(self, texts, before=lambda number: None):
        self.texts, self.before, self.calls = list(texts), before, 0

    def waits(self):
        return {}

    def sample(self, rows, context):
        self.before(self.calls)
        self.calls += 1
        own, self.texts = self.texts[: len(rows)], self.texts[len(rows) :]
        ids = [[ord(text)] for text in own]
        said = [[{"role": "assistant", "content": text}] for text in own]
        return Rollout(context, rows, [[1]] * len(rows), ids, said)


def sample(rewards, sampler, step=0, parts=2):
    """Samples and scores as many rows as there are texts, two of each group."""
    names = [reward.name for reward in rewards]
    rows = [
        {"prompt": [{"role": "user", "content": f"{number // 2}"}], "row_id": number // 2}
        for number in range(len(sampler.texts))
    ]
    aggregation = Aggregation(names, torch.ones(len(names)), False)
    made = GenerationStep(sampler, Scoring(rewards, "0", parts), aggregation, PhaseClock())
    state = SimpleNamespace(global_step=step)
    return made.sample(rows, Context(state, training=True, group_size=2))


def test_a_part_is_scored_while_the_next_is_sampled():
    scored, calls = threading.Event(), []

    def score(batch):
        calls.append((batch.columns["row_id"], threading.current_thread().name))
        scored.set()
        return [Score(float(ord(text))) for text in batch.texts]

    # The second part is not there before the first has been scored.
    sampler = Texts("abcd", lambda number: number == 0 or scored.wait(PATIENCE_S))
    rollout = sample([reward_of(score)], sampler)
    assert rollout.own_scores() == [[97], [98], [99], [100]]
    assert rollout.completion_ids == [[97], [98], [99], [100]]
    assert calls == [([0, 0], "grpo-scoring"), ([1, 1], "grpo-scoring")]


def test_a_failure_is_raised_where_the_scores_are_needed():
    def fail(batch):
        raise ValueError("the judge is asleep")

    with pytest.raises(RewardError, match=r"own.*the judge is asleep"):
        sample([reward_of(fail)], Texts("abcd"))


def test_what_a_reward_logs_is_kept_for_each_part():
    def score(batch):
        batch.extra["log_metric"]("mood", batch.extra["trainer_state"].global_step)
        batch.extra["log_extra"]("size", [len(batch.texts)])
        return ones(batch)

    rollout = sample([reward_of(score)], Texts("abcd"), step=7)
    calls = [("log_metric", ("mood", 7)), ("log_extra", ("size", [2]))] * 2
    assert rollout.calls == [[*calls, ("log_metric", ("completions/repeated_share", 0.0))]]
    assert rollout.seconds[0] > 0


def test_nothing_more_is_scored_when_sampling_broke_off():
    asked, going_on = [], threading.Event()

    def score(batch):
        asked.append(batch.texts)
        going_on.wait(PATIENCE_S)
        return ones(batch)

    def break_off(number):
        if number:
            raise KeyError("no memory")

    with pytest.raises(KeyError):
        sample([reward_of(score), reward_of(score, "other")], Texts("abcd", break_off))
    going_on.set()
    # The second part of the first batch never came, and its other reward was not called in vain.
    assert asked in ([], [["a", "b"]])


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 9), st.integers(0, 3))
def test_parts_are_whole_groups_and_all_of_the_batch(groups, group, parts, more):
    size = groups * group + more % group
    found = cut(size, group, parts)
    assert [row for part in found for row in range(size)[part]] == list(range(size))
    if size % group:
        assert len(found) == 1
    else:
        sizes = [part.stop - part.start for part in found]
        assert len(sizes) == min(parts, groups)
        assert all(each % group == 0 for each in sizes)
        assert max(sizes) - min(sizes) <= group


OWN = """\
import threading

def plain(completions, answer, log_metric, **kwargs):
    with open("calls.txt", "a") as file:
        print(len(completions), threading.current_thread().name, file=file)
    log_metric("mine", 2.0)
    # By place: alike answers of a group differ in reward, so that there is something to learn.
    return [place % 2 + len(text[0]["content"]) / 100 for place, text in enumerate(completions)]

async def waiting(completions, answer, log_metric, **kwargs):
    return plain(completions, answer, log_metric)
"""


@pytest.mark.slow
def test_the_weights_are_those_of_scoring_afterwards(workshop):
    """At temperature 0: else the parts of a batch draw other random numbers than the whole."""
    runs = {}
    for name, function, parts in (("plain", "plain", 1), ("parts", "waiting", 2)):
        (workshop.folder / "own.py").write_text(OWN)
        (workshop.folder / "calls.txt").unlink(missing_ok=True)
        text = RECIPE.replace(
            '{{kind: regex, pattern: "a", name: has_a}}',
            f"{{{{kind: python, path: own.py:{function}, name: own}}}}",
        ).replace("name: tiny", f"name: {name}")
        sets = [f"generation.sampling_parts={parts}", "generation.temperature=1e-4"]
        flags = [part for each in [*sets, "evaluation.limit=0"] for part in ("--set", each)]
        done = workshop.grpo("train", workshop.write(text), *flags)
        assert done.returncode == 0, done.stderr
        (run,) = (workshop.folder / "runs" / name).iterdir()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        runs[name] = (
            AutoModelForCausalLM.from_pretrained(run / "model").state_dict(),
            [line for line in lines if line["event"] == "train"],
            [
                {key: value for key, value in json.loads(line).items() if key != "time"}
                for line in (run / "completions" / "rank_0.jsonl").open()
            ],
            (workshop.folder / "calls.txt").read_text().splitlines(),
        )
    weights, steps, groups, calls = runs["plain"]
    assert calls == ["4 MainThread"] * 2
    found, records, written, in_parts = runs["parts"]
    assert in_parts == ["2 grpo-scoring"] * 4
    assert written == groups
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    for key in ("reward", "rewards/own/mean", "mine", "completions/repeated_share"):
        assert [each[key] for each in records] == [each[key] for each in steps], key
    assert all(each["rewards/own/seconds"] > 0 for each in records)
