"""A run as long as one meets: many records of many metrics, many completions, answers before and after.

Made of numbers and words drawn from a seed, fast enough for a test.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder, StatusFile
from tests.run_folders import PLAIN

EVIL = "</script><!--<script>window.pwned=1</script><img src=x onerror=window.pwned=1>\u2028&amp;"
"""What a model may write, and a page must show as it is."""
REWARDS = [
    {"kind": "math", "answer": "q"},
    {"kind": "length", "name": "brevity", "target": 200, "scale": 0.001, "weight": 0.2},
]
_EXTRA = [f"rewards/aspect_{number}/mean" for number in range(12)]
_WORDS = [
    "".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=2 + n % 9))
    for n in range(4000)
]


def make_long_run(
    root: Path, steps: int = 10_000, completions: int = 50_000, words: int = 170, **changes
) -> RunFolder:
    """Writes the folder; the last completion of the first group holds `EVIL`."""
    run = RunFolder(root / "sums" / "long")
    run.evaluations.mkdir(parents=True)
    run.completions.mkdir()
    plain = {**PLAIN, "rewards": REWARDS, "training": {"max_steps": steps}, **changes}
    run.write_recipe(Recipe.model_validate(plain))
    run.recipe.write_text("name: sums\nmodel: {path: org/model}\n")
    write_json(run.manifest, {"seed": 42, "data": {"train_rows": 7000, "eval_rows": 100}})
    run.launch.mkdir()
    write_json(run.plan, {"num_processes": 1, "environment": {"TOKEN": "not-to-be-seen"}})
    draw = random.Random(changes.get("seed", 0))
    run.metrics.write_text("".join(_records(steps, draw)))
    with (run.completions / "rank_0.jsonl").open("w") as file:
        file.writelines(_groups(steps, completions, words, draw))
    for when, chance in (("before", 0.3), ("after", 0.8)):
        _write_measurement(run, when, chance, draw)
    StatusFile(run.status).update(state="completed", step=steps, total_steps=steps)
    return run


def _records(steps: int, draw: random.Random) -> Iterator[str]:
    for step in range(1, steps + 1):
        reward = 0.8 - 0.6 * math.exp(-4 * step / steps) + draw.gauss(0, 0.08)
        noise = {name: round(draw.random(), 5) for name in _EXTRA}
        record = {
            "event": "train", "step": step, "total_steps": steps, "reward": round(reward, 5),
            "reward_std": round(draw.uniform(0.2, 0.4), 5), "rewards/math/mean": round(reward, 5),
            "rewards/math/std": round(draw.uniform(0.2, 0.4), 5), "rewards/brevity/mean": -0.1,
            "rewards/brevity/std": 0.02, "rewards/math/seconds": round(draw.uniform(0.01, 0.03), 5),
            "frac_reward_zero_std": round(draw.random() * 0.5, 3), "loss": draw.gauss(0, 1e-3),
            "entropy": round(1.5 * math.exp(-3 * step / steps) + 0.2 * draw.random(), 5),
            "completions/mean_length": round(200 + 50 * draw.random(), 3),
            "completions/clipped_ratio": round(draw.random() * 0.2, 4),
            "completions/repeated_share": round(draw.random() * 0.1, 4),
            "grad_norm": round(draw.lognormvariate(-1, 0.4), 5), "kl": round(draw.random() * 1e-2, 6),
            "learning_rate": 1e-5 * (1 - step / steps), "step_time": 2.2, "tokens_per_s": 900.0,
            "time/sampling": round(draw.uniform(1.0, 1.4), 4), "time/sync": 0.05,
            "time/scoring": round(draw.uniform(0.1, 0.2), 4), "time/learning": 0.5, **noise,
        }  # fmt: skip
        yield json.dumps(record) + "\n"


def _groups(steps: int, completions: int, words: int, draw: random.Random) -> Iterator[str]:
    groups = completions // 8
    for number in range(groups):
        texts = [" ".join(draw.choices(_WORDS, k=words)) for _ in range(8)]
        if number == 0:
            texts[-1] = EVIL
        scores = [float(draw.random() < 0.3 + 0.5 * number / groups) for _ in texts]
        record = {
            "step": 1 + number * (steps - 1) // max(groups - 1, 1), "split": "train", "row": number,
            "prompt": [
                {"role": "system", "content": "Think, then answer."},
                {"role": "user", "content": f"Sum number {number}: " + " ".join(draw.choices(_WORDS, k=20))},
            ],
            "completions": texts, "tokens": [draw.randint(150, 256) for _ in texts],
            "clipped": [draw.random() < 0.1 for _ in texts],
            "rewards": {"math": scores, "brevity": [-0.1] * 8}, "reasons": {},
        }  # fmt: skip
        yield json.dumps(record) + "\n"


def _write_measurement(run: RunFolder, when: str, chance: float, draw: random.Random) -> None:
    right = [float(draw.random() < chance) for _ in range(100)]
    samples = [
        {
            "group": row, "row": row, "prompt": f"Held-out sum {row}", "text": f"{when} {score}",
            "tokens": 40, "clipped": False, "rewards": {"math": score, "brevity": -0.1}, "reasons": {},
            "failed": [], "answers": {"math": str(score)}, "total": score - 0.02,
        }
        for row, score in enumerate(right)
    ]  # fmt: skip
    lines = "".join(json.dumps(each) + "\n" for each in samples)
    (run.evaluations / f"{when}.jsonl").write_text(lines)
    told = {
        "prompts": 100,
        "accuracy": {"math": sum(right) / 100},
        "temperature": 0.0,
        "seconds": 60,
    }
    write_json(run.evaluations / f"{when}.json", told)
