"""Answers to try rewards on: the gold in every usual form, and answers that deserve nothing.

Owns their texts. What they score, and what that means, is `trial.py`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from grpo_cli.errors import UsageError
from grpo_cli.templating import bounded_range, environment

REASONING = (
    "First, I read the question and note what is given and what is asked.\n"
    "Next, I work through it step by step, and write down each result.\n"
    "Finally, I check the result against the question once more."
)
"""Stands for a chain of thought; long and stepwise enough for rewards that ask for one."""

_BODIES: Mapping[str, Callable[[str], str]] = {
    "GOLD": str,
    "#### GOLD": lambda gold: f"#### {gold}",
    r"\boxed{GOLD}": lambda gold: rf"\boxed{{{gold}}}",
    "The answer is GOLD.": lambda gold: f"The answer is {gold}.",
    "```json GOLD```": lambda gold: f"```json\n{gold}\n```",
}
_FRAMES: Mapping[str, Callable[[str], str]] = {
    "{}": str,
    "… {}": lambda body: f"{REASONING}\n{body}",
    "<answer>{}</answer>": lambda body: f"<answer>{body}</answer>",
    "<think>…</think> {}": lambda body: f"<think>\n{REASONING}\n</think>\n{body}",
    "<think>…</think> <answer>{}</answer>": lambda body: (
        f"<think>\n{REASONING}\n</think>\n<answer>\n{body}\n</answer>"
    ),
    "…</think> {}": lambda body: f"{REASONING}\n</think>\n{body}",
    "…</think> <answer>{}</answer>": lambda body: (
        f"{REASONING}\n</think>\n<answer>\n{body}\n</answer>"
    ),
}


@dataclass(frozen=True)
class Form:
    """A way to write an answer down."""

    name: str
    """Such as `<think>…</think> #### GOLD`."""
    write: Callable[[str], str]


def all_forms() -> list[Form]:
    """Every form, the simplest first."""
    return [
        Form(frame.format(body), partial(_write, _FRAMES[frame], _BODIES[body]))
        for frame in _FRAMES
        for body in _BODIES
    ]


def _write(frame: Callable[[str], str], body: Callable[[str], str], gold: str) -> str:
    return frame(body(gold))


def wrong_answers(golds: Sequence[str | None]) -> list[str | None]:
    """For each gold another one: that of another row, else the next number; None where there is neither."""
    distinct = list(dict.fromkeys(gold for gold in golds if gold is not None))
    after = dict(zip(distinct, [*distinct[1:], *distinct[:1]], strict=True))
    return [
        None if gold is None else after[gold] if after[gold] != gold else _next_number(gold)
        for gold in golds
    ]


def _next_number(text: str) -> str | None:
    try:
        return str(Decimal(text.replace(",", "")) + 1)
    except InvalidOperation:
        return None


def degenerate_answers(prompts: Sequence[str], longest: int) -> dict[str, list[str]]:
    """Answers that deserve nothing, by name: one a prompt.

    Args:
        prompts: The prompts' texts.
        longest: Words of the longest one, about as many as there are tokens in a completion.
    """
    loop = "let me think again "
    same = {
        "empty": "",
        "tags alone": "<think>\n\n</think>\n<answer>\n\n</answer>",
        "repetition": (loop * (longest // len(loop.split()) + 1)).strip(),
    }
    texts = {name: [text] * len(prompts) for name, text in same.items()}
    return {"the prompt": list(prompts), **texts}


def render_answer(template: str, row: Mapping[str, Any]) -> str:
    """An answer given on the command line, a template over the row.

    Raises:
        UsageError: The template cannot be read, or fails on the row.
    """
    try:
        return environment().from_string(template).render({**row, "range": bounded_range()})
    except Exception as error:  # a user's own template raises anything
        raise UsageError(
            f"--answer {template!r} fails: {error} (columns: {', '.join(row)}). "
            "Fix: write a text, in which {{ name }} stands for a column"
        ) from error
