"""The shape of the house: floors, lengths, docstrings that say what a module owns."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "grpo_cli").rglob("*.py"))
FORBIDDEN = {"utils", "helpers", "manager", "misc", "common"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_named_after_a_thing_and_says_what_it_owns(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "no docstring"
    assert path.stem not in FORBIDDEN
    assert len(text.splitlines()) <= 500
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is over 60 lines"


def test_floors_hold():
    script = Path(sys.executable).with_name("lint-imports")
    if not script.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_worker_imports_nothing_of_checks():
    names = {
        alias: path
        for path in MODULES
        if path.relative_to(ROOT).parts[1] in ("train", "training", "fast")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in [getattr(node, "module", None), *(each.name for each in node.names)]
    }
    assert names
    assert not [path for name, path in names.items() if (name or "").startswith("grpo_cli.checks")]


def test_the_order_of_a_training_is_read_on_a_few_pages_and_a_trainer_is_built_whole():
    training = [
        path for path in MODULES if path.parent.name in ("training", "asynchronous", "fast")
    ]
    for path in training:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {ast.unparse(each.value) for each in targets if isinstance(each, ast.Attribute)}
            assert not names & {"trainer", "self._trainer"}, f"{path}:{node.lineno}"
    (run,) = [path for path in training if path.name == "run.py"]
    assert len(run.read_text(encoding="utf-8").splitlines()) <= 250


WORDS = {"message", "seen", "fix", "reason", "detail", "why"}
"""Attributes that hold sentences for people."""
READING = {
    "startswith",
    "endswith",
    "partition",
    "rpartition",
    "replace",
    "split",
    "removeprefix",
    "removesuffix",
}
READ_BACK = 0
"""Places that still read a sentence to find out what it says; may only fall."""


def _is_sentence(node: ast.expr) -> bool:
    """Whether an expression is `x.reason` and its like, also as `(x.reason or "")`, alone or stripped."""
    if isinstance(node, ast.BoolOp):
        return any(map(_is_sentence, node.values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("strip", "lower") and _is_sentence(node.func.value)
    return isinstance(node, ast.Attribute) and node.attr in WORDS


def _reads_back(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.In | ast.NotIn) and _is_sentence(node.comparators[0])
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if isinstance(node.func.value, ast.Name) and node.func.value.id == "re":
        return any(map(_is_sentence, node.args))
    return node.func.attr in READING and _is_sentence(node.func.value)


def test_what_code_needs_to_know_is_a_field_and_not_read_from_a_sentence():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _reads_back(node)
    ]
    assert len(found) <= READ_BACK, found


def test_the_search_for_sentences_that_are_read_finds_them():
    for text in (
        '"Fix" in (a.reason or "")',
        'a.fix.strip().partition("x")',
        're.match("x", a.seen)',
    ):
        assert any(map(_reads_back, ast.walk(ast.parse(text)))), text
    assert not any(map(_reads_back, ast.walk(ast.parse('name in reasons; a.name.partition(".")'))))


def test_the_fix_of_an_error_is_a_field_of_its_own():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"):
                first = ast.unparse(node.args[0]) if node.args else ""
                assert "Fix: " not in first, f"{path}:{node.lineno}"
