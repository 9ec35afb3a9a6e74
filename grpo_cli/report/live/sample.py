"""The newest sampled answer in a few lines: what was asked, what was said, and what it scored.

The text is a model's: it is shown as text, whatever it holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo_cli.report.live.terminal import clean_text

_LONGEST = 4_000
"""Characters that are looked at; a terminal has room for no more."""
_LAST_LINES = 2
"""Of an answer that does not fit: they hold what is scored most often."""
_PROMPT_SHARE = 3
"""A prompt may have one line in so many."""


def draw_sample(
    sample: Mapping[str, Any], weights: Mapping[str, float], console: Console, width: int, room: int
) -> list[Text]:
    """The first completion of a sampled group, and others of it where there is room.

    Args:
        sample: A record of `completions/`.
        weights: Of each reward, for the total.
        console: Measures the text.
        width: Columns.
        room: Lines, two at least.
    """
    head = [_fit(_say_place(sample), width, "dim"), _fit(_say_scores(sample, weights, 0), width)]
    room -= len(head)
    if room < 2:
        return head
    asked = _wrap(f"» {_last_message(sample.get('prompt'))}", console, width)
    said = _wrap(f"« {_take(sample.get('completions'), 0)}", console, width)
    shown = min(len(asked), max(room // _PROMPT_SHARE, room - len(said), 1))
    # A question stands at the end of a long prompt.
    asked = asked if len(asked) <= shown else [Text("» …"), *asked[len(asked) - shown + 1 :]]
    drawn = [*head, *_style(asked[:shown], "cyan"), *_shorten(said, room - shown)]
    return [*drawn, *_draw_others(sample, weights, console, width, room + len(head) - len(drawn))]


def _draw_others(
    sample: Mapping[str, Any], weights: Mapping[str, float], console: Console, width: int, room: int
) -> list[Text]:
    """The other completions of the group, each whole, as many as there is room for."""
    lines: list[Text] = []
    for place, text in enumerate(sample["completions"][1:], start=1):
        scores = _fit(_say_scores(sample, weights, place), width)
        said = _wrap(f"« {text}", console, width)
        if len(lines) + len(said) + 2 > room:
            break
        lines += [Text(), scores, *said]
    return lines


def _say_place(sample: Mapping[str, Any]) -> str:
    parts = ["newest sample", f"step {sample.get('step', '?')}"]
    if sample.get("split") == "eval":
        parts.append("held out")
    tokens, clipped = _take(sample.get("tokens"), 0), _take(sample.get("clipped"), 0)
    if isinstance(tokens, int):
        parts.append(f"{tokens} tokens")
    if clipped is True:
        parts.append("cut off")
    return " · ".join(parts)


def _say_scores(sample: Mapping[str, Any], weights: Mapping[str, float], place: int) -> str:
    scores = {name: _take(values, place) for name, values in sample["rewards"].items()}
    known = {name: value for name, value in scores.items() if isinstance(value, int | float)}
    cells = [f"{clean_text(name)} {value:.2f}" for name, value in known.items()]
    cells += [f"{clean_text(name)} –" for name in scores if name not in known]
    if len(scores) > 1 and known and known.keys() <= weights.keys():
        total = sum(weights[name] * value for name, value in known.items())
        cells.insert(0, f"total {total:.2f}")
    return "  ".join(cells)


def _take(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, list) and len(values) > place else None


def _last_message(prompt: Any) -> str:
    if isinstance(prompt, list):
        last = prompt[-1] if prompt else ""
        prompt = last.get("content", "") if isinstance(last, dict) else last
    return str(prompt)


def _wrap(text: str, console: Console, width: int) -> list[Text]:
    """Text in lines that fit; its own lines stay, empty ones go."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}\n…\n{text[-_LONGEST // 2 :]}"
    own = [line for each in text.splitlines() if (line := clean_text(each))]
    return [part for line in own for part in Text(line).wrap(console, max(width, 2))]


def _shorten(lines: Sequence[Text], room: int) -> list[Text]:
    """The beginning and the end of lines of which there are too many."""
    if len(lines) <= room:
        return list(lines)
    if room <= _LAST_LINES + 1:
        return [*lines[: room - 1], Text("…")]
    return [*lines[: room - _LAST_LINES - 1], Text("…"), *lines[-_LAST_LINES:]]


def _style(lines: Sequence[Text], style: str) -> list[Text]:
    return [Text(line.plain, style=style) for line in lines]


def _fit(text: str, width: int, style: str = "") -> Text:
    line = Text(text, style=style)
    line.truncate(width, overflow="ellipsis")
    return line
