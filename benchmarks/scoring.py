"""Scores the same 2,000 answers with `math` and with TRL's `accuracy_reward`, side by side.

    python benchmarks/scoring.py [TRAIN.jsonl]

The answers are in the style of GSM8K's, to questions of that file or, without one, to golds made
here: a right and three wrong ones for each, in the five ways models write them. Both get the gold
as a bare number. Prints seconds, the ratio, and what share of the right answers each one accepts.
"""

import contextlib
import io
import json
import logging
import random
import statistics
import sys
import time
from pathlib import Path

from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, RewardContext

ANSWERS = 2000
ROUNDS = 3
FORMS = (
    "First, {a} and {b} are added.\n#### {answer}",
    "So we get {a} + {b}, and \\boxed{{{answer}}}.",
    "<think>{a}, then {b}</think>\n<answer>{answer}</answer>",
    "{a} plus {b} is what is asked. The answer is {answer}.",
    "{a} and {b} make ${answer}$",
)


def read_golds(path: Path | None) -> list[str]:
    """The numbers after `####` of a GSM8K file; numbers like them without one."""
    if path is None:
        chance = random.Random(0)
        return [str(chance.randint(1, 5000)) for _ in range(ANSWERS // 4)]
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["answer"].rpartition("####")[2].strip() for row in rows][: ANSWERS // 4]


def make_answers(golds: list[str]) -> tuple[list[str], list[str], list[bool]]:
    """Answers, their golds, and whether they are right."""
    chance = random.Random(1)
    answers, references, right = [], [], []
    for index, gold in enumerate(golds):
        value = int(gold.replace(",", ""))
        for variant in range(4):
            given = value if variant == 0 else value + chance.choice((-2, -1, 1, 3, 10))
            form = FORMS[(index + variant) % len(FORMS)]
            answers.append(form.format(a=chance.randint(1, 99), b=variant, answer=given))
            references.append(gold)
            right.append(variant == 0)
    return answers, references, right


def measure(score, *arguments):
    """Seconds of the median of a few rounds, and the scores."""
    spent = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        scores = score(*arguments)
        spent.append(time.perf_counter() - started)
    return statistics.median(spent), scores


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    answers, golds, right = make_answers(read_golds(path))
    [reward] = build_rewards([RewardConfig(kind="math")], RewardContext(256))
    batch = Batch([""] * len(answers), answers, columns={"answer": golds})

    from trl.rewards import accuracy_reward

    logging.disable(logging.WARNING)
    messages = [[{"role": "assistant", "content": answer}] for answer in answers]
    reward.score(batch.take(range(8)))
    accuracy_reward(messages[:8], golds[:8])
    ours_s, ours = measure(reward.score, batch)
    with contextlib.redirect_stdout(io.StringIO()):
        theirs_s, theirs = measure(accuracy_reward, messages, golds)

    known = [index for index, is_right in enumerate(right) if is_right]
    wrong = [index for index, is_right in enumerate(right) if not is_right]
    print(f"{len(answers)} answers, {len(known)} of them right; median of {ROUNDS} rounds")
    for name, seconds, scores in (
        ("grpo math", ours_s, [score.value for score in ours]),
        ("TRL accuracy_reward", theirs_s, theirs),
    ):
        accepted = sum(scores[index] == 1 for index in known) / len(known)
        fooled = sum(scores[index] == 1 for index in wrong) / len(wrong)
        print(
            f"  {name:20} {seconds:7.3f} s   right answers accepted {accepted:6.1%}, "
            f"wrong ones {fooled:6.1%}"
        )
    print(f"  TRL takes {theirs_s / ours_s:.0f} times as long")


if __name__ == "__main__":
    main()
