"""Histories for tests of the rules: made of a few series, or read from real runs.

The files in `unit/analysis/diagnosis/recorded/` are real runs: SmolLM2-135M on the quickstart (`quickstart_…`),
the others the tiny random model of `tests/tiny_models.py` (8 tokens a completion, so most are cut off). Their
first line is the recipe, less its rows and what is a default; the others are the records of their
`metrics.jsonl`, less what no rule reads, rounded to four digits.
"""

import json
from pathlib import Path

from grpo_cli.analysis.diagnosis.diagnosis import RULES, diagnose
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.recipe.recipe import Recipe

RECORDED = Path(__file__).parent / "unit" / "analysis" / "diagnosis" / "recorded"
PLAIN = {
    "name": "plain",
    "model": {"path": "org/model"},
    "dataset": {"kind": "inline", "rows": [{"q": "1"}], "prompt": {"user": "{{ q }}"}},
    "rewards": [{"kind": "math", "answer": "q"}],
    "generation": {"num_generations": 8, "max_completion_length": 100},
    "training": {"max_steps": 100, "learning_rate": 1e-5},
}


def make_recipe(**changes) -> Recipe:
    """A recipe with sections changed or replaced."""
    merged = dict(PLAIN)
    for name, value in changes.items():
        changes_kind = isinstance(value, dict) and "sources" in value
        base = {} if changes_kind else PLAIN.get(name, {})
        merged[name] = {**base, **value} if isinstance(value, dict) else value
    return Recipe.model_validate(merged)


def make_history(series, recipe=None, before=None, after=None, **fields) -> History:
    """A history that logged each series from step 1 on, and measured before and after."""
    history = History(recipe or make_recipe(), **fields)
    for when, measured in (("before", before), ("after", after)):
        if measured:
            history.metrics.extend([{"event": "measure", "when": when, **measured}])
    for step in range(1, max(map(len, series.values())) + 1):
        values = {name: values[step - 1] for name, values in series.items() if len(values) >= step}
        history.metrics.extend([{"event": "train", "step": step, **values}])
    return history


def find(name: str, history: History):
    """What one rule finds; what it raises is not held back, as it is beside a training."""
    return next(rule for rule in RULES if rule.name == name).apply(history)


def find_all(history: History):
    """What every rule finds, by its name."""
    found = [rule.apply(history) for rule in RULES]
    return {symptom.rule: symptom for symptom in found if symptom}


def read_recorded(name: str):
    """A real run's recipe and records."""
    first, *lines = (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return Recipe.model_validate(json.loads(first)["recipe"]), [json.loads(line) for line in lines]


def watch_recorded(name: str):
    """A real run's history, and the symptoms in the order in which they arose."""
    recipe, records = read_recorded(name)
    history, symptoms = History(recipe), {}
    for record in records:
        history.metrics.extend([record])
        for symptom in diagnose(history):
            symptoms.setdefault(symptom.rule, symptom)
    return history, list(symptoms.values())
