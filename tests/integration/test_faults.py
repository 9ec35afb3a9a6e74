"""What goes wrong in the night: a hang, a full disk, a loss that is not a number, memory that runs out."""

import json
import shutil
import signal
import subprocess
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from grpo_cli.errors import RunError
from grpo_cli.training.checkpoints import atomic_dir
from tests.forking import ForkedPopen
from tests.integration.conftest import RECIPE, Workshop
from tests.integration.test_resuming import sets
from tests.integration.test_training import alive_workers

HANGS = """\
import time
    if trainer_state.global_step == 1: time.sleep(600)
    return [0.1 * len(str(each)) for each in completions]"""
ENVIRONMENT = """

class Game:
    def reset(self):
        pass
    def step(self, text):
        return "on", False
"""
REWARD = "rewards:\n  - {{kind: python, path: ./mine.py:f, name: f}}\n"


def write(workshop, body, **changes):
    (workshop.folder / "mine.py").write_text(
        f"def f(completions, trainer_state=None, **kwargs):\n    {body}\n"
    )
    text = RECIPE.replace("rewards:\n", REWARD)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return workshop.write(text)


def test_a_run_that_hangs_is_ended_and_every_stack_is_written_down(workshop):
    recipe = write(workshop, HANGS)
    flags = ["--set", "launch.stall_timeout_s=5", *sets(save_steps=1)]
    done = workshop.process("train", recipe, *flags, "--set", "evaluation.limit=0")
    assert done.returncode == 1
    status = workshop.status()
    assert status["state"] == "failed"
    assert status["reason"].startswith("no progress for 5s while training")
    assert "`launch.stall_timeout_s`" in status["fix"]
    log = (workshop.run / "logs" / "attempt_1" / "worker.log").read_text()
    assert 'mine.py", line' in log
    assert (workshop.run / "checkpoints" / "checkpoint-1" / "trainer_state.json").is_file()


def test_a_second_signal_ends_a_step_that_does_not(workshop):
    recipe = write(workshop, HANGS + ENVIRONMENT)
    with recipe.open("a") as file:
        file.write("environment: {kind: python, path: ./mine.py:Game}\n")
    command = workshop.command("train", recipe)
    process = ForkedPopen(**command, stderr=subprocess.PIPE)
    workshop.wait_for_step(process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "waits for running calls of tools and environments, 10 s at most" in str(said)
    assert workshop.status()["state"] == "stopped"
    assert not list(workshop.run.glob("checkpoints/checkpoint-*"))
    assert alive_workers(workshop.run) == []


RUINOUS = RECIPE.replace("learning_rate: 1e-3", "learning_rate: 1e30")


def test_a_loss_that_is_no_number_ends_the_run_with_its_batch(workshop):
    # One generation for four steps: the second computes with ruined weights before any sampling.
    recipe = workshop.write(RUINOUS)
    done = workshop.grpo("train", recipe, *sets(max_steps=4, steps_per_generation=4))
    assert done.returncode == 1
    assert workshop.status()["reason"].startswith("the loss of step 2 is nan. The batch is kept in")
    kept = torch.load(workshop.run / "bad_batch_0.pt", weights_only=True)
    assert kept["step"] == 2
    assert [len(rows["completion_ids"]) for rows in kept["inputs"]] == [4]
    said = workshop.grpo("diagnose", workshop.run)
    assert said.returncode == 1
    assert "the loss of step 2 is NaN or infinite" in said.stdout


def test_weights_that_are_ruined_are_told_from_the_sampling(workshop):
    done = workshop.grpo("train", workshop.write(RUINOUS), *sets(max_steps=4))
    assert done.returncode == 1
    assert "a lower training.learning_rate" in workshop.status()["fix"]


def test_memory_that_runs_out_comes_with_what_to_change(workshop):
    recipe = write(workshop, 'raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory")')
    assert workshop.grpo("train", recipe).returncode == 1
    status = workshop.status()
    assert status["reason"].endswith("Memory ran out")
    assert status["fix"].startswith("change, in this order,\n  1. training.per_device_train")


@contextmanager
def small_disk(folder, size):
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_too_small_for_a_file_of_weights_is_full(tmp_path):
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    with small_disk(tmp_path / "disk", "3m") as disk:
        partial = disk / "partial"
        partial.mkdir()
        with (
            pytest.raises(RunError, match=r"is full: .*Fix: free some space"),
            atomic_dir(partial),
        ):
            save_file({"weight": torch.zeros(2**20)}, partial / "model.safetensors")
        assert not partial.exists()


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, chat_model):
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    with small_disk(tmp_path / "disk", "3m") as disk:
        workshop = Workshop(disk, chat_model)
        recipe = workshop.write()
        flags = sets(max_steps=60, save_steps=1)
        done = workshop.process("train", recipe, *flags)
        assert done.returncode == 1
        assert "is full: " in workshop.status()["reason"]
        kept = sorted((workshop.run / "checkpoints").glob("checkpoint-*"))
        assert kept
        assert not (workshop.run / "checkpoints" / ".saving").exists()
        for checkpoint in kept:
            state = json.loads((checkpoint / "trainer_state.json").read_text())
            assert state["global_step"] == int(checkpoint.name.rpartition("-")[2])
        # With some room it goes on from there.
        for checkpoint in kept[:-1]:
            shutil.rmtree(checkpoint)
        done = workshop.grpo(
            "train", recipe, *sets(max_steps=len(kept) + 1, save_steps=99), "--resume"
        )
        assert done.returncode == 0, done.stderr
