"""A run whose folder was moved: it resumes, and every command reads it, as if it had always been there."""

import shutil

import pytest
import torch

from tests.integration.conftest import RECIPE, Workshop, with_held_out_rows
from tests.integration.test_resuming import sets, steps_of, weights_of, workshop_of

# The best checkpoint is that of step 4, whose state names the old folder.
BEST = sets(
    eval_strategy="steps",
    eval_steps=4,
    save_steps=4,
    load_best_model_at_end="true",
    metric_for_best_model="eval_reward",
)
DEADLY = "rewards:\n  - {{kind: python, path: ./deadly.py:brief, name: brief}}\n"


def train(workshop, *flags, code=0):
    run = workshop.process if (workshop.folder / "die").exists() else workshop.grpo
    done = run("train", "recipe.yaml", "--set", "training.max_steps=6", *BEST, *flags)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.slow
def test_a_run_that_was_moved_resumes_and_is_read(tmp_path, chat_model):
    text = with_held_out_rows(RECIPE).replace("rewards:\n", DEADLY)
    unbroken = workshop_of(tmp_path / "unbroken", chat_model, text=text)
    train(unbroken)
    broken = workshop_of(tmp_path / "broken", chat_model, die_at=5, text=text)
    train(broken, code=1)
    old = broken.run
    moved = old.parent.parent / "moved" / "elsewhere"
    shutil.copytree(old, moved, symlinks=True)
    shutil.rmtree(old.parent)
    done = train(broken, "--resume-from", moved)
    assert "from step 4" in done.stderr
    assert str(old) not in done.stderr
    assert steps_of(broken) == steps_of(unbroken)
    first, second = weights_of(broken), weights_of(unbroken)
    assert all(torch.equal(first[name], second[name]) for name in first)
    shutil.move(moved, again := tmp_path / "again")
    for command in (
        ("runs", "show", again),
        ("runs", "path", again, "--checkpoint", "best"),
        ("report", again),
        ("diagnose", again),
        ("eval", again, "--limit", "2"),
        ("export", again, "--to", "exported", "--checkpoint", "best"),
    ):
        done = broken.grpo(*command)
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
        assert str(moved) not in done.stdout
        assert done.returncode == 0 or command[0] == "diagnose", done.stderr


@pytest.mark.slow
def test_an_evaluation_of_a_run_that_was_moved_is_resumed(lora_run, tmp_path, chat_model):
    copied = Workshop.copy(lora_run, tmp_path / "copied", chat_model)
    assert copied.grpo("eval", copied.run).returncode == 0
    (result,) = copied.run.glob("eval/*/result.json")
    result.unlink()
    moved = copied.run.rename(tmp_path / "moved")
    done = copied.grpo("eval", moved, "--resume")
    assert done.returncode == 0, done.stderr
    assert str(moved / "eval" / result.parent.name) in done.stderr
    assert [path.parent.name for path in moved.glob("eval/*/result.json")] == [result.parent.name]
