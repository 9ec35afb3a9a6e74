"""A task of lm-eval during training, with a stand-in for lm-eval; `tests/integration/test_eval_harness.py` has the
real one."""

import json
import random
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

from grpo_cli.errors import UsageError
from grpo_cli.fast import lm_eval_tasks
from grpo_cli.recipe.evaluation import EvaluationConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.training.held_out_sets import TaskMeasurer
from grpo_cli.training.session import Stopped
from tests.run_folders import PLAIN

OF_TASK = {
    "alias": "gsm8k",
    "sample_len": 5,
    "exact_match,strict-match": 0.4,
    "exact_match_stderr,strict-match": 0.1,
    "bleu,none": 3,
    "bleu_stderr,none": "N/A",
}


class Model(torch.nn.Module):
    device = torch.device("cpu")
    generation_config = None

    def __init__(self):
        super().__init__()
        self.embeddings = torch.nn.Embedding.from_pretrained(torch.zeros(2, 2))

    def get_input_embeddings(self):
        return self.embeddings


@pytest.fixture
def harness(monkeypatch):
    """What lm-eval was asked; it seeds all random numbers, prints, and reads two batches."""
    asked = {}

    def simple_evaluate(model, **options):
        asked.update(options, mode=model.training)
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        print("bootstrapping")
        for _ in range(2):
            model.get_input_embeddings()(torch.tensor([1]))
        return asked["outcome"]

    def wrap(pretrained, tokenizer, batch_size):
        asked["batch_size"] = batch_size
        return pretrained

    whole, models, within = (ModuleType(name) for name in ("lm_eval", "models", "huggingface"))
    whole.simple_evaluate, within.HFLM = simple_evaluate, wrap
    modules = {"": whole, ".models": models, ".models.huggingface": within}
    for name, module in modules.items():
        monkeypatch.setitem(lm_eval_tasks.sys.modules, f"lm_eval{name}", module)
    monkeypatch.setattr(lm_eval_tasks, "_open_task_manager", lambda *_: "manager")
    asked["outcome"] = {"results": {"gsm8k": OF_TASK}, "n-samples": {"gsm8k": {"effective": 5}}}
    return asked


def measure(tmp_path, seen_here=lambda: False):
    session = SimpleNamespace(
        folder=RunFolder(tmp_path),
        recipe=Recipe.model_validate({**PLAIN, "seed": 7}),
        processes=SimpleNamespace(is_main_process=True),
        heartbeat=SimpleNamespace(beat=lambda: None),
        stop=SimpleNamespace(seen_here=seen_here),
        show=lambda *_: None,
    )
    evaluation = EvaluationConfig(limit=5, batch_size=3)
    model = Model()
    model.embeddings.eval()
    measurer = TaskMeasurer(session, "gsm8k", evaluation)
    try:
        return measurer.write("during/gsm8k/4", "measuring", model, tokenizer={})
    finally:
        # As before, down to single modules.
        assert model.training
        assert not model.embeddings.training


def draw():
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_a_task_is_measured_without_a_trace_in_the_training(tmp_path, harness, capsys):
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(3)
    expected = draw()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(3)
    result = measure(tmp_path)
    assert draw() == expected
    assert capsys.readouterr().out == ""
    assert (harness["tasks"], harness["limit"], harness["random_seed"]) == (["gsm8k"], 5, 7)
    assert (harness["batch_size"], harness["mode"]) == (3, False)
    assert json.loads((tmp_path / "eval/during/gsm8k/4.json").read_text()) == result
    strict, bleu = result["metrics"].values()
    assert list(result["metrics"]) == ["exact_match,strict-match", "bleu"]
    assert [strict["low"], strict["high"]] == pytest.approx([0.4 - 0.196, 0.4 + 0.196])
    assert (strict["prompts"], bleu["low"]) == (5, None)
    assert bleu["reason"] == "lm-eval gives no standard error"


def test_a_request_to_stop_is_obeyed_between_batches(tmp_path, harness):
    requests = iter([False, True])
    with pytest.raises(Stopped):
        measure(tmp_path, lambda: next(requests))
    assert not (tmp_path / "eval").exists()


def test_a_group_has_its_own_scores_and_a_tag_has_none():
    scores = {"arc": {"acc,none": {}}, "arc_easy": {"acc,none": {}}}
    whole = lm_eval_tasks.TaskScores(scores, ("arc",), 10)
    assert whole.main("arc") is whole.main("arc.yaml") is scores["arc"]
    with pytest.raises(UsageError, match="stands for several tasks"):
        lm_eval_tasks.TaskScores(scores, (), 10).main("arc_tag")
