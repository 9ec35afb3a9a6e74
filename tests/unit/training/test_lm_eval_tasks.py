"""A task of lm-eval during training, with a stand-in for lm-eval; `tests/integration/test_eval_harness.py` has the
real one."""

import json
import random
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

from grpo_cli.analysis.metrics import Metric
from grpo_cli.errors import RunError, UsageError
from grpo_cli.fast import lm_eval_tasks
from grpo_cli.recipe.evaluation import EvaluationConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.summary import HeldOutSetSeries
from grpo_cli.runs.folder import RunFolder
from grpo_cli.training.held_out_sets import HeldOutSet, HeldOutSets, TaskMeasurer
from grpo_cli.training.session import Stopped
from tests.run_folders import PLAIN

OF_TASK = {
    "alias": "gsm8k",
    "sample_len": 5,
    "exact_match,strict-match": 0.4,
    "exact_match_stderr,strict-match": 0.1,
    "bleu,none": 3,
    "bleu_stderr,none": "N/A",
    "word_perplexity,none": 30.0,
    "word_perplexity_stderr,none": 1.0,
    "acc,none": 0.9,
    "acc_stderr,none": 0.1,
}
DIRECTIONS = {"exact_match": True, "bleu": True, "word_perplexity": False, "acc": True}


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
    asked["outcome"] = {
        "results": {"gsm8k": OF_TASK},
        "n-samples": {"gsm8k": {"effective": 5}},
        "higher_is_better": {"gsm8k": DIRECTIONS},
    }
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
    strict, bleu, perplexity, share = result["metrics"].values()
    assert list(result["metrics"]) == ["exact_match,strict-match", "bleu", "word_perplexity", "acc"]
    assert [strict["low"], strict["high"]] == pytest.approx([0.4 - 0.196, 0.4 + 0.196])
    assert (strict["prompts"], bleu["low"]) == (5, None)
    assert bleu["reason"] == "lm-eval gives no standard error"
    assert [perplexity["low"], perplexity["high"]] == pytest.approx([30 - 1.96, 30 + 1.96])
    # A share is at most 1.
    assert [share["low"], share["high"]] == pytest.approx([0.9 - 0.196, 1])


def test_a_request_to_stop_is_obeyed_between_batches(tmp_path, harness):
    requests = iter([False, True])
    with pytest.raises(Stopped):
        measure(tmp_path, lambda: next(requests))
    assert not (tmp_path / "eval").exists()


def test_a_task_that_fails_is_named_with_the_line(tmp_path, harness, monkeypatch):
    def fail(**_):
        assert not "a choice"

    monkeypatch.setattr(lm_eval_tasks.sys.modules["lm_eval"], "simple_evaluate", fail)
    message = (
        r'failed at gsm8k: AssertionError.* \(test_lm_eval_tasks\.py:\d+: `assert not "a choice"`'
    )
    with pytest.raises(RunError, match=message):
        measure(tmp_path)


@pytest.mark.parametrize(
    ("training", "greater"),
    [({}, False), ({"greater_is_better": True}, True), ({"metric": "acc"}, True)],
)
def test_the_best_checkpoint_has_the_lowest_perplexity(tmp_path, harness, training, greater):
    result = measure(tmp_path)
    metric = f"eval_gsm8k/{training.pop('metric', 'word_perplexity')}"
    during = [{"every": 2, "task": "gsm8k"}]
    training = {"metric_for_best_model": metric, "load_best_model_at_end": True, **training}
    recipe = {**PLAIN, "training": training, "evaluation": {"during": during}}
    session = SimpleNamespace(
        recipe=Recipe.model_validate(recipe),
        folder=SimpleNamespace(evaluations=tmp_path / "none"),
        processes=SimpleNamespace(is_main_process=True),
    )
    config = session.recipe.evaluation.during[0]
    measurer = SimpleNamespace(rewards=(), write=lambda *_: result)
    trainer = SimpleNamespace(
        model=None,
        tokenizer=None,
        args=SimpleNamespace(greater_is_better=training.get("greater_is_better", True)),
    )
    sets = HeldOutSets(session, trainer, [])
    sets._measure(HeldOutSet(config, measurer, at_ends=True), 2)
    assert trainer.args.greater_is_better is greater
    values = {2: 30.0, 4: 40.0, 6: 35.0}
    points = {
        step: {"word_perplexity": Metric(each, None, None, 5)} for step, each in values.items()
    }
    series = HeldOutSetSeries(
        points, result, greater_is_better=training.get("greater_is_better"), decides=metric[11:]
    )
    lowest = training.get("greater_is_better") is None
    assert series.find_best("word_perplexity") == ((2, 30.0) if lowest else (4, 40.0))


def test_a_group_has_its_own_scores_and_a_tag_has_none():
    scores = {"arc": {"acc,none": {}}, "arc_easy": {"acc,none": {}}}
    whole = lm_eval_tasks.TaskScores(scores, ("arc",), 10)
    assert whole.main("arc") is whole.main("arc.yaml") is scores["arc"]
    with pytest.raises(UsageError, match="stands for several tasks"):
        lm_eval_tasks.TaskScores(scores, (), 10).main("arc_tag")
