"""Jobs of Slurm's: the very script, run by stand-ins for its commands, on two "machines" of this one.

And runs with a name of their own, which is what the machines of a job share.
"""

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

from grpo_cli.runs.folder import RunFolder
from tests.forking import ForkedPopen
from tests.integration.conftest import RECIPE, Workshop
from tests.integration.test_resuming import compared, sets, weights_of
from tests.slurm_standin import Cluster

# Slow enough to be asked to stop between two steps.
SLOW = """\
import time

def brief(completions, **kwargs):
    time.sleep(1)
    return [-0.01 * len(str(completion)) for completion in completions]
"""
STEPS = 8
WORLD = "launch: {{use_cpu: true, num_machines: 2, num_processes: 2, slurm: {{time: 60}}}}"


SLOW_REWARDS = "rewards:\n  - {{kind: python, path: ./slow.py:brief, name: brief}}\n"


class Machines(Workshop):
    """A folder from which a job is submitted."""

    def __init__(self, folder, model):
        super().__init__(folder, model)
        self.cluster = Cluster(folder / "slurm")

    @property
    def run(self):
        return self.folder / "runs" / "tiny" / "slurm-7"

    def submit(self, *flags):
        (self.folder / "slow.py").write_text(SLOW)
        text = RECIPE.replace("launch: {{use_cpu: true}}", WORLD)
        text = text.replace("rewards:\n", SLOW_REWARDS)
        done = self.grpo("train", self.write(text), "--slurm", *flags, **self.cluster.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def end(self, job, code=0):
        said, _ = job.communicate(timeout=240)
        assert job.returncode == code, said
        return said

    def compared(self):
        """What every step logged, and every answer of both machines."""
        steps = [compared(each) for each in self.records("train")]
        run, answers = RunFolder(self.run), []
        for rank in (0, 1):
            path = run.machine(rank).completions / f"rank_{rank}.jsonl"
            records = [json.loads(line) for line in path.read_text().splitlines()]
            answers.append([(each["step"], each["row"], each["completions"]) for each in records])
        return steps, answers


def wait_for_step(machines, step, job):
    for _ in range(600):
        assert job.poll() is None, job.communicate()
        metrics = machines.run / "metrics.jsonl"
        if metrics.is_file() and any(each["step"] >= step for each in machines.records("train")):
            return
        time.sleep(0.2)
    pytest.fail("the job trains nothing")


@pytest.mark.slow
def test_a_job_that_reaches_its_time_limit_goes_on_as_if_it_had_not(tmp_path, chat_model):
    settings = sets(max_steps=STEPS, save_steps=5, num_iterations=2, per_device_train_batch_size=2)
    settings += ["--set", "logging.log_completions=true"]
    both = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        both.append(Machines(tmp_path / name, chat_model))
        said = both[-1].submit(*settings)
        assert f"run folder  {both[-1].run}" in said
    unbroken, broken = both
    unbroken.end(unbroken.cluster.start(unbroken.folder))
    assert unbroken.cluster.asked == []

    job = broken.cluster.start(broken.folder, seconds_left=60)
    wait_for_step(broken, 2, job)
    broken.cluster.ask_to_stop(job)
    broken.end(job)
    assert broken.cluster.asked == ["requeue 7"]
    for machine in (RunFolder(broken.run), RunFolder(broken.run).machine(1)):
        assert json.loads(machine.status.read_text())["state"] == "stopped"
    stopped_at = broken.status()["step"]
    assert 2 <= stopped_at < STEPS
    newest = broken.run / "checkpoints" / f"checkpoint-{stopped_at}"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in newest.iterdir()}

    said = broken.end(broken.cluster.start(broken.folder, restarts=1))
    assert said.count(f"from step {stopped_at}") == 2
    assert broken.status()["state"] == "completed"
    assert broken.compared() == unbroken.compared()
    first, second = weights_of(broken), weights_of(unbroken)
    assert all(torch.equal(first[name], second[name]) for name in second)
    run = RunFolder(broken.run)
    assert (run.attempts, run.machine(1).attempts) == (2, 2)
    assert run.machine(1).checkpoints.resolve() == run.checkpoints
    assert sorted(path.name for path in run.checkpoints.iterdir())[-1] == f"checkpoint-{STEPS}"
    # A job that is started once more has nothing left to do.
    assert "nothing to resume" in broken.end(broken.cluster.start(broken.folder, restarts=2))


class Sweep(Machines):
    """A folder from which a sweep is submitted; `run` is the one of its second cell."""

    @property
    def run(self):
        return next(self.folder.glob("runs/tiny/*-2-seed-1"), self.folder / "not started")

    def sweep(self, *arguments):
        done = self.grpo("sweep", *arguments, "--json", **self.cluster.environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def states(self):
        told = self.sweep("--resume", "latest")
        return told, [cell["runs"][0]["state"] for cell in told["cells"]]


@pytest.mark.slow
def test_a_sweep_is_a_job_array_whose_tasks_are_requeued_at_their_time_limit(tmp_path, chat_model):
    (tmp_path / "slow.py").write_text(SLOW)
    array = Sweep(tmp_path, chat_model)
    recipe = array.write(RECIPE.replace("rewards:\n", SLOW_REWARDS))
    grid = ["--grid", "training.learning_rate=1e-3,1e-2", "--seeds", "1,"]
    array.sweep(recipe, *grid, *sets(max_steps=5, save_steps=5), "--slurm")
    array.cluster.queue({0: "RUNNING", 1: "PENDING"})
    assert array.states()[1] == ["running", "waiting"]

    array.end(array.cluster.start(array.folder, task=0))
    job = array.cluster.start(array.folder, task=1, seconds_left=60)
    wait_for_step(array, 2, job)
    array.cluster.ask_to_stop(job)
    array.end(job)
    assert array.cluster.asked == ["requeue 7_1"]
    stopped_at = array.status()["step"]
    assert 2 <= stopped_at < 5
    array.cluster.queue({1: "PENDING"})
    told, states = array.states()
    assert states == ["completed", "waiting"]
    assert told["cells"][1]["runs"][0]["reason"] == f"step {stopped_at}/5"

    said = array.end(array.cluster.start(array.folder, task=1, restarts=1))
    assert f"from step {stopped_at}" in said
    array.cluster.queue({})
    told, states = array.states()
    assert states == ["completed", "completed"]
    written = [
        json.loads((Path(cell["runs"][0]["run"]) / "resolved.json").read_text())["recipe"]
        for cell in told["cells"]
    ]
    assert [recipe["training"]["learning_rate"] for recipe in written] == [1e-3, 1e-2]
    assert all(cell["mean"] for cell in told["cells"])
    assert "<h2>Which is better" in Path(told["page"]).read_text()


def test_a_named_run_is_started_and_goes_on(workshop):
    recipe = workshop.write()
    flags = ["--run-id", "mine", "--resume", *sets(save_steps=1)]
    assert workshop.grpo("train", recipe, *flags).returncode == 0
    assert workshop.run == workshop.folder / "runs" / "tiny" / "mine"
    done = workshop.grpo("train", recipe, *flags, "--set", "training.max_steps=3")
    assert "from step 2" in done.stderr
    assert workshop.status()["step"] == 3
    done = workshop.grpo("train", recipe, *flags[:2])
    assert done.returncode == 2
    assert "mine exists already. Fix: resume it with --resume" in done.stderr


@pytest.mark.slow
def test_a_named_run_that_saved_nothing_starts_over_in_its_folder(workshop):
    recipe = workshop.write()
    flags = ["--run-id", "mine", "--resume", *sets(save_strategy="no")]
    assert workshop.grpo("train", recipe, *flags).returncode == 0
    status = workshop.run / "status.json"
    status.write_text(status.read_text().replace("completed", "failed"))
    done = workshop.grpo("train", recipe, *flags)
    assert done.returncode == 0, done.stderr
    assert [each["step"] for each in workshop.records("train")] == [1, 2]
    assert workshop.status()["state"] == "completed"
    undone = workshop.run / "logs" / "attempt_1" / "undone"
    assert {path.name for path in undone.iterdir()} > {"metrics.jsonl", "model", "status.json"}
    assert (workshop.run / "logs" / "attempt_2" / "worker.log").is_file()


@pytest.mark.slow
def test_machines_without_a_disk_in_common_are_told_so(workshop):
    recipe, started = workshop.write(), []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"num_machines": 2, "num_processes": 2, "main_process_ip": "127.0.0.1"}
    for rank in (0, 1):
        named = {**world, "main_process_port": port, "machine_rank": rank}
        flags = [
            part for key, value in named.items() for part in ("--set", f"launch.{key}={value}")
        ]
        flags += ["--run-id", "mine", "--resume", "--runs", f"disk_{rank}"]
        command = workshop.command("train", recipe, *flags)
        started.append(ForkedPopen(**command, stderr=subprocess.PIPE))
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "a machine does not see the run folder of machine 0" in said
