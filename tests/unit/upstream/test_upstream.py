"""The canary: every internal name that we use of another library is still there, with the same parameters.

Reads the installed sources and imports none of them. Where it fails after an upgrade, look at what became of the
name, change what uses it, and note the new version in the library's file.
"""

import ast
import functools
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from grpo_cli.upstream import transformers, trl, vllm

ROOT = Path(__file__).parents[3] / "grpo_cli"
LIBRARIES = {"transformers": transformers, "trl": trl, "vllm": vllm}


def entries(table):
    for library, names in LIBRARIES.items():
        marks = [pytest.mark.vllm, pytest.mark.slow] if library == "vllm" else []
        for path, value in getattr(names, table, {}).items():
            yield pytest.param(path, value, marks=marks, id=path)


@functools.cache
def source(module: str) -> str:
    library, *rest = module.split(".")
    spec = importlib.util.find_spec(library)
    if spec is None:
        pytest.skip(f"{library} is not installed")
    file = Path(spec.submodule_search_locations[0], *rest).with_suffix(".py")
    assert file.is_file(), f"{module} no longer exists"
    return file.read_text(encoding="utf-8")


@functools.cache
def parse(module: str) -> ast.Module:
    return ast.parse(source(module))


def find_class(path: str) -> ast.ClassDef:
    module, name = path.rsplit(".", 1)
    for node in parse(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{path} no longer exists")


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at its top, also inside `if` and `try`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


@pytest.mark.parametrize(("path", "expected"), entries("METHODS"))
def test_a_method_has_the_parameters_it_had(path, expected):
    owner, name = path.rsplit(".", 1)
    methods = {
        node.name: node for node in find_class(owner).body if isinstance(node, ast.FunctionDef)
    }
    assert name in methods, f"{path} no longer exists"
    given = methods[name].args
    extra = [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    found = [each.arg for each in (*given.args[1:], *given.kwonlyargs)] + extra
    assert ", ".join(found) == expected, f"{path} takes other parameters"


@pytest.mark.parametrize(("path", "names"), entries("ATTRIBUTES"))
def test_instances_have_the_attributes_they_had(path, names):
    found = {
        node.attr
        for node in ast.walk(find_class(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert not set(names.split()) - found, f"{path} no longer sets these attributes"


@pytest.mark.parametrize(("path", "names"), entries("NAMES"))
def test_a_module_has_the_names_it_had(path, names):
    assert not set(names.split()) - defined_names(parse(path)), f"{path} no longer has these"


@pytest.mark.parametrize(("path", "strings"), entries("LITERALS"))
def test_metrics_and_endpoints_keep_their_names(path, strings):
    text = source(path)
    assert not [each for each in strings if f'"{each}"' not in text], f"{path} no longer says these"


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_the_version_that_was_read_is_the_installed_one(name):
    assert version(name) == LIBRARIES[name].VERSION


def test_every_private_method_that_is_extended_is_listed():
    listed = {
        path.rsplit(".", 1)[1]
        for names in LIBRARIES.values()
        for path in getattr(names, "METHODS", {})
    }
    extended = {
        name
        for file in ROOT.rglob("*.py")
        for name in re.findall(r"super\(\)\.(_[a-z]\w*)", file.read_text(encoding="utf-8"))
    }
    assert not extended - listed


def test_every_metric_of_trl_that_is_named_is_listed():
    listed = {name for names in trl.LITERALS.values() for name in names}
    named = {
        name
        for file in ROOT.rglob("*.py")
        for name in re.findall(
            r'"((?:completions|clip_ratio|sampling|perf)/[a-z_/]+)"',
            file.read_text(encoding="utf-8"),
        )
    }
    assert not named - listed - {"completions/repeated_share"}


def test_few_methods_of_the_trainer_are_overridden_and_each_once():
    from trl import GRPOTrainer

    from grpo_cli.training.trainer import RunTrainer

    own = [each for each in RunTrainer.__mro__ if each.__module__.startswith("grpo_cli")]
    overridden = [
        name for each in own for name in vars(each) if callable(getattr(GRPOTrainer, name, None))
    ]
    names = [name for name in overridden if not name.startswith("__")]
    assert len(names) == len({*names}), names
    # It may only fall.
    assert len(names) <= 9, names
