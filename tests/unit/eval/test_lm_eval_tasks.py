"""Tasks of lm-eval, with a stand-in for it; `tests/integration/test_eval_harness.py` has the real one."""

import random
import sys
from types import ModuleType

import numpy
import pytest

from grpo_cli.errors import RunError
from grpo_cli.eval import lm_eval_tasks

OF_TASK = {
    "alias": "gsm8k",
    "sample_len": 5,
    "exact_match,strict-match": 0.4,
    "exact_match_stderr,strict-match": 0.1,
    "bleu,none": 3,
    "bleu_stderr,none": "N/A",
}


def score(monkeypatch, evaluate):
    """Scores by a harness that asks the model by `evaluate`."""
    module = ModuleType("lm_eval")
    module.simple_evaluate = evaluate
    module.tasks = ModuleType("lm_eval.tasks")
    module.tasks.TaskManager = lambda **_: "manager"
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", module.tasks)
    return lm_eval_tasks.score_tasks(None, ["gsm8k"], source="m", limit=5, seed=7)


def test_a_task_leaves_no_trace_in_random_numbers_or_on_stdout(monkeypatch, capsys):
    asked = {}

    def evaluate(**options):
        asked.update(options)
        random.seed(0)
        numpy.random.seed(0)
        print("bootstrapping")
        return {
            "results": {"gsm8k": OF_TASK},
            "n-samples": {"gsm8k": {"effective": 5}},
            "higher_is_better": {"gsm8k": {"exact_match": True}},
        }

    states = random.getstate(), numpy.random.get_state()[1].tolist()
    scores = score(monkeypatch, evaluate)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states
    assert capsys.readouterr().out == ""
    assert (asked["tasks"], asked["limit"], asked["random_seed"]) == (["gsm8k"], 5, 7)
    strict = {"value": 0.4, "stderr": 0.1, "higher_is_better": True}
    bleu = {"value": 3.0, "stderr": None, "higher_is_better": None}
    assert scores == {"gsm8k": {"exact_match,strict-match": strict, "bleu,none": bleu}}


def test_a_task_that_fails_is_named_with_the_line(monkeypatch):
    def fail(**_):
        assert not "a choice"

    message = (
        r'failed at gsm8k: AssertionError.* \(test_lm_eval_tasks\.py:\d+: `assert not "a choice"`'
    )
    with pytest.raises(RunError, match=message):
        score(monkeypatch, fail)
