"""A recipe as YAML again: what differs from the defaults, in the order of the schema.

Owns the form of the text. Comments, `extends` and the writer's own order are not kept.
"""

from typing import Any

import yaml

from grpo_cli.recipe.expect import ExpectConfig
from grpo_cli.recipe.recipe import Recipe


def write_yaml(recipe: Recipe) -> str:
    """The YAML that reads as this recipe, wherever its file lies; long texts as blocks of lines."""
    return write_plain(recipe.model_dump(mode="json", exclude_defaults=True))


def write_plain(value: Any, *, compact: bool = False) -> str:
    """The YAML of plain values, which a recipe's reader and PyYAML both read as these values.

    Args:
        value: Mappings, lists, texts, numbers, truth values and None.
        compact: Whether a list or mapping that holds no other one stands on one line.
    """
    flow = None if compact else False
    return yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=flow,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


def write_expect(expect: ExpectConfig) -> str:
    """The `expect` block as lines for a recipe's end: one metric a line, one fact a line."""
    lines = ["expect:", "  metrics:"]
    metrics = [each.model_dump(mode="json", exclude_defaults=True) for each in expect.metrics]
    lines += [f"    - {_write_line(each)}" for each in metrics]
    if expect.measured:
        told = expect.measured.model_dump(mode="json", exclude_defaults=True)
        lines += ["  measured:"]
        lines += [f"    {name}: {_write_line(_alone(value))}" for name, value in told.items()]
    return "\n".join(lines) + "\n"


def _alone(value: Any) -> Any:
    """Lists of one as their only entry, where the schema reads both."""
    if isinstance(value, dict):
        return {name: _alone(item) for name, item in value.items()}
    alone = isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)
    return value[0] if alone else value


def _write_line(value: Any) -> str:
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
        default_flow_style=True,
    )
    # YAML ends a lone scalar with a line of its own.
    return text.removesuffix("...\n").strip()


class _Dumper(yaml.SafeDumper):
    """Sequences are indented below their key, and texts of several lines written as such."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text.strip("\n") else "'" if _is_number(text) else None
    if style is None and "\n" in text:
        style = '"'
    if not text.replace("\n", "").isprintable():
        # Other separators of lines among them, which every other style would take for such.
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_number(text: str) -> bool:
    """Whether a recipe's reader takes it for one; PyYAML's own rules miss `1e-6`."""
    try:
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _represent_text)
