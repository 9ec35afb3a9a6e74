"""Every kind of reward in one real training: a judge over HTTP, a classifier, programs, limits, conditions."""

import json
from pathlib import Path

import pytest

from grpo_cli.recipe.kinds import added_kinds
from tests.judge_server import JudgeServer, judge_by
from tests.tiny_models import make_tiny_classifier

OWN = """\
import time

def patient(completions, answer, log_metric, **kwargs):
    if answer == ["1"]:
        time.sleep(60)
    log_metric("patience", 0.5)
    return [float(len(text[0]["content"]) > 2) for text in completions]
"""


def count_letters(text):
    return min(sum(letter.isalpha() for letter in text), 10)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """A package is installed that adds the kind `shout`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "reward_package"))
    added_kinds.cache_clear()
    yield
    monkeypatch.undo()
    added_kinds.cache_clear()


@pytest.fixture
def judge():
    server = JudgeServer(judge_by(count_letters))
    yield server
    server.close()


def recipe(workshop, judge, **training):
    (workshop.folder / "own.py").write_text(OWN)
    make_tiny_classifier(workshop.folder / "classifier")
    rows = "\n".join(
        f"    - {{question: 'count {i}', answer: '{i}', task: {['count', 'code'][i % 2]}, "
        f'tests: ["assert f() == {i}"]}}'
        for i in range(4)
    )
    lines = "\n".join(f"  {name}: {value}" for name, value in training.items())
    path = workshop.folder / "rewards.yaml"
    path.write_text(f"""\
name: rewards
seed: 1
model: {{path: {workshop.model}, dtype: float32}}
dataset:
  kind: inline
  prompt: {{user: "{{{{ question }}}}"}}
  rows:
{rows}
rewards:
  - {{kind: math, when: 'task == "count"'}}
  - {{kind: code, when: 'task == "code"', seconds_per_test: 2}}
  - {{kind: model, path: ./classifier, weight: 0.1, clip: [-1, 1]}}
  - {{kind: judge, model: judge, base_url: "{judge.url}", rubric: long, cache: false}}
  - {{kind: python, path: ./own.py:patient, timeout_s: 1, on_error: zero}}
  - {{kind: shout, target: 2}}
generation: {{num_generations: 2, max_completion_length: 8}}
training:
  per_device_train_batch_size: 8
  max_steps: 2
  learning_rate: 1e-3
  gradient_checkpointing: false
{lines}
launch: {{use_cpu: true}}
""")
    return path


# A reward that never ends gets a minute more, as it may be loading.
@pytest.mark.slow
def test_all_of_them_train_together(workshop, judge):
    done = workshop.grpo("train", recipe(workshop, judge))
    assert done.returncode == 0, done.stderr
    groups = [json.loads(line) for line in (workshop.run / "completions" / "rank_0.jsonl").open()]
    assert len(groups) == 8
    for group in groups:
        rewards = group["rewards"]
        counts = group["row"] % 2 == 0
        assert rewards["math" if counts else "code"] == [0.0, 0.0]
        assert rewards["code" if counts else "math"] == [None, None]
        letters = [count_letters(text) / 10 for text in group["completions"]]
        assert rewards["judge"] == pytest.approx(letters)
        assert all(-1 <= value <= 1 for value in rewards["model"])
        capitals = [sum(map(str.isupper, text)) for text in group["completions"]]
        assert rewards["shout"] == [min(1.0, count / 2) for count in capitals]
        if group["row"] == 1:
            assert rewards["patient"] == [0.0, 0.0]
            assert all("took longer than 1 s" in reason for reason in group["reasons"]["patient"])
    records = workshop.records("train")
    assert [record["rewards/patient/error_share"] for record in records] == [0.25, 0.25]
    assert all(record["rewards/patient/seconds"] >= 1 for record in records)
    assert all(record["rewards/judge/seconds"] > 0 for record in records)


@pytest.mark.slow
def test_rewards_may_be_normalized_one_by_one(workshop, judge):
    path = recipe(workshop, judge, multi_objective_aggregation="normalize_then_sum")
    done = workshop.grpo("train", path, "--set", "training.max_steps=1")
    assert done.returncode == 0, done.stderr
    refused = workshop.grpo("check", path, "--set", "training.multi_objective_aggregation=sum")
    assert refused.returncode == 2
    assert "normalize_then_sum" in refused.stderr
