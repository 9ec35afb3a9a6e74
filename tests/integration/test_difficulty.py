"""A training that draws prompts by their difficulty, and resumes exactly."""

import pytest

from tests.integration.test_resuming import assert_same, sets, train, workshop_of

RECIPE = """\
name: adaptive
seed: 1
model:
  path: {model}
  dtype: float32
dataset:
  kind: inline
  prompt: {{user: "{{{{ question }}}}"}}
  difficulty: {{kind: adaptive, reward: has_a}}
  rows:
{rows}
rewards:
  - {{kind: regex, pattern: "a", name: has_a}}
  - {{kind: length, target: 4, scale: 0.1}}
  - {{kind: python, path: ./deadly.py:brief, name: brief}}
generation:
  num_generations: 2
  max_completion_length: 8
  dynamic_sampling: {{max_resample: 2}}
training:
  per_device_train_batch_size: 8
  learning_rate: 1e-3
  gradient_checkpointing: false
launch: {{use_cpu: true}}
"""


@pytest.mark.slow
def test_a_killed_run_draws_the_same_prompts(tmp_path, chat_model):
    unbroken = workshop_of(tmp_path / "unbroken", chat_model, text=RECIPE, rows=16)
    train(unbroken, *sets(save_steps=4))
    broken = workshop_of(tmp_path / "broken", chat_model, die_at=5, text=RECIPE, rows=16)
    assert "was killed (signal 9)" in train(broken, *sets(save_steps=4), code=1).stderr
    assert "from step 4" in train(broken, *sets(save_steps=4), "--resume").stderr
    assert_same(broken, unbroken)
    records = list(unbroken.records("train"))
    seen = [record["difficulty/seen"] for record in records]
    assert seen == sorted(seen)
    assert 0 < seen[0] <= seen[-1]
    assert all(0 <= record["difficulty/drawn"] <= 1 for record in records)
