"""Trainings whose completions are episodes: a tiny model calls a tool and acts in a room."""

import json

import psutil
import pytest
import torch
from safetensors.torch import load_file
from trl import GRPOTrainer

from grpo_cli.training.trainer import RunTrainer
from tests.integration.conftest import Workshop
from tests.integration.test_resuming import assert_same
from tests.tiny_agents import RECIPE, ROOM, make_agent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def agent(once):
    return once("agent", make_agent)


def workshop_of(folder, agent, die_at=None):
    folder.mkdir(exist_ok=True)
    (folder / "room.py").write_text(ROOM)
    if die_at is not None:
        (folder / "die").write_text(str(die_at))
    workshop = Workshop(folder, agent)
    workshop.write(RECIPE)
    return workshop


def train(workshop, *values, code=0, resume=False):
    flags = [part for value in values for part in ("--set", value)]
    run = workshop.process if (workshop.folder / "die").exists() else workshop.grpo
    more = ["--resume"] if resume else []
    done = run("train", workshop.folder / "recipe.yaml", *flags, *more)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def rooms():
    """The processes of rooms that are left."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if each.info["cmdline"] == ["sleep", "1789"]
    ]


def plain_gradient(trainer, batch):
    """TRL's own gradient of a batch, and the sums of the entropies of each row's own tokens."""
    read = GRPOTrainer._get_per_token_logps_and_entropies.__get__(trainer)
    trainer._get_per_token_logps_and_entropies = read
    model, own = trainer.model, batch["completion_mask"] * batch["tool_mask"]
    parts = [
        torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], 1) for of in ("ids", "mask")
    ]
    with torch.no_grad():
        _, entropies, _ = read(model, *parts, own.shape[1], compute_entropy=True)
    GRPOTrainer._compute_loss(trainer, model, batch).backward()
    del trainer._get_per_token_logps_and_entropies
    gradient = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return gradient, (entropies * own).sum(1)


def test_the_gradient_of_episodes_is_trls_and_every_fast_part_stays_on(
    tmp_path, agent, monkeypatch
):
    batches = []
    make_batch = RunTrainer.make_batch

    def keep(self, *arguments):
        batch = make_batch(self, *arguments)
        # In the first step all parts are tried on the model.
        if self.model.training and self.state.global_step == 1:
            batches.append((batch, *plain_gradient(self, batch)))
        return batch

    monkeypatch.setattr(RunTrainer, "make_batch", keep)
    workshop = workshop_of(tmp_path, agent)
    values = ["max_steps=2", "optim=sgd", "learning_rate=1", "max_grad_norm=0", "warmup_steps=0"]
    values += ["lr_scheduler_type=constant", "weight_decay=0", "save_steps=1"]
    train(workshop, *[f"training.{value}" for value in values])
    fast = json.loads((workshop.run / "manifest.json").read_text())["fast"]
    assert (fast["no_signal"], fast["shared_prompts"], fast["sampling"]) == (True, True, True)
    assert fast["left_off"] == {}
    ((batch, gradient, entropies),) = batches
    own = batch["completion_mask"] * batch["tool_mask"]
    assert 0 < own.sum() < batch["completion_mask"].sum()
    torch.testing.assert_close(batch["row_entropy"], entropies, rtol=1e-4, atol=1e-4)
    before, after = (
        load_file(workshop.run / place / "model.safetensors")
        for place in ("checkpoints/checkpoint-1", "model")
    )
    moved = {name: before[name] - after[name] for name in gradient}
    apart = max((gradient[name] - moved[name]).abs().max() for name in gradient)
    largest = max(each.abs().max() for each in gradient.values())
    print(f"largest gradient {largest:.2e}, difference {apart:.2e}")
    assert apart < 1e-5 < 1e-3 < largest


def test_a_run_killed_within_an_episode_goes_on_the_same_and_leaves_no_process(tmp_path, agent):
    dynamic = "generation.dynamic_sampling={max_resample: 2}"
    values = ["training.max_steps=5", "training.save_steps=2", dynamic]
    values.append("rewards=[{kind: environment}]")
    unbroken = workshop_of(tmp_path / "unbroken", agent)
    train(unbroken, *values)
    assert rooms() == []
    broken = workshop_of(tmp_path / "broken", agent, die_at=130)
    done = train(broken, *values, code=1)
    assert "was killed (signal 9)" in done.stderr
    assert rooms() == []
    assert broken.status()["step"] >= 2
    train(broken, *values, resume=True)
    assert_same(broken, unbroken)
    steps = unbroken.records("train")
    for name in ("tools/unknown", "tools/malformed", "tools/add/calls", "episode/reward/as"):
        assert sum(step[name] for step in steps) > 0
    assert all(step["tools/failed"] == step["tools/late"] == 0 for step in steps)
    assert sum(step["dynamic_sampling/resampled_groups"] for step in steps) > 0
    for when in ("before", "after"):
        measured = json.loads((unbroken.run / "eval" / f"{when}.json").read_text())
        assert (measured["prompts"], measured["completions"]) == (4, 4)


def test_processes_whose_episodes_end_at_different_turns_train_together(tmp_path, agent):
    workshop = workshop_of(tmp_path, agent)
    train(workshop, "launch.num_processes=2", "training.per_device_train_batch_size=4")
    assert workshop.status()["state"] == "completed"
    assert [step["step"] for step in workshop.records("train")] == [1, 2, 3, 4]
    turns = []
    for rank in (0, 1):
        lines = (workshop.run / "completions" / f"rank_{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        turns.append([max(e["turns"] for e in record["episodes"]) for record in records])
    assert turns[0] != turns[1]
    assert rooms() == []
