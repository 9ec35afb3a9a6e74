"""Run folders as a training leaves them, for tests of what reads them."""

import json
from pathlib import Path

from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder, StatusFile
from grpo_cli.runs.metrics import append_record


def make_run(tmp_path: Path, rewards=(0.1, 0.2, 0.3)) -> RunFolder:
    """A run of ten steps that has logged some rewards."""
    folder = RunFolder(tmp_path / "name" / "1")
    folder.completions.mkdir(parents=True)
    StatusFile(folder.status).update(state="running", phase="training", total_steps=10, step=3)
    for step, reward in enumerate(rewards, start=1):
        append_record(
            folder.metrics,
            {
                "event": "train",
                "step": step,
                "total_steps": 10,
                "reward": reward,
                "rewards/math/mean": reward,
                "frac_reward_zero_std": 0.25,
                "completions/mean_length": 10.0 + step,
                "completions/clipped_ratio": 0.5,
                "step_time": 2.0,
                "tokens_per_s": 123.4,
            },
        )
    return folder


PLAIN = {
    "name": "sums",
    "model": {"path": "org/model"},
    "dataset": {"kind": "inline", "rows": [{"q": "1"}], "prompt": {"user": "{{ q }}"}},
    "rewards": [{"kind": "math", "answer": "q"}],
    "launch": {"num_processes": 1},
    "training": {"max_steps": 40},
}
"""A recipe as plain values."""


def make_finished_run(
    root: Path,
    seed: int = 42,
    rewards=(0.5,) * 40,
    accuracy: float | None = 0.8,
    state: str = "completed",
    prompts: int = 100,
    warmed: float | None = None,
    **changes,
) -> RunFolder:
    """A run that logged a reward a step, and was measured on some prompts at its end.

    With `warmed`, it had a warm-up, which gave that accuracy.
    """
    if warmed is not None:
        changes["warmup"] = {"answer": "{{ q }}"}
    folder = RunFolder(root / "sums" / f"seed-{seed}")
    folder.evaluations.mkdir(parents=True)
    folder.write_recipe(Recipe.model_validate({**PLAIN, "seed": seed, **changes}))
    write_json(
        folder.manifest,
        {
            "seed": seed,
            "hardware": {"cpus": 2, "memory_gib": 7.8, "machine": "x86_64"},
            "accelerator": {"device": "cpu", "threads": 2},
            "versions": {"trl": "1.16.0", "torch": "2.13.0", "transformers": "5.17.0"},
            "data": {"fingerprint": "0123456789abcdef" * 4},
        },
    )
    for step, reward in enumerate(rewards, start=1):
        append_record(
            folder.metrics, {"event": "train", "step": step, "reward": reward, "loss": 0.0}
        )
    for when, share in (("warmup", warmed), ("after", accuracy)):
        if share is not None:
            told = {"prompts": prompts, "accuracy": {"math": share}, "rewards": {"math": share}}
            write_json(folder.evaluations / f"{when}.json", told)
    StatusFile(folder.status).update(state=state, step=len(rewards), total_steps=40)
    return folder


def play(turns: int = 2, result: str = "36", end: str = "answer") -> tuple[list, dict]:
    """An episode of calls of a calculator: its messages after the prompt, and its record."""
    messages = []
    for turn in range(1, turns):
        call = {"name": "calculate", "arguments": {"text": f"12 * {turn}"}}
        calls = [{"type": "function", "function": call}]
        messages += [
            {"role": "assistant", "content": f"let me see ({turn})", "tool_calls": calls},
            {"role": "tool", "name": "calculate", "content": result},
        ]
    messages.append({"role": "assistant", "content": "It is 36."})
    calls = [["calculate", "failed" if turn == 2 else "", 0.1] for turn in range(1, turns)]
    return messages, {
        "turns": turns,
        "tokens": 9 * turns,
        "end": end,
        "calls": calls,
        "repeated": 0,
        "shortened": 0,
        "tool_s": 0.1 * turns,
        "reward": None,
    }


def write_episodes(run: RunFolder, played: list[tuple[list, dict]], step: int = 1, **more) -> None:
    """Writes one group of a training with these episodes as its completions; `more` replaces parts of it."""
    run.completions.mkdir(exist_ok=True)
    record = {
        "step": step,
        "split": "train",
        "row": 0,
        "prompt": [{"role": "user", "content": "What is 12 * 3?"}],
        "completions": ["It is 36."] * len(played),
        "tokens": [episode.get("tokens", 1) for _, episode in played],
        "clipped": [False] * len(played),
        "rewards": {"math": [float(place % 2) for place in range(len(played))]},
        "messages": [messages for messages, _ in played],
        "episodes": [episode for _, episode in played],
    }
    append_record(run.completions / "rank_0.jsonl", {**record, **more})


def write_samples(
    run: RunFolder,
    scores: dict[str, list[float]] | list[tuple[str, list[float]]],
    when: str = "after",
    rewards=("math",),
) -> None:
    """Writes the samples of a measurement: each prompt's completions with their score."""
    pairs = scores.items() if isinstance(scores, dict) else scores
    samples = [
        {
            "group": row,
            "row": row,
            "prompt": prompt,
            "text": f"it is {score}",
            "tokens": 4,
            "clipped": False,
            "rewards": dict.fromkeys(rewards, score),
            "reasons": {},
            "failed": [],
            "answers": {},
            "total": score,
        }
        for row, (prompt, values) in enumerate(pairs)
        for score in values
    ]
    lines = "".join(json.dumps(each) + "\n" for each in samples)
    (run.evaluations / f"{when}.jsonl").write_text(lines)
