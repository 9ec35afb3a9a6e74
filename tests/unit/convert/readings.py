"""Configs written for these tests after each tool's documented keys, and ways to look at conversions."""

from pathlib import Path

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import write_recipe
from grpo_cli.recipe.loading import load_tree

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def read(name):
    path = CONFIGS / f"{name}.yaml"
    return translate(path.read_text(encoding="utf-8"), path)


def convert(text, dialect=None):
    return translate(text, Path("config.yaml"), dialect)


def write(report, folder):
    """Loads the YAML that is written for a translated config, as a recipe."""
    path = folder / "converted.yaml"
    path.write_text(write_recipe(report, "config.yaml"), encoding="utf-8")
    return load_tree(path)


def reasons(report):
    return {entry.key: entry.note for entry in report.entries if entry.target is None}


def targets(report):
    return {entry.key: entry.target for entry in report.entries if entry.target is not None}


def leaves(node, path=()):
    """Every scalar (and empty or scalar list) of a source with its path."""
    if isinstance(node.value, dict) and node.value:
        for key, child in node.value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(node.value, list) and any(isinstance(each.value, dict) for each in node.value):
        for index, child in enumerate(node.value):
            yield from leaves(child, (*path, index))
    else:
        yield path
