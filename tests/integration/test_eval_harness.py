"""Tasks of lm-eval, by the real harness with a task of one's own: by `grpo eval`, and while a model trains."""

import importlib.util
import json

import pytest

from tests.integration.test_held_out_sets import workshop_of
from tests.integration.test_resuming import compared, sets, train

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)
TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: brier_score, aggregation: brier_score, higher_is_better: false}}
"""
DURING = """\
evaluation:
  during:
    - {{every: 3, task: letters.yaml, limit: 5}}
"""


def write_task(folder):
    rows, task = folder / "rows.jsonl", folder / "letters.yaml"
    entries = [
        {"question": f"letter {n}?", "choices": ["a", "b"], "answer": n % 2} for n in range(6)
    ]
    rows.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    task.write_text(TASK.format(rows=rows))
    return task


@needs_harness
def test_the_harness_scores_every_subject(workshop):
    task = write_task(workshop.folder)
    done = workshop.grpo(
        *("eval", workshop.write(), "--model", workshop.model, "--json"),
        *("--harness", "lm-eval", "--tasks", task),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    harness = json.loads(done.stdout)["harness"]
    assert harness["name"] == "lm-eval"
    assert list(harness["subjects"]) == ["model", "base"]
    score = harness["subjects"]["model"]["letters"]["acc,none"]
    assert 0 <= score["value"] <= 1
    assert score == harness["subjects"]["base"]["letters"]["acc,none"]


@needs_harness
@pytest.mark.slow
def test_a_task_is_evaluated_during_training_as_grpo_eval_does_it(tmp_path, chat_model):
    runs = {}
    for name, during in (("without", ""), ("with", DURING)):
        runs[name] = workshop = workshop_of(tmp_path / name, chat_model, text=during)
        task = write_task(workshop.folder)
        best = sets(metric_for_best_model="eval_letters/acc") if during else []
        train(workshop, *sets(save_steps=3), *best)
    # Training does not depend on it.
    records = [[compared(each) for each in run.records("train")] for run in runs.values()]
    assert records[0] == records[1]
    run = runs["with"]
    logged = {each["step"]: each["eval_letters/acc"] for each in run.records("eval")}
    assert list(logged) == [0, 3, 6, 8]
    done = run.grpo(
        *("eval", run.run, "--checkpoint", "3", "--baseline", "none", "--json", "--limit", "5"),
        *("--harness", "lm-eval", "--tasks", task),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    of_eval = json.loads(done.stdout)["harness"]["subjects"]["checkpoint-3"]["letters"]
    measured = json.loads((run.run / "eval" / "during" / "letters" / "3.json").read_text())
    metrics = measured["metrics"]
    values = {f"{name},none": each["value"] for name, each in metrics.items()}
    assert values == {name: each["value"] for name, each in of_eval.items()}
    half = metrics["acc"]["high"] - metrics["acc"]["value"]
    assert half == pytest.approx(1.96 * of_eval["acc,none"]["stderr"])
    assert logged[3] == metrics["acc"]["value"]
    assert (measured["task"], measured["prompts"]) == (str(task), 5)
    best = max(logged, key=lambda step: (step > 0, logged[step], -step))
    assert f"checkpoint-{best}" in run.grpo("eval", run.run, "--checkpoint", "best").stdout
    shown = run.grpo("runs", "show", run.run).stdout
    assert "letters acc" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--harness", "helm", "--tasks", "x"], "no harness `helm`"),
        (["--harness", "lm-eval"], "needs tasks"),
        (["--tasks", "gsm8k"], "add --harness lm-eval"),
    ],
)
def test_a_harness_that_cannot_run_is_refused_before_anything(workshop, flags, message):
    done = workshop.grpo("eval", workshop.write(), *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (workshop.folder / "evals").exists()
