"""A small recipe that is right, for tests to spoil."""

from pathlib import Path

GOOD = """\
name: good
model:
  path: tiny
dataset:
  kind: inline
  prompt: {user: "{{ question }}"}
  rows:
    - {question: one, answer: "1"}
    - {question: two, answer: "2"}
    - {question: three, answer: "3"}
    - {question: four, answer: "4"}
rewards:
  - {kind: math, answer: answer}
generation:
  num_generations: 4
  max_completion_length: 8
training:
  per_device_train_batch_size: 4
  max_steps: 2
"""


def write_recipe(folder: Path, text: str = GOOD, name: str = "recipe.yaml") -> Path:
    """Writes a recipe into a folder."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
