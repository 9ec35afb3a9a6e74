"""A training on two sources with rewards of their own: shares, resume, and everything by source."""

import json
import math

import pytest
import torch

from grpo_cli.recipe.dataset import SOURCE
from grpo_cli.training.rollout.rollout import Aggregation, Context, Rollout
from grpo_cli.training.rollout.step import measure_sources
from tests.integration.test_resuming import assert_same, sets, train, workshop_of

MIXTURE = """\
name: mixed
seed: 1
model:
  path: {model}
  dtype: float32
dataset:
  prompt: {{user: "{{{{ source }}}}: {{{{ question }}}}"}}
  sources:
  - name: counts
    kind: inline
    ratio: 3
    eval_fraction: 0.25
    rewards: [{{kind: length, target: 4, scale: 0.1}}]
    rows:
{rows}
  - name: words
    kind: inline
    rows: [{{question: "spell a", answer: a}}, {{question: "spell b", answer: b}}]
    eval_rows: [{{question: "spell c", answer: c}}, {{question: "spell d", answer: d}}]
    rewards: [{{kind: contains, name: spelled}}]
rewards:
  - {{kind: python, path: ./deadly.py:brief, name: brief}}
generation:
  num_generations: 2
  max_completion_length: 8
training:
  per_device_train_batch_size: 8
  learning_rate: 1e-3
  gradient_checkpointing: false
launch: {{use_cpu: true}}
"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, chat_model):
    workshop = workshop_of(
        tmp_path_factory.mktemp("mixture") / "unbroken", chat_model, text=MIXTURE
    )
    workshop.told = train(workshop, *sets(save_steps=4)).stdout
    return workshop


def test_a_killed_run_on_a_mixture_goes_on_as_if_it_had_not_been(unbroken, tmp_path, chat_model):
    broken = workshop_of(tmp_path / "broken", chat_model, die_at=5, text=MIXTURE)
    done = train(broken, *sets(save_steps=4), code=1)
    assert "was killed (signal 9)" in done.stderr
    done = train(broken, *sets(save_steps=4), "--resume")
    assert "from step 4" in done.stderr
    assert_same(broken, unbroken)


def test_sources_have_their_share_of_every_batch_and_metrics_of_their_own(unbroken):
    for record in unbroken.records("train"):
        # Of four prompts, three and one.
        shares = record["sources/counts/share"], record["sources/words/share"]
        assert shares == (0.75, 0.25)
        rewards = 0.75 * record["sources/counts/reward"] + 0.25 * record["sources/words/reward"]
        assert rewards == pytest.approx(record["reward"], abs=1e-5)
        assert 0 <= record["sources/counts/frac_reward_zero_std"] <= 1
    (path,) = (unbroken.run / "completions").glob("*.jsonl")
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    for group in groups:
        is_words = "words: " in group["prompt"][-1]["content"]
        scores = group["rewards"]
        assert (None in scores["spelled"], None in scores["length_counts"]) == (
            not is_words,
            is_words,
        )
        assert None not in scores["brief"]


def test_held_out_rows_are_measured_by_source(unbroken):
    # A reward of one source is told once.
    assert "held-out accuracy (spelled" in unbroken.told
    assert "held-out reward (counts)" in unbroken.told
    assert "(spelled, words)" not in unbroken.told
    _, after = unbroken.records("measure")
    assert after["prompts"] == 4
    assert after["sources"].keys() == {"counts", "words"}
    assert "accuracy/spelled" in after["sources"]["words"]
    samples = [
        json.loads(line)
        for line in (unbroken.run / "eval" / "after.jsonl").read_text().splitlines()
    ]
    assert sorted(each["source"] for each in samples) == ["counts", "counts", "words", "words"]
    done = unbroken.grpo("eval", unbroken.run, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    metrics = result["subjects"]["final"]["metrics"]
    assert metrics["reward@words"]["prompts"] == metrics["accuracy/spelled@words"]["prompts"] == 2
    assert "reward@counts" in result["differences"]["final"]
    assert unbroken.grpo("report", unbroken.run).returncode == 0
    page = (unbroken.run / "report.html").read_text()
    assert "reward@counts" in page
    assert "sources/words/reward" in page


def test_a_training_row_that_comes_up_twice_in_an_epoch_is_measured_once(unbroken):
    measured = ["--split", "train", "--baseline", "none", "--json"]
    done = unbroken.grpo("eval", unbroken.run, *measured)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    metrics = result["subjects"]["final"]["metrics"]
    assert metrics["reward@words"]["prompts"] == 2
    assert metrics["reward"]["prompts"] == result["data"]["rows"]


def test_a_completion_that_no_reward_scores_has_no_part_in_its_sources_reward():
    rows = [{SOURCE: name} for name in ("counts", "counts", "words", "words")]
    scores = torch.tensor([[1.0], [math.nan], [math.nan], [math.nan]])
    context = Context(None, training=True, group_size=2)
    rollout = Rollout(context, rows, [], [], [], scores=scores, silent=[0, 1])
    aggregation = Aggregation(["right"], torch.ones(1), normalized_first=False)
    metrics = measure_sources(rollout, ("counts", "words"), aggregation)
    assert metrics["sources/counts/reward"] == 1.0
    # TRL drops what is not a number before it takes means.
    assert math.isnan(metrics["sources/words/reward"])
