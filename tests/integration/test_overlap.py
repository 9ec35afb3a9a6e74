"""Scoring beside sampling: when it happens, and that nothing else changes by it."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.errors import RewardError
from grpo_cli.fast.completion_reader import build_reader
from grpo_cli.rewards.contract import Batch, RewardParams, Score
from grpo_cli.rewards.scoring import Reward
from grpo_cli.training.reward_functions import EarlyScoring, cut
from tests.integration.conftest import RECIPE

PATIENCE_S = 60
"""Far longer than anything takes here: only what is wrong waits for it."""


class Params(RewardParams):
    """Of a reward that a test makes up."""


@pytest.fixture
def tokenizer(chat_model):
    return AutoTokenizer.from_pretrained(chat_model)


def reward_of(scorer, name="own"):
    return Reward(name, 1.0, "python", Params(), scorer, waits=True)


def ones(batch):
    return [Score(1.0) for _ in batch.completions]


def rows(count):
    return [
        {"prompt": [{"role": "user", "content": f"{place // 2}"}], "row_id": place // 2}
        for place in range(count)
    ]


def completions_of(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def sample(early, tokenizer, texts, draw=None):
    """Has a batch of texts sampled; gives what the trainer then asks rewards about."""
    ids = [tokenizer(text)["input_ids"] for text in texts]
    drawn = draw or (lambda part: (ids[part], None))
    found, chances = early.sample(drawn, build_reader(tokenizer, []), [[1]] * len(ids), 2)
    assert (found, chances) == (ids, None)
    return Batch([], completions_of(texts), ids, extra={"log_metric": None, "log_extra": None})


def test_a_part_is_scored_while_the_next_is_sampled(tokenizer):
    scored, places = threading.Event(), []
    texts = ["a", "b", "c", "d"]
    ids = [tokenizer(text)["input_ids"] for text in texts]

    def score(batch):
        places.append((batch.columns["row_id"], threading.current_thread().name))
        scored.set()
        return [Score(float(ord(text))) for text in batch.texts]

    def draw(part):
        # The second part is not there before the first has been scored.
        assert part.start == 0 or scored.wait(PATIENCE_S)
        return ids[part], None

    reward = reward_of(score)
    early = EarlyScoring([reward], parts=2)
    with early.expecting(rows(4), None):
        batch = sample(early, tokenizer, texts, draw)
        taken = early.take(reward, batch)
    assert [score.value for score in taken.scores] == [97, 98, 99, 100]
    assert places == [([0, 0], "grpo-scoring"), ([1, 1], "grpo-scoring")]
    assert early.take(reward, batch) is None


def test_other_completions_than_were_scored_are_scored_anew(tokenizer):
    reward = reward_of(ones)
    early = EarlyScoring([reward])
    with early.expecting(rows(2), None):
        sample(early, tokenizer, ["a", "b"])
        assert early.take(reward, Batch([], completions_of(["a", "c"]))) is None


def test_a_failure_is_told_where_the_scores_are_needed(tokenizer):
    def fail(batch):
        raise ValueError("the judge is asleep")

    reward = reward_of(fail)
    early = EarlyScoring([reward], parts=2)
    with early.expecting(rows(4), None):
        batch = sample(early, tokenizer, ["a", "b", "c", "d"])
        with pytest.raises(RewardError, match=r"own.*the judge is asleep"):
            early.take(reward, batch)


def test_what_a_reward_logs_arrives_once_and_on_the_trainers_thread(tokenizer):
    def score(batch):
        batch.extra["log_metric"]("mood", batch.extra["trainer_state"].global_step)
        batch.extra["log_extra"]("size", [len(batch.texts)])
        return ones(batch)

    reward, heard = reward_of(score), []
    early = EarlyScoring([reward], parts=2)
    with early.expecting(rows(4), SimpleNamespace(global_step=7)):
        batch = sample(early, tokenizer, ["a", "b", "c", "d"])
        assert heard == []
        for name in ("log_metric", "log_extra"):
            batch.extra[name] = lambda *given: heard.append((*given, threading.current_thread()))
        early.take(reward, batch)
    here = threading.main_thread()
    assert heard == [("mood", 7, here), ("size", [2], here)] * 2


def test_nothing_more_is_asked_when_sampling_broke_off(tokenizer):
    asked, going_on = [], threading.Event()

    def score(batch):
        asked.append(batch.texts)
        going_on.wait(PATIENCE_S)
        return ones(batch)

    early = EarlyScoring([reward_of(score), reward_of(ones, "other")], parts=2)
    ids = [tokenizer(text)["input_ids"] for text in "abcd"]

    def draw(part):
        if part.start:
            raise KeyError("no memory")
        return ids[part], None

    with pytest.raises(KeyError), early.expecting(rows(4), None):
        early.sample(draw, build_reader(tokenizer, []), [[1]] * 4, 2)
    going_on.set()
    with early.expecting(rows(2), None):
        batch = sample(early, tokenizer, ["e", "f"])
        assert early.take(reward_of(ones, "other"), batch).scores == ones(batch)
    # The second part of the first batch never came, and its other reward was not called in vain.
    assert asked in ([["a", "b"], ["e", "f"]], [["e", "f"]])


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
