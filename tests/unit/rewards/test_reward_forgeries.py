"""Scores of `code` cannot be forged, and right programs get theirs, in every style of tests."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Score
from grpo_cli.rewards.kinds import program_tests
from tests.unit.rewards.forgeries import ARGUABLE, CONTROLS, FORGERIES
from tests.unit.rewards.right_programs import RIGHT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox's limits are Linux's")
runner = pytest.importorskip("grpo_cli.sandbox.runner", exc_type=ImportError)

UNSUPPORTED = {
    "class-test-subclasses": "a test derives a class from one of the program's",
    "class-attributes": "a test reads the `__doc__` of an exception of the program",
    "two-functions-named-builtin": "names of Python's own are not taken from a program",
    "builtins-eval": "so too",
    "init-subclass": "a test derives a class",
    "metaclass-over-subclass": "a test derives a class",
    "test-dataclass-fields": "a program calls `type` of an object of the test",
}
"""Right programs whose tests need more than copies; docs say so."""
TRUSTING = {
    "mutate-to-agree",
    "mutate-identity-arguable",
    "mutate-module-constant-arguable",
}
"""Tests that compare with an argument which the program may change."""


def score(entry):
    _, _, program, tests, params = entry
    compare = {"numbers": "float"}.get(params.get("compare"), params.get("compare", "tokens"))
    tried = program_tests.TestRunner(runner.Limits(seconds=10), "all", compare)
    try:
        return tried.run(program.encode(), program_tests.read_tests(tests, params.get("function")))
    except RewardError as error:
        # A row that no program can pass.
        return Score(0.0, str(error))


def score_all(entries):
    with ThreadPoolExecutor(4) as pool:
        return {
            entry[0]: found for entry, found in zip(entries, pool.map(score, entries), strict=True)
        }


def controls():
    """Right programs for the tests of the forgeries, each once."""
    entries = {
        json.dumps([CONTROLS[name], tests, params.get("function")]): (
            name,
            style,
            CONTROLS[name],
            tests,
            params,
        )
        for name, style, _, tests, params in FORGERIES
        if name in CONTROLS
    }
    return list(entries.values())


def assert_scores(entries, value, exceptions=()):
    scores = score_all(entries)
    wrong = {name: each for name, each in scores.items() if each.value != value}
    assert wrong.keys() == {name for name in exceptions if name in scores}, wrong


def test_forged_programs_score_zero():
    assert_scores(FORGERIES[::16], 0.0, TRUSTING)


def test_right_programs_score_one():
    by_style = {
        style: (name, style, *rest) for name, style, *rest in RIGHT if name not in UNSUPPORTED
    }
    assert len(by_style) >= 10
    assert_scores(list(by_style.values()), 1.0)


@pytest.mark.slow
def test_every_forged_program_scores_zero():
    assert len(FORGERIES) > 900
    assert TRUSTING <= ARGUABLE
    assert_scores(FORGERIES, 0.0, TRUSTING)


@pytest.mark.slow
def test_every_right_program_scores_one():
    assert_scores(RIGHT, 1.0, UNSUPPORTED)
    assert_scores(controls(), 1.0, UNSUPPORTED)
