"""Reward functions of the benchmarks, for both systems, and what both load besides: the replay."""

import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks.training import replay

_NUMBER = re.compile(r"-?\d+")
_LOG = "GRPO_BENCH_COMPLETIONS"
"""A file that completions are written to."""

replay.install(os.environ)


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number is the answer."""
    found = [_NUMBER.findall(_text(completion)) for completion in completions]
    return [float(bool(n) and n[-1] == str(a)) for n, a in zip(found, answer, strict=True)]


def spread(
    completions: list[Any],
    prompts: list[Any],
    silent: list[bool],
    trainer_state: Any = None,
    **_: Any,
) -> list[float]:
    """Another value for each completion of a prompt, whatever it says; all the same where it is silent."""
    if trainer_state is not None:
        # Rewards are tried on made-up answers too, before training.
        _write_down(completions)
    seen: dict[str, int] = {}
    values = []
    for prompt, is_silent in zip(prompts, silent, strict=True):
        key = json.dumps(prompt, sort_keys=True)
        seen[key] = seen.get(key, 0) + 1
        values.append(0.5 if is_silent else seen[key] / 100)
    return values


def _write_down(completions: list[Any]) -> None:
    if path := os.environ.get(_LOG):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(_text(each))}\n" for each in completions)


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])
