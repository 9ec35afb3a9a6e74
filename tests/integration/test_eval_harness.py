"""Tasks of lm-eval, by the real harness with a task of one's own: by `grpo eval`."""

import importlib.util
import json

import pytest

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
