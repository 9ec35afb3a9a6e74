"""Held-out sets that are evaluated during training: as `grpo eval` does it, and as if training did not know."""

import json
from types import SimpleNamespace

import numpy
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from grpo_cli.analysis.samples import MetricLog
from grpo_cli.training.measurement import Measurer
from tests.integration.conftest import Workshop
from tests.integration.test_mixture import MIXTURE
from tests.integration.test_resuming import assert_same, compared, sets, train, weights_of

# Ends the worker in a training step, or asks it to stop while it measures for the nth time.
BRIEF = """\
import os
import signal
from pathlib import Path

measured = 0

def brief(completions, trainer_state=None, **kwargs):
    global measured
    wish = Path(__file__).with_name("die")
    end, _, at = wish.read_text().partition(" ") if wish.exists() else ("", "", "0")
    measured += type(trainer_state).__name__ != "TrainerState"
    if end == "kill" and trainer_state.global_step >= int(at):
        wish.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "stop" and measured == int(at):
        wish.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
    return [-0.01 * len(str(completion)) for completion in completions]
"""
DURING = """\
evaluation:
  during:
    - {{every: 2}}
    - {{name: spelling, every: 3, source: words, samples_per_prompt: 4, temperature: 1.0}}
"""
# The lowest reward is the best, since it is not the last.
BEST = sets(save_steps=4, load_best_model_at_end="true", greater_is_better="false")


def workshop_of(folder, model, end="", text=DURING):
    folder.mkdir()
    (folder / "deadly.py").write_text(BRIEF)
    if end:
        (folder / "die").write_text(end)
    workshop = Workshop(folder, model)
    workshop.write(MIXTURE + text)
    return workshop


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, chat_model):
    workshop = workshop_of(tmp_path_factory.mktemp("sets") / "unbroken", chat_model)
    workshop.told = train(workshop, *BEST).stderr
    return workshop


def evaluations_of(workshop):
    """All files of `eval/during/`, and the records, without the times."""
    files = (workshop.run / "eval" / "during").glob("*/*.json")
    results = {
        f"{path.parent.name}/{path.stem}": {**json.loads(path.read_text()), "seconds": 0}
        for path in files
    }
    records = [
        {name: value for name, value in compared(each).items() if not name.endswith("/runtime")}
        for each in workshop.records("eval")
    ]
    return results, records


def test_sets_are_evaluated_as_grpo_eval_does_it(unbroken):
    results, records = evaluations_of(unbroken)
    # Those before and after training are of the first set, and the second has its own.
    assert results.keys() == {
        *(f"held_out/{step}" for step in (2, 4, 6, 8)),
        *(f"spelling/{step}" for step in (0, 3, 6, 8)),
    }
    assert [each["step"] for each in records] == [0, 2, 3, 4, 6, 8]
    at_four = next(each for each in records if each["step"] == 4)
    done = unbroken.grpo("eval", unbroken.run, "--checkpoint", "4", "--baseline", "none", "--json")
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)["subjects"]["checkpoint-4"]["metrics"]
    assert results["held_out/4"]["metrics"] == metrics
    assert at_four["eval_held_out/reward"] == metrics["reward"]["value"]
    spelling = results["spelling/6"]
    assert (spelling["prompts"], spelling["completions"], spelling["temperature"]) == (2, 8, 1.0)
    # All are of one source.
    assert not any("@words" in name for name in spelling["metrics"])
    assert {"pass@2/spelled", "pass@4/spelled", "accuracy/spelled"} <= spelling["metrics"].keys()


def test_training_does_not_depend_on_them(unbroken, tmp_path, chat_model):
    without = workshop_of(tmp_path / "without", chat_model, text="")
    train(without, *sets(save_steps=4))
    records = [[compared(each) for each in each.records("train")] for each in (without, unbroken)]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("end", "going_on", "left"),
    [
        pytest.param("kill 5", 4, "", id="killed", marks=pytest.mark.slow),
        # Both are due at step 6; the request comes during the first, and the second is made up for.
        pytest.param("stop 6", 6, "spelling/6.json", id="stopped while measuring"),
        pytest.param("stop 8", 8, "spelling/8.json", id="stopped while measuring at the end"),
        pytest.param("stop 10", 8, "", id="stopped after training", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_goes_on_has_the_same_numbers(
    unbroken, tmp_path, chat_model, end, going_on, left
):
    broken = workshop_of(tmp_path / "broken", chat_model, end=end)
    train(broken, *BEST, code=1 if "kill" in end else 130)
    if left:
        assert not (broken.run / "eval" / "during" / left).exists()
    done = train(broken, *BEST, "--resume")
    assert f"from step {going_on}" in done.stderr
    assert_same(broken, unbroken)
    results, records = evaluations_of(broken)
    assert results == evaluations_of(unbroken)[0]
    merged = [
        {name: value for each in told if each["step"] == step for name, value in each.items()}
        for told in (records, evaluations_of(unbroken)[1])
        for step in (0, 2, 3, 4, 6, 8)
    ]
    assert merged[:6] == merged[6:]


@pytest.mark.parametrize(
    "end",
    [
        # That it stops is known only when the second set of step 6 is made up for.
        pytest.param("stop 6", id="while measuring"),
        pytest.param("stop 8", id="after training", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_early_stopping_ended_is_not_trained_on(tmp_path, chat_model, end):
    broken = workshop_of(tmp_path / "broken", chat_model, end=end)
    stopping = "{metric: eval_spelling/reward, patience: 1, min_delta: 1000}"
    flags = sets(save_steps=2, early_stopping=stopping)
    train(broken, *flags, code=130)
    done = train(broken, *flags, "--resume")
    assert "stopped early: eval_spelling/reward no longer improved" in done.stdout
    assert broken.records("train")[-1]["step"] == broken.status()["step"] == 6


def test_a_set_decides_on_the_best_checkpoint(unbroken):
    _, records = evaluations_of(unbroken)
    # By default the reward of the first set; the model before the first step is not a checkpoint.
    rewards = {
        each["step"]: each["eval_held_out/reward"]
        for each in records
        if "eval_held_out/reward" in each
    }
    best = min(rewards, key=rewards.__getitem__)
    assert best < max(rewards)
    kept = load_file(unbroken.run / "checkpoints" / f"checkpoint-{best}" / "model.safetensors")
    final = weights_of(unbroken)
    assert all(torch.equal(kept[name], final[name]) for name in kept)
    done = unbroken.grpo("eval", unbroken.run, "--checkpoint", "best", "--json")
    assert f"checkpoint-{best}" in json.loads(done.stdout)["subjects"]


def test_they_are_shown(unbroken):
    assert "step 4 held_out accuracy spelled" in unbroken.told
    assert "spelling accuracy (spelled)" in unbroken.grpo("runs", "show", unbroken.run).stdout
    done = unbroken.grpo("runs", "show", unbroken.run, "--json")
    points = json.loads(done.stdout)["during"]
    assert [each["step"] for each in points["spelling"]] == [0, 3, 6, 8]
    # The measurement before training is of this set too; the one after is of the best model.
    assert [each["step"] for each in points["held_out"]] == [0, 2, 4, 6, 8]
    assert unbroken.grpo("report", unbroken.run).returncode == 0
    assert "eval_spelling/pass@4/spelled" in (unbroken.run / "report.html").read_text()


def test_processes_that_share_vllms_model_draw_the_same_tokens(monkeypatch):
    """Each of a pair samples in its own process, from its own generator (trl 1.16, `mode: colocate`)."""
    seeds = []
    monkeypatch.setattr(Measurer, "_sample", lambda *rest: seeds.append(rest[-1]) or [[]])
    monkeypatch.setattr("grpo_cli.training.measurement.reward_columns", lambda *_: {})
    monkeypatch.setattr("grpo_cli.training.measurement.score_samples", lambda *_: [])
    for process in range(4):
        session = SimpleNamespace(
            recipe=SimpleNamespace(seed=7),
            processes=SimpleNamespace(process_index=process, num_processes=1, device="cpu"),
            heartbeat=SimpleNamespace(beat=lambda: None),
            stop=SimpleNamespace(seen_here=lambda: False),
            show=lambda *_, **__: None,
        )
        vllm = SimpleNamespace(tensor_parallel_size=2)
        measurer = Measurer(session, (), [0], None, vllm=vllm)
        measurer._sample_and_score("", [0], None, None, MetricLog())
    assert seeds == [7, 7, 8, 8]


def test_episodes_that_vllm_samples_leave_the_random_state_of_the_training_alone(monkeypatch):
    """An engine in this process draws from torch's generators, or on a GPU (0.31) from numpy's."""
    model = torch.nn.Linear(1, 1)
    model.device, model.generation_config = torch.device("cpu"), None
    drawn = []
    vllm = SimpleNamespace(
        sync_weights=lambda: None,
        sample_apart=lambda *_, **__: drawn.append((torch.rand(1).item(), numpy.random.rand())),
    )
    monkeypatch.setattr(
        "grpo_cli.environments.player.sample_episodes",
        lambda _, rows, draw, **__: draw(rows, 1) or [],
    )
    session = SimpleNamespace(recipe=None, processes=SimpleNamespace(num_processes=1))
    evaluation = SimpleNamespace(samples_per_prompt=1, temperature=1.0)
    rows = Dataset.from_list([{"prompt": "a"}])
    measurer = Measurer(session, (), rows, evaluation, vllm=vllm)
    for _ in range(2):
        before = torch.get_rng_state(), str(numpy.random.get_state())
        measurer._play(None, "", rows, model, None, seed=5)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert str(numpy.random.get_state()) == before[1]
    assert drawn[0] == drawn[1]
