"""The warm-up: what it teaches, what GRPO begins with, and that it goes on where it was cut off."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from grpo_cli.checks.recipe import check_recipe
from tests.forking import ForkedPopen
from tests.integration.conftest import LORA, RECIPE, Workshop, with_held_out_rows
from tests.tiny_agents import CALL, ROOM, WORDS, make_agent
from tests.tiny_agents import RECIPE as AGENT

ADAPTER = "adapter_model.safetensors"
PROMPT = '{user: "{{ question }}"}'
TURNS = {"answer": [CALL, "a"], "learning_rate": 1e-2, "num_train_epochs": 20}
BEST = "warmup: {{best_of: 4, learning_rate: 1e-2}}\n"


def text_of(warmup, *, lora=True):
    text = with_held_out_rows(RECIPE).replace("dtype: float32", LORA if lora else "dtype: float32")
    text = text.replace("max_completion_length: 8", "max_completion_length: 24")
    return text.replace("max_steps: 2", "max_steps: 2\n  beta: 0.1") + warmup


# Scores depend on all that it has scored before, in training.
NOVELTY = """\
class Novelty:
    def __init__(self):
        self.seen = {}

    def __call__(self, completions, **kwargs):
        texts = [str(completion) for completion in completions]
        for text in texts:
            self.seen[text] = self.seen.get(text, 0) + 1
        return [len(text) / len(self.seen) for text in texts]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

novelty = Novelty()
"""


def written(answer="<{{ answer }}>", **settings):
    values = {"answer": answer, "learning_rate": 1e-2, "num_train_epochs": 12, **settings}
    return f"warmup: {json.dumps(values)}\n".replace("{", "{{").replace("}", "}}")


def test_the_form_of_the_answers_is_learned_and_grpo_begins_there(workshop):
    (workshop.folder / "novelty.py").write_text(NOVELTY)
    own = "rewards:\n  - {{kind: python, path: ./novelty.py:novelty, weight: 0.1}}\n"
    text = text_of(written()).replace("rewards:\n", own)
    recipe = workshop.write(text, rows=24)
    done = workshop.grpo("train", recipe, "--set", "training.save_steps=1")
    assert done.returncode == 0, done.stderr
    run = workshop.run
    stages = {}
    for when in ("before", "warmup", "after"):
        lines = (run / "eval" / f"{when}.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        stages[when] = sum(text.startswith("<") and text.endswith(">") for text in texts)
    assert stages["before"] == 0
    assert min(stages["warmup"], stages["after"]) == 12
    losses = [each["loss"] for each in workshop.records("warmup") if "loss" in each]
    assert losses[-1] < 0.7 * losses[0]
    # The reference of beta is the model as GRPO found it.
    kl = [record["kl"] for record in workshop.records("train")]
    assert abs(kl[0]) <= 1e-6 < kl[-1]
    examples = [
        json.loads(line) for line in (run / "warmup/examples.jsonl").read_text().splitlines()
    ]
    assert [each["text"] for each in examples[:2]] == ["<0>", "<1>"]
    begun, end = (load_file(folder / ADAPTER) for folder in (run / "warmup/model", run / "model"))
    assert begun.keys() == end.keys()
    assert 0 < max(float((end[name] - begun[name]).abs().max()) for name in end) < 0.02

    # A run that ended before its first checkpoint keeps the warm-up, and ends in the same weights.
    shutil.rmtree(run / "checkpoints")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "failed"}))
    resumed = workshop.grpo("train", recipe, "--set", "training.save_steps=1", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    again = load_file(run / "model" / ADAPTER)
    assert all(torch.equal(again[name], end[name]) for name in end)
    assert len([each for each in workshop.records("warmup") if "loss" in each]) == len(losses)

    measured = workshop.grpo("eval", run, "--json")
    assert measured.returncode == 0, measured.stderr
    assert [*json.loads(measured.stdout)["subjects"]] == ["final", "warmup", "base"]
    shown = json.loads(workshop.grpo("runs", "show", run, "--json").stdout)
    assert shown["warmup"]["prompts"] == 12


def test_all_weights_learn_from_the_best_completions(workshop):
    recipe = workshop.write(text_of(BEST, lora=False), rows=24)
    done = workshop.grpo("train", recipe)
    assert done.returncode == 0, done.stderr
    examples = [
        json.loads(line)
        for line in (workshop.run / "warmup/examples.jsonl").read_text().splitlines()
    ]
    assert 0 < len(examples) < 24
    assert len({each["row"] for each in examples}) == len(examples)
    assert abs(workshop.records("train")[0]["kl"]) <= 1e-6
    before, after = (
        json.loads((workshop.run / f"eval/{when}.json").read_text())
        for when in ("before", "warmup")
    )
    assert after["reward"] > before["reward"]


@pytest.mark.slow
def test_a_call_is_learned_from_whole_episodes_and_only_the_models_turns(tmp_path, once):
    (tmp_path / "room.py").write_text(ROOM)
    workshop = Workshop(tmp_path, once("agent", make_agent))
    rows = [{"question": f"a {number}"} for number in range(12)]
    own = f"dataset: {json.dumps({'kind': 'inline', 'rows': rows, 'eval_rows': rows[:4]})[:-1]}, prompt: {PROMPT}"
    text = AGENT.format(model=workshop.model)
    lines = [line for line in text.splitlines() if not line.startswith(("dataset", "environment"))]
    text = "\n".join([*lines, own + "}", f"warmup: {json.dumps(TURNS)}", ""])
    recipe = workshop.folder / "recipe.yaml"
    recipe.write_text(text.replace("{kind: environment}, ", ""))
    done = workshop.grpo("train", recipe)
    assert done.returncode == 0, done.stderr
    example = json.loads((workshop.run / "warmup/examples.jsonl").read_text().splitlines()[0])
    own = [token for token, mine in zip(example["token_ids"], example["mask"], strict=True) if mine]
    # The call and the answer, each with its end; the result `a a a` in between is not learned.
    assert own == [WORDS.index(CALL), 1, WORDS.index("a"), 1]
    assert len(example["token_ids"]) > len(own) + 3
    calls = [
        json.loads((workshop.run / f"eval/{when}.json").read_text())["calls"]
        for when in ("before", "warmup")
    ]
    assert calls[1] > calls[0]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGKILL, 1), (signal.SIGINT, 2)])
def test_a_warm_up_that_was_cut_off_goes_on_as_if_it_had_not_been(workshop, number, processes):
    recipe = workshop.write(text_of(written(num_train_epochs=40)), rows=24)
    flags = ["--set", f"launch.num_processes={processes}", "--run-id"]
    # Each in processes of its own, which use as many threads.
    undisturbed = workshop.process("train", recipe, *flags, "whole")
    assert undisturbed.returncode == 0, undisturbed.stderr
    command = workshop.command("train", recipe, *flags, "cut")
    process = ForkedPopen(**command, start_new_session=True, stderr=subprocess.PIPE)
    cut = workshop.folder / "runs/tiny/cut"
    deadline = time.monotonic() + 180
    while not [*(cut / "warmup/checkpoints").glob("checkpoint-*")]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = [int(file.read_text()) for file in (cut / "launch").glob("*.pid")]
    for pid in (process.pid, *(workers if number == signal.SIGKILL else ())):
        os.kill(pid, number)
    _, said = process.communicate()
    assert not (cut / "warmup/model").exists()
    if number == signal.SIGINT:
        step = int(re.search(r"stopped after step (\d+) of the warm-up, which is saved", said)[1])
        assert (cut / f"warmup/checkpoints/checkpoint-{step}").is_dir()
    resumed = workshop.process("train", recipe, *flags, "cut", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    for part in ("warmup/model", "model"):
        whole, again = (
            load_file(workshop.folder / "runs/tiny" / name / part / ADAPTER)
            for name in ("whole", "cut")
        )
        assert all(torch.equal(whole[name], again[name]) for name in whole), part


# Process 1 samples until the run is asked to stop, and process 0 waits for it.
LATE = """\
import os
import time
from pathlib import Path
from grpo_cli.training import examples

sample = examples.sample_completions

def sample_late(*arguments, on_progress, **options):
    found, here = sample(*arguments, on_progress=on_progress, **options), Path(__file__).parent
    (here / os.environ["RANK"]).touch()
    while os.environ["RANK"] == "1" and not [*here.glob("runs/*/*/launch/stop")]:
        time.sleep(0.1)
    on_progress(1, 1)
    return found

examples.sample_completions = sample_late

def spread(completion_ids, **_):
    return [sum(ids) for ids in completion_ids]
"""


@pytest.mark.slow
def test_processes_stop_together_while_they_sample(workshop):
    (workshop.folder / "late.py").write_text(LATE)
    reward = "rewards:\n  - {{kind: python, path: ./late.py:spread}}\n"
    recipe = workshop.write(text_of(BEST).replace("rewards:\n", reward), rows=8)
    flags = ["--set", "launch.num_processes=2", "--set", "evaluation.limit=0"]
    command = workshop.command("train", recipe, *flags)
    process = ForkedPopen(**command, start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not all((workshop.folder / rank).exists() for rank in "01"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert workshop.status()["state"] == "stopped", said


def test_completions_that_are_all_cut_off_have_nothing_to_teach(workshop):
    text = text_of(BEST).replace("max_completion_length: 24", "max_completion_length: 1")
    done = workshop.grpo("train", workshop.write(text))
    assert done.returncode == 1
    assert "there is nothing to choose. Fix: write what the model should learn" in done.stderr


@pytest.mark.parametrize(
    ("warmup", "more", "path", "seen"),
    [
        ("warmup: {{}}\n", {}, "warmup", "needs either `answer` or `best_of`"),
        (
            written("<{{ anser }}>"),
            {},
            "warmup.answer",
            "names `anser`, which is not a column",
        ),
        (written("{% if %}"), {}, "warmup.answer", "line 1 of the template is wrong"),
        (
            written(["one", "two"]),
            {},
            "warmup.answer",
            "without tools or an environment there is one turn",
        ),
        (written(train="missing.jsonl"), {}, "warmup.train", "missing.jsonl"),
        (
            BEST,
            {"launch.strategy": "zero3"},
            "warmup",
            "does not work with `launch.strategy: zero3`",
        ),
    ],
)
def test_a_warm_up_that_cannot_be_is_refused(workshop, warmup, more, path, seen):
    overrides = [f"{name}={value}" for name, value in more.items()]
    problems = check_recipe(workshop.write(text_of(warmup)), overrides).errors
    assert [each for each in problems if each.path == path and seen in str(each)], problems


def test_an_answer_that_training_would_cut_off_is_refused_before_a_model_is_loaded(workshop):
    recipe = workshop.write(text_of(written("word " * 30)))
    done = workshop.grpo("train", recipe)
    assert done.returncode == 1
    assert "`generation.max_completion_length`" in done.stderr
    assert "loading the model" not in done.stderr
