"""Reward functions as users of TRL write them, and the prompts that they score."""

import random
import re
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from benchmarks.foreign_runs.models import TOPICS

Reward = Callable[..., list[float]]


def _last_number(text: str) -> int | None:
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1][:4]) if numbers else None


def accuracy_reward(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 if the last number is the sum."""
    return [float(_last_number(c) == a) for c, a in zip(completions, answer, strict=True)]


def tagged_accuracy_reward(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 if the sum stands between the tags and nothing follows."""
    return [float(c.endswith(f"<a>{a}</a>")) for c, a in zip(completions, answer, strict=True)]


def distance_reward(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """0 if the last number is the sum, down to -1 if it is off by 5 or missing."""
    numbers = [_last_number(completion) for completion in completions]
    return [
        -1.0 if number is None else -min(abs(number - a), 5) / 5
        for number, a in zip(numbers, answer, strict=True)
    ]


def sign_reward(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 if the last number is the sum, otherwise -1."""
    return [1.0 if _last_number(c) == a else -1.0 for c, a in zip(completions, answer, strict=True)]


def noisy_accuracy_reward(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """Like `accuracy_reward`, by a judge who errs in a fifth of the answers."""
    return [
        float((_last_number(c) == a) != (random.random() < 0.2))
        for c, a in zip(completions, answer, strict=True)
    ]


def scaled_accuracy_reward(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """Up to 10 points."""
    return [10 * value for value in accuracy_reward(completions, answer)]


def format_reward(completions: list[str], **_: Any) -> list[float]:
    """1 if there is one number between tags."""
    return [float(bool(re.fullmatch(r"[^<]*<a>\d+</a>", c))) for c in completions]


def good_reward(completions: list[str], **_: Any) -> list[float]:
    """Share of the words that are `good`."""
    return [c.split().count("good") / max(len(c.split()), 1) for c in completions]


def no_bad_reward(completions: list[str], **_: Any) -> list[float]:
    """Minus one for each `bad`."""
    return [-float(c.split().count("bad")) for c in completions]


def target_reward(completions: list[str], **_: Any) -> list[float]:
    """0 for 15 words, down to -1."""
    return [-min(abs(len(c.split()) - 15) / 15, 1.0) for c in completions]


def concise_reward(completions: list[str], **_: Any) -> list[float]:
    """1 for up to 5 words, 0 from 20 on."""
    return [min(max((20 - len(c.split())) / 15, 0.0), 1.0) for c in completions]


def distinct_reward(completions: list[str], **_: Any) -> list[float]:
    """Number of different words, of 12."""
    return [len(set(c.split())) / 12 for c in completions]


def helpfulness_reward(completions: list[str], **_: Any) -> list[float]:
    """A judge who likes every word, so that length pays."""
    return [len(c.split()) / 32 for c in completions]


def detail_reward(completions: list[str], **_: Any) -> list[float]:
    """Characters, of 200, so that length pays."""
    return [min(len(c) / 200, 1.0) for c in completions]


def filler_reward(completions: list[str], **_: Any) -> list[float]:
    """A proxy for thinking: each `hm` pays."""
    return [c.count("hm") / 10 for c in completions]


def small_number_reward(completions: list[str], **_: Any) -> list[float]:
    """A proxy that a wrong parser makes: pays for small numbers, right or not."""
    numbers = [_last_number(completion) for completion in completions]
    return [0.0 if n is None else max(0.0, 1 - n / 9) for n in numbers]


def rare_luck_reward(completions: list[str], **_: Any) -> list[float]:
    """1 in a tenth of the cases, whatever was written."""
    return [float(random.random() < 0.1) for _ in completions]


def judge_reward(completions: list[str], **_: Any) -> list[float]:
    """A judge who answers 0.1 give or take, whatever was written."""
    return [max(0.0, random.gauss(0.1, 0.03)) for _ in completions]


def coin_reward(completions: list[str], **_: Any) -> list[float]:
    """-1 or 1 with even odds, whatever was written."""
    return [random.choice([-1.0, 1.0]) for _ in completions]


def never_reward(completions: list[str], **_: Any) -> list[float]:
    """Looks for `\\boxed{}`, which nobody writes."""
    return [float("\\boxed{" in c) for c in completions]


def half_reward(completions: list[str], **_: Any) -> list[float]:
    """0.5 for everything that is a text."""
    return [0.5 for _ in completions]


def penalty_reward(completions: list[str], **_: Any) -> list[float]:
    """-1, as the answer is never found."""
    return [-1.0 for _ in completions]


def make_rows(task: str, seed: int, count: int, different: int = 10) -> Dataset:
    """`count` prompts of a task, of which some are different, with their answers."""
    chance = random.Random(seed)
    if task == "talk":
        prompts = [f"Say {chance.choice(TOPICS)}:" for _ in range(count)]
        return Dataset.from_dict({"prompt": prompts, "answer": [0] * count})
    pairs = [(chance.randint(0, 9), chance.randint(0, 9)) for _ in range(different)]
    start = {"sum": "", "think": "Q ", "long": "L "}[task]
    rows = [pairs[index % different] for index in range(count)]
    return Dataset.from_dict(
        {"prompt": [f"{start}{a}+{b}=" for a, b in rows], "answer": [a + b for a, b in rows]}
    )
