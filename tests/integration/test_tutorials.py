"""The tutorials' systems, as far as they run without a hub: the shipped recipes themselves, whole."""

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Workshop

ROOT = Path(__file__).parents[2]


def train(workshop, name, made, model, rows):
    flags = [f"model.path={made / model}", f"dataset.train={made / rows}", "launch.use_cpu=true"]
    done = workshop.grpo(
        "train",
        ROOT / "recipes" / "offline" / f"{name}.yaml",
        "--json",
        *[part for flag in flags for part in ("--set", flag)],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_trl_in_practice_runs_end_to_end(tmp_path, made):
    workshop = Workshop(tmp_path, made)
    summary = train(workshop, "zen", made, "tiny-qwen2", "zen.jsonl")
    # 25 prompts in groups of 4, two prompts to a step of 4 completions × 2.
    assert (summary["state"], summary["steps"]) == ("completed", 12)
    (group, *_) = (workshop.run / "completions" / "rank_0.jsonl").read_bytes().splitlines()
    group = json.loads(group)
    for text, reward in zip(group["completions"], group["rewards"]["length"], strict=True):
        assert reward == -abs(20 - len(text))


def test_gpt2_learns_from_scored_answers_and_gives_some(tmp_path, made):
    workshop = Workshop(tmp_path, made)
    summary = train(workshop, "gpt2-scored", made, "tiny-gpt2", "scored.jsonl")
    before, after = summary["before"], summary["after"]
    assert after["accuracy"]["ranking"] > before["accuracy"]["ranking"] + 0.2
    assert after["likelihood_gap"] > before["likelihood_gap"] + 0.3
    assert len(summary["answers"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["length", "format", "problem"])
def test_the_rewards_of_the_course_train(tmp_path, chat_model, name):
    """A step of each, with a tiny model: the recipes' own models take minutes, or come from the hub."""
    workshop = Workshop(tmp_path, chat_model)
    flags = {"model.path": chat_model, "model.dtype": "float32", "training.max_steps": 1}
    done = workshop.grpo(
        "train",
        ROOT / "recipes" / "course" / f"{name}.yaml",
        *[part for key, value in flags.items() for part in ("--set", f"{key}={value}")],
        *("--set", "evaluation.limit=2", "--set", "launch.use_cpu=true"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (record,) = workshop.records("train")
    # What the course watches.
    assert {"reward", "reward_std", "kl"} <= record.keys()
    assert "reward_std" in done.stderr
