"""Configs as commented YAML: where each value came from beside it, what was left out at the end.

Owns the form of the text, for both directions. What stands in it was decided before.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from grpo_cli.convert.dialects import TOOLS, Dialect
from grpo_cli.convert.key_report import Ledger
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.writing import write_plain

_WIDTH = 100
_SECTIONS = frozenset(
    """model model.lora dataset dataset.prompt generation generation.vllm generation.vllm.server_args
    training training.early_stopping launch logging evaluation""".split()
)
"""Mappings whose keys get comments of their own; others are values."""
_FIRST = {
    "dataset": ("kind", "path", "name", "train", "split", "eval", "eval_split"),
    "model": ("path",),
}


def write_recipe(ledger: Ledger, dialect: Dialect, source: str) -> str:
    """The recipe as YAML.

    Args:
        ledger: The finished account.
        dialect: Whose config it was.
        source: Its file's name.
    """
    article = "an" if dialect in ("open-r1", "axolotl") else "a"
    head = (
        f"From {source}, {article} {TOOLS[dialect]} config, by `grpo convert`. Comments name the key that a "
        "value came from, where it had another name there; what was not taken over stands at the end. Where "
        "no value was given, the defaults of the installed TRL hold, which earlier versions did not share."
    )
    parts = [_comment(head)]
    for key in Recipe.model_fields:
        if key == "seed" and key in ledger.recipe:
            parts[-1] += _write_section(ledger, key)
        elif key in ledger.recipe:
            parts.append(list(_write_section(ledger, key)))
        # Those of single keys stand in their section, if there is one.
        to_do = [
            (target, text)
            for target, text in ledger.to_do.items()
            if target == key or (target.startswith(f"{key}.") and key not in ledger.recipe)
        ]
        parts += [list(_write_to_do(target, text, "")) for target, text in to_do]
    dropped = [(entry.key, entry.note) for entry in ledger.entries if entry.target is None]
    if dropped:
        parts.append(["# Not taken over:", *_list(dropped)])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def write_trl(
    groups: Mapping[str, Mapping[str, Any]], lost: Iterable[tuple[str, str]], source: str
) -> str:
    """TRL's flat config as YAML.

    Args:
        groups: Heading → key → value.
        lost: What TRL's command line cannot express, and what to do about it.
        source: The recipe's file name.
    """
    head = (
        f"From the recipe {source}, by `grpo convert --to trl`. Run it with: trl grpo --config FILE"
    )
    parts = [_comment(head)]
    for heading, values in groups.items():
        if values:
            lines = [line for key, value in values.items() for line in _dump(key, value)]
            parts.append([f"# {heading}", *lines])
    left = list(lost)
    if left:
        parts.append(["# What TRL's command line cannot express:", *_list(left)])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _write_section(ledger: Ledger, key: str) -> Iterator[str]:
    value = ledger.recipe[key]
    if key == "rewards":
        yield f"rewards:{_beside(ledger, key)}"
        for index, entry in enumerate(value):
            yield from _write_reward(ledger.comments.get(f"rewards.{index}"), entry)
    else:
        yield from _write_entry(ledger, key, key, value, "")
    for target, text in ledger.to_do.items():
        if target.startswith(f"{key}."):
            yield from _write_to_do(target, text, "  ")


def _write_entry(ledger: Ledger, target: str, key: str, value: Any, pad: str) -> Iterator[str]:
    if target in _SECTIONS and isinstance(value, dict) and value:
        yield f"{pad}{key}:{_beside(ledger, target)}"
        first = _FIRST.get(target, ())
        for name in [
            *(name for name in first if name in value),
            *(n for n in value if n not in first),
        ]:
            yield from _write_entry(ledger, f"{target}.{name}", name, value[name], f"{pad}  ")
        return
    lines = _dump(key, value)
    comment = _beside(ledger, target)
    if len(lines) == 1 and len(pad + lines[0] + comment) <= _WIDTH + 15:
        yield pad + lines[0] + comment
        return
    if comment:
        yield from _comment(comment.removeprefix("   # "), pad)
    yield from (pad + line for line in lines)


def _dump(key: str, value: Any) -> list[str]:
    compact = isinstance(value, dict | list)
    return write_plain({key: value}, compact=compact).rstrip("\n").split("\n")


def _write_reward(comment: str | None, entry: dict[str, Any]) -> Iterator[str]:
    if comment:
        yield from _comment(comment, "  ")
    lines = write_plain([entry], compact=True).rstrip("\n").split("\n")
    yield from (f"  {line}" for line in lines)


def _write_to_do(target: str, text: str, pad: str) -> Iterator[str]:
    what, *example = text.split("\n")
    yield from _comment(f"TO DO: {target}: {what}{', such as:' if example else ''}", pad)
    yield from (f"{pad}# {_flatten(line)}" for line in example)


def _beside(ledger: Ledger, target: str) -> str:
    comment = ledger.comments.get(target)
    return f"   # {_flatten(comment)}" if comment else ""


def _comment(text: str, pad: str = "") -> list[str]:
    return [f"{pad}# {line}" for line in _wrap(text, _WIDTH - len(pad) - 2)]


def _list(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, reason in items:
        first, *others = _wrap(f"{name}: {reason}", _WIDTH - 6)
        yield f"#   {first}"
        yield from (f"#     {line}" for line in others)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(_flatten(text), width, break_long_words=False, break_on_hyphens=False)


def _flatten(text: str) -> str:
    """The text on one line: values of the source may hold what YAML takes for the end of a comment."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
