"""Runs that are broken off and go on: the same losses, rewards, answers and weights as one unbroken run."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from grpo_cli.runs.checkpoints import find_trained, whole_checkpoints
from grpo_cli.runs.folder import RunFolder
from tests.forking import ForkedPopen
from tests.integration.conftest import RECIPE, Workshop

# The worker ends by SIGKILL while it scores the answers of a step, once.
DEADLY = """\
import os
import signal
from pathlib import Path

def brief(completions, trainer_state=None, **kwargs):
    wish = Path({wish!r})
    if wish.exists() and trainer_state.global_step >= int(wish.read_text()):
        wish.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return [-0.01 * len(str(completion)) for completion in completions]
"""
# What checkpoints keep beside the trainer's own: a reward with a state, and one that draws random numbers.
STATEFUL = """\
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch

def brief(completions, trainer_state=None, **kwargs):
    wish = Path(__file__).with_name("die")
    end, _, step = wish.read_text().partition(" ") if wish.exists() else ("", "", "0")
    if end and trainer_state.global_step >= int(step):
        wish.unlink()
        if end == "fail":
            raise RuntimeError("the end")
        os.kill(os.getpid(), signal.SIGTERM)
    return [-0.01 * len(str(completion)) for completion in completions]

class Novelty:
    def __init__(self):
        self.seen = {}

    def __call__(self, completions, **kwargs):
        for text in map(str, completions):
            self.seen[text] = self.seen.get(text, 0) + 1
        return [len(text) / len(self.seen) for text in map(str, completions)]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

novelty = Novelty()

def noise(completions, **kwargs):
    return [random.random() + np.random.rand() + torch.rand(()) for _ in completions]
"""
STEPS = 8
NOT_COMPARED = {"time", "step_time", "tokens_per_s"}
TIMES = ("seconds", "_runtime", "_per_second")


DEADLY_RECIPE = RECIPE.replace(
    "rewards:\n", "rewards:\n  - {{kind: python, path: ./deadly.py:brief, name: brief}}\n"
)


def workshop_of(folder, model, die_at=None, text=DEADLY_RECIPE, rows=8):
    """Return a workshop with a recipe whose reward `brief` kills its process at a step."""
    folder.mkdir()
    wish = folder / "die"
    if die_at is not None:
        wish.write_text(str(die_at))
    (folder / "deadly.py").write_text(DEADLY.format(wish=str(wish)))
    workshop = Workshop(folder, model)
    workshop.write(text, rows=rows)
    return workshop


def train(workshop, *flags, steps=STEPS, code=0):
    common = ["--set", f"training.max_steps={steps}", "--set", "logging.log_completions=true"]
    # A worker that is to die is a process of its own.
    run = workshop.process if (workshop.folder / "die").exists() else workshop.grpo
    done = run("train", workshop.folder / "recipe.yaml", *common, *flags)
    assert done.returncode == code, done.stderr
    return done


def sets(**values):
    homes = {"steps_per_generation": "generation"}
    named = [f"{homes.get(key, 'training')}.{key}={value}" for key, value in values.items()]
    return [part for text in named for part in ("--set", text)]


def steps_of(workshop):
    """What every step logged, in order."""
    records = workshop.records("train")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [compared(record) for record in records]


def compared(record):
    """All of a record but the times."""
    return {
        name: value
        for name, value in record.items()
        if not (name in NOT_COMPARED or name.startswith("time/") or name.endswith(TIMES))
    }


def completions_of(workshop):
    found = []
    for path in sorted((workshop.run / "completions").glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            found.append([record[key] for key in ("step", "row", "completions", "rewards")])
    return found


def weights_of(workshop):
    (path,) = (workshop.run / "model").glob("*.safetensors")
    return load_file(path)


def assert_same(broken, unbroken):
    assert steps_of(broken) == steps_of(unbroken)
    assert completions_of(broken) == completions_of(unbroken)
    first, second = weights_of(broken), weights_of(unbroken)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        # Eight prompts, two a step: the checkpoint of step 5 lies in the second epoch.
        pytest.param({"save_steps": 5}, 1, id="second epoch"),
        # One generation feeds four steps, or two: step 3 learns from what step 1 or 2 sampled.
        pytest.param(
            {"save_steps": 3, "steps_per_generation": 4},
            1,
            id="steps per generation",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"save_steps": 3, "num_iterations": 2}, 1, id="iterations", marks=pytest.mark.slow
        ),
        pytest.param(
            {"save_steps": 3, "num_iterations": 2, "per_device_train_batch_size": 2},
            2,
            id="two processes",
            # `test_dynamic_sampling.py` has one that was killed in `make test-all`.
            marks=[pytest.mark.slow, pytest.mark.nightly],
        ),
    ],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, chat_model, settings, processes):
    flags = [*sets(**settings), "--set", f"launch.num_processes={processes}"]
    unbroken = workshop_of(tmp_path / "unbroken", chat_model)
    train(unbroken, *flags)
    broken = workshop_of(tmp_path / "broken", chat_model, die_at=settings["save_steps"] + 1)
    done = train(broken, *flags, code=1)
    assert processes > 1 or "was killed (signal 9)" in done.stderr
    assert broken.status()["state"] == "failed"
    done = train(broken, *flags, "--resume")
    assert f"from step {settings['save_steps']}" in done.stderr
    assert broken.status()["state"] == "completed"
    assert_same(broken, unbroken)
    assert (broken.run / "logs" / "attempt_2" / "worker.log").is_file()
    (record,) = broken.records("resume")
    assert (record["step"], record["attempt"]) == (settings["save_steps"], 2)


def stateful_workshop(folder, model):
    folder.mkdir()
    (folder / "own.py").write_text(STATEFUL)
    named = "".join(
        f"  - {{{{kind: python, path: ./own.py:{name}}}}}\n"
        for name in ("brief", "novelty", "noise")
    )
    workshop = Workshop(folder, model)
    workshop.write(RECIPE.replace("rewards:\n", f"rewards:\n{named}"))
    return workshop


@pytest.mark.parametrize(
    ("end", "settings", "going_on"),
    [
        pytest.param("stop 4", {"save_steps": 99, "eval_strategy": "epoch"}, 4, id="stop"),
        # Six steps are logged by threes, so the fourth is in the sums of the second record alone.
        pytest.param(
            "fail 4",
            {"save_steps": 4, "beta": 0.1, "sync_ref_model": "true", "ref_model_sync_steps": 2},
            4,
            id="failure",
        ),
        pytest.param(
            # The end of an epoch: its evaluation comes before the checkpoint.
            "fail 5",
            {"save_steps": 4, "eval_strategy": "epoch"},
            4,
            id="end of an epoch",
        ),
    ],
)
def test_what_the_trainer_leaves_out_of_a_checkpoint_goes_on_too(
    tmp_path, chat_model, end, settings, going_on
):
    flags = ["train", "recipe.yaml", "--set", "training.max_steps=6", *sets(**settings)]
    flags += ["--set", "logging.logging_steps=3"]
    unbroken = stateful_workshop(tmp_path / "unbroken", chat_model)
    assert unbroken.grpo(*flags).returncode == 0
    broken = stateful_workshop(tmp_path / "broken", chat_model)
    (broken.folder / "die").write_text(end)
    assert broken.grpo(*flags).returncode != 0
    done = broken.grpo(*flags, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"from step {going_on}" in done.stderr
    for event in ("train", "eval", "measure", "end"):
        told = [[compared(each) for each in each.records(event)] for each in (broken, unbroken)]
        # A stopped attempt has an end of its own.
        assert told[0][-1:] == told[1][-1:] if event == "end" else told[0] == told[1]
    first, second = weights_of(broken), weights_of(unbroken)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_that_lacks_what_has_changed_is_refused(tmp_path, chat_model):
    workshop = stateful_workshop(tmp_path / "old", chat_model)
    reference = sets(beta=0.1, sync_ref_model="true", ref_model_sync_steps=2, save_steps=2)
    assert workshop.grpo("train", "recipe.yaml", *reference).returncode == 0
    (checkpoint,) = whole_checkpoints(RunFolder(workshop.run)).values()
    flags = ["train", "recipe.yaml", *reference, *sets(max_steps=3), "--resume"]
    own = workshop.folder / "own.py"
    own.write_text(
        own.read_text()
        .replace("{}", "collections.deque()")
        .replace("import os", "import collections")
    )
    assert "holds objects of other classes" in workshop.grpo(*flags, "--force").stderr
    own.write_text(STATEFUL)
    # As a checkpoint of an earlier version.
    (checkpoint / "process_0.pt").unlink()
    done = workshop.grpo(*flags)
    assert done.returncode == 1
    assert "holds no state of reward 'novelty'" in done.stderr
    (checkpoint / "reference_model.pt").unlink()
    done = workshop.grpo(*flags)
    assert done.returncode == 2
    assert "lacks reference_model.pt" in done.stderr


@pytest.fixture
def copied(full_run, tmp_path, chat_model):
    """A run of two steps, both saved, in a folder of its own."""
    return Workshop.copy(full_run, tmp_path / "copied", chat_model)


def test_a_completed_run_is_left_alone_and_may_be_prolonged(copied):
    before = copied.status()
    done = train(copied, *sets(save_steps=1), "--resume", steps=2)
    assert "nothing to resume" in done.stderr
    assert copied.status() == before
    shutil.rmtree(copied.run / "completions")
    budget = ["--set", "training.fast.max_tokens_per_micro_batch=40"]
    done = train(copied, *budget, *sets(save_steps=1), "--resume", steps=3)
    assert "changed: training.max_steps: 2 → 3" in done.stderr
    assert copied.status()["step"] == 3
    assert len(steps_of(copied)) == 3
    done = train(copied, *sets(save_steps=1), "--resume", steps=1, code=2)
    assert "has done 3 steps, more than `training.max_steps: 1`" in done.stderr


def test_an_earlier_checkpoint_is_named_and_what_came_later_is_kept_aside(copied):
    checkpoint = copied.run / "checkpoints" / "checkpoint-1"
    first = steps_of(copied)
    train(copied, *sets(save_steps=1), "--resume-from", checkpoint, steps=2)
    assert steps_of(copied) == first
    undone = copied.run / "logs" / "attempt_1" / "undone"
    assert (undone / "checkpoints" / "checkpoint-2" / "trainer_state.json").is_file()
    assert (undone / "model" / "config.json").is_file()
    records = [json.loads(line) for line in (undone / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["event"] == "train"] == [2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("training.per_device_train_batch_size=2", "training.per_device_train_batch_size: 4 → 2"),
        ("generation.num_generations=4", "generation.num_generations: 2 → 4"),
        ("dataset.limit=6", "dataset.limit: None → 6"),
        ("launch.num_processes=2", "processes: 1 → 2"),
        ("seed=2", "seed: 1 → 2"),
    ],
)
def test_another_training_is_refused_with_the_difference(copied, change, said):
    before = copied.status()
    done = train(copied, "--set", change, *sets(save_steps=1), "--resume", steps=3, code=2)
    assert said in done.stderr
    assert "--force" in done.stderr
    assert copied.status() == before


def test_a_forced_change_goes_on(copied):
    flags = ["--set", "training.learning_rate=1e-4", *sets(save_steps=1), "--resume"]
    train(copied, *flags, "--force", steps=3)
    assert copied.status()["state"] == "completed"


def test_what_cannot_go_on_is_said(copied, tmp_path):
    flags = [*sets(save_steps=1)]
    newest = copied.run / "checkpoints" / "checkpoint-2"
    (newest / "rng_state.pth").rename(tmp_path / "rng_state.pth")
    assert "rng_state.pth" in train(copied, *flags, "--resume", steps=3, code=2).stderr
    (newest / "optimizer.pt").unlink()
    assert "holds no optimizer" in train(copied, *flags, "--resume", steps=3, code=2).stderr
    # A checkpoint that was torn is passed over.
    (newest / "trainer_state.json").unlink()
    assert "from step 1" in train(copied, *flags, "--resume", steps=3).stderr
    for wrong in (tmp_path, copied.run / "checkpoints" / "checkpoint-9"):
        done = train(copied, *flags, "--resume-from", wrong, steps=3, code=2)
        assert "neither a run folder nor a complete checkpoint" in done.stderr


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["trainer_state.json", "optimizer.pt", "model.safetensors"])
def test_a_checkpoint_that_was_cut_off_is_passed_over(copied, name):
    cut(copied.run / "checkpoints" / "checkpoint-2" / name)
    assert list(whole_checkpoints(RunFolder(copied.run))) == [1]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "status.json",
            '{"state": ',
            "status.json is damaged: it is cut off, or not JSON. Fix: delete it",
        ),
        ("launch/rank_0.pid", "garbage", None),
        ("logs/attempt_x/worker.log", "", None),
        ("manifest.json", "[]", "manifest.json is damaged: it is []"),
    ],
)
def test_a_damaged_folder_goes_on_or_says_what_is_damaged(copied, name, text, said):
    (copied.run / name).parent.mkdir(exist_ok=True)
    (copied.run / name).write_text(text)
    flags = [*sets(save_steps=1), "--resume"]
    # Each of these goes as far as the folder is read.
    steps = 2 if said is None else 3
    done = train(copied, *flags, steps=steps, code=0 if said is None else 2)
    assert "Traceback" not in done.stderr
    assert said is None or said in done.stderr


def test_the_best_model_by_evaluation_is_kept(workshop):
    # Better is always what came later: the rate is high, the task a length.
    recipe = workshop.write(RECIPE.replace("scale: 0.1", "scale: 1"))
    flags = sets(eval_strategy="steps", eval_steps=1, save_steps=99, save_total_limit=1)
    train_flags = ["--set", "training.max_steps=4", *flags]
    assert workshop.grpo("train", recipe, *train_flags).returncode == 0
    rewards = {each["step"]: each["eval_reward"] for each in workshop.records("eval")}
    best = min(step for step, value in rewards.items() if value == max(rewards.values()))
    ((name, path),) = find_trained(RunFolder(workshop.run), "best")
    assert name == f"checkpoint-{best}"
    assert path.is_dir()


def test_without_an_earlier_run_one_is_started(tmp_path, chat_model):
    workshop = workshop_of(tmp_path / "new", chat_model)
    done = train(workshop, "--resume", steps=1)
    assert "no run of tiny in runs: starting one" in done.stderr
    assert workshop.status()["state"] == "completed"


@pytest.mark.slow
def test_two_commands_never_train_into_one_folder(copied):
    recipe = copied.folder / "recipe.yaml"
    flags = ["--set", "training.max_steps=500", *sets(save_steps=1), "--resume"]
    first = ForkedPopen(
        **copied.command("train", recipe, *flags), stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while copied.status()["state"] != "running" and time.monotonic() < deadline:
            time.sleep(0.1)
        done = copied.grpo("train", recipe, *flags)
        assert done.returncode == 2
        assert "another command is training in" in done.stderr
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        first.stderr.close()
