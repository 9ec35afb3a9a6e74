"""Trainings from recipe to weights, with a tiny random model on the CPU."""

import json
import os
import signal
import subprocess
import time

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.report.live import PlainView
from tests.forking import ForkedPopen
from tests.integration.conftest import LORA, RECIPE, Workshop

PHASES = ("sampling", "scoring", "learning")


def weights_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_recipe_trains_a_model_and_leaves_everything_in_the_run_folder(workshop):
    # A file that happens to have a library's name stands in nobody's way.
    (workshop.folder / "datasets.py").write_text("raise SystemExit('not the library')")
    command = workshop.command("train", workshop.write(), "--json", probe=True)
    done = subprocess.run(**command, capture_output=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    run = workshop.run
    assert summary["state"] == "completed"
    assert summary["steps"] == summary["total_steps"] == 2
    assert {"length", "has_a"} == set(summary["before"]["rewards"])
    assert summary["after"]["prompts"] == 2

    trained, base = weights_of(run / "model"), weights_of(workshop.model)
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.chat_template

    steps = workshop.records("train")
    assert [record["step"] for record in steps] == [1, 2]
    for key in ("reward", "rewards/length/mean", "frac_reward_zero_std", "tokens_per_s", "loss"):
        assert steps[0].get(key) is not None, (key, steps[0])
    groups = [json.loads(line) for line in (run / "completions" / "rank_0.jsonl").open()]
    assert [group["step"] for group in groups] == [1, 1, 2, 2]
    assert all(len(group["completions"]) == 2 for group in groups)
    assert set(groups[0]["rewards"]) == {"length", "has_a"}
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["data"]["train_rows"] == 8
    assert len(manifest["data"]["fingerprint"]) == 64
    assert "step 2/2" in done.stderr


def test_a_display_that_breaks_does_not_end_the_training(workshop, monkeypatch):
    monkeypatch.setattr(PlainView, "refresh", lambda view: 1 / 0)
    done = workshop.grpo("train", workshop.write())
    assert done.returncode == 0
    assert done.stderr.count("the display failed (ZeroDivisionError") == 1


def test_the_weighted_sum_is_what_trl_reports(workshop):
    assert workshop.grpo("train", workshop.write()).returncode == 0
    for record in workshop.records("train"):
        expected = 0.5 * record["rewards/length/mean"] + record["rewards/has_a/mean"]
        assert record["reward"] == pytest.approx(expected, abs=1e-5)


def test_the_time_of_a_step_is_told_phase_by_phase(workshop):
    # Every fourth micro-step samples, which is every second step.
    flags = ["training.gradient_accumulation_steps=2", "training.num_iterations=2"]
    sets = [part for flag in [*flags, "training.max_steps=4"] for part in ("--set", flag)]
    done = workshop.grpo("train", workshop.write(), *sets, "--set", "evaluation.limit=0")
    assert done.returncode == 0, done.stderr
    steps = workshop.records("train")
    sampled = [step["time/sampling"] > 0 for step in steps]
    assert sampled == [step["time/scoring"] > 0 for step in steps] == [True, False, True, False]
    assert all(step["time/learning"] > 0 for step in steps)
    # The tokens of step 3 took the time of steps 2 and 3.
    spent_s = [sum(step[f"time/{phase}"] for phase in PHASES) for step in steps]
    pace = (steps[2]["num_tokens"] - steps[0]["num_tokens"]) / (spent_s[1] + spent_s[2])
    assert steps[2]["tokens_per_s"] == pytest.approx(pace, rel=0.5)
    assert steps[1]["tokens_per_s"] is None
    # A backend that trains and samples with the same weights hands none over.
    assert not any("time/sync" in step for step in steps)


def test_answers_given_twice_are_counted(workshop):
    # At a temperature near 0 both answers of a prompt are the same.
    flags = ["--set", "generation.temperature=0.0001", "--set", "evaluation.limit=0"]
    done = workshop.grpo("train", workshop.write(), *flags)
    assert done.returncode == 0, done.stderr
    assert all(step["completions/repeated_share"] == 1 for step in workshop.records("train"))


def test_an_adapter_loads_on_its_base_with_plain_peft(workshop):
    done = workshop.grpo("train", workshop.write(RECIPE.replace("dtype: float32", LORA)))
    assert done.returncode == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(workshop.model)
    adapted = PeftModel.from_pretrained(base, workshop.run / "model")
    changed = [
        name for name, value in adapted.named_parameters() if "lora_B" in name and value.any()
    ]
    assert changed


def test_a_base_model_without_chat_template_trains_on_plain_text(tmp_path, base_model):
    workshop = Workshop(tmp_path, base_model)
    done = workshop.grpo("train", workshop.write())
    assert done.returncode == 0, done.stderr
    group = json.loads((workshop.run / "completions" / "rank_0.jsonl").open().readline())
    assert isinstance(group["prompt"], str)


def test_a_tiny_model_learns_what_is_rewarded(workshop):
    """Of 256 bytes, the letter a: a random model hardly ever writes it."""
    (workshop.folder / "own.py").write_text(
        "def share(completions, **kwargs):\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    return [text.count('a') / max(len(text), 1) for text in texts]\n"
    )
    text = RECIPE.replace(
        '  - {{kind: regex, pattern: "a", name: has_a}}', "  - {{kind: python, path: own.py:share}}"
    ).replace("  - {{kind: length, target: 4, scale: 0.1, weight: 0.5}}\n", "")
    text = text.replace("max_steps: 2", "max_steps: 40").replace("1e-3", "1e-2")
    text = text.replace("num_generations: 2", "num_generations: 16")
    text = text.replace("per_device_train_batch_size: 4", "per_device_train_batch_size: 64")
    done = workshop.grpo(
        "train", workshop.write(text), "--json", "--set", "evaluation.temperature=1"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["reward_first"] < 0.1
    assert summary["reward_last"] > 0.5
    assert summary["after"]["reward"] > summary["before"]["reward"]


def test_trls_own_fields_reach_the_trainer(workshop):
    extra = "max_steps: 2\n  beta: 0.1\n  lr_scheduler_type: cosine\n  eval_strategy: steps\n  eval_steps: 1"
    text = RECIPE.replace("max_steps: 2", extra).replace(
        "per_device_train_batch_size: 4",
        "per_device_train_batch_size: 4\n  per_device_eval_batch_size: 2",
    )
    done = workshop.grpo("train", workshop.write(text))
    assert done.returncode == 0, done.stderr
    assert all(record["kl"] is not None for record in workshop.records("train"))
    assert len(workshop.records("eval")) == 2
    groups = [json.loads(line) for line in (workshop.run / "completions" / "rank_0.jsonl").open()]
    # Two steps of two groups, and after each an evaluation of the two held-out prompts.
    splits = [(group["split"], group["step"]) for group in groups]
    expected = [("train", 1), ("eval", 1), ("train", 2), ("eval", 2)]
    assert splits == [split for split in expected for _ in range(2)]


def test_a_reward_that_raises_names_itself_and_keeps_what_was_done(workshop):
    (workshop.folder / "own.py").write_text(
        "def moody(completions, trainer_state, **kwargs):\n"
        "    if trainer_state is not None and trainer_state.global_step == 2:\n"
        "        raise ZeroDivisionError('no mood')\n"
        "    return [float(len(completion[0]['content'])) for completion in completions]\n"
    )
    text = RECIPE.replace(
        '{{kind: regex, pattern: "a", name: has_a}}', "{{kind: python, path: own.py:moody}}"
    )
    text = text.replace("max_steps: 2", "max_steps: 4\n  save_steps: 1")
    done = workshop.grpo("train", workshop.write(text))
    assert done.returncode == 1
    assert "reward 'moody' (python) failed" in done.stderr
    assert "own.py" in done.stderr
    assert "no mood" in done.stderr
    status = workshop.status()
    assert (status["state"], status["step"]) == ("failed", 2)
    assert len(workshop.records("train")) == 2
    assert (workshop.run / "checkpoints" / "checkpoint-2" / "trainer_state.json").exists()
    assert not (workshop.run / "model").exists()


def own_reward(workshop, body):
    (workshop.folder / "own.py").write_text(
        f"import os\ndef f(completions, **kwargs):\n    {body}\n"
    )
    return workshop.write(
        RECIPE.replace(
            '{{kind: regex, pattern: "a", name: has_a}}', "{{kind: python, path: own.py:f}}"
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os._exit(0)", "ended before the run was finished"),
        ("os.kill(os.getpid(), 9)", "was killed (signal 9)"),
    ],
)
def test_a_worker_process_that_ends_badly_is_a_failed_run(workshop, body, said):
    done = workshop.process("train", own_reward(workshop, body), "--set", "evaluation.limit=0")
    assert done.returncode == 1
    assert said in done.stderr
    assert workshop.status()["state"] == "failed"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyboardInterrupt", "reward 'f' (python) failed"),
        ("return [float('nan')] * len(completions)", "reward 'f' (python) returned nan"),
        ("return [1.0]", "returned 1 scores for"),
    ],
)
def test_a_reward_that_breaks_is_a_failed_run(workshop, body, said):
    done = workshop.grpo("train", own_reward(workshop, body), "--set", "evaluation.limit=0")
    assert done.returncode == 1
    assert said in done.stderr
    assert workshop.status()["state"] == "failed"


def test_a_forgiven_reward_goes_on_and_its_failures_are_counted(workshop):
    path = own_reward(workshop, "raise ValueError('always')")
    flags = "rewards.1.on_error=skip evaluation.limit=0 training.max_steps=10 training.eval_strategy=steps "
    flags += "training.eval_steps=5"
    done = workshop.grpo("train", path, *(f"--set={flag}" for flag in flags.split()))
    assert done.returncode == 0, done.stderr
    first = workshop.records("train")[0]
    assert first["rewards/f/error_share"] == 1.0
    assert first["rewards/length/seconds"] > 0
    group = json.loads((workshop.run / "completions" / "rank_0.jsonl").open().readline())
    assert group["rewards"]["f"] == [None, None]
    assert "always" in group["reasons"]["f"][0]
    assert group["failed"] == {"f": [True, True]}
    evaluated = workshop.records("eval")
    assert (
        [each["eval_rewards/f/error_share"] for each in evaluated] == [1.0] * len(evaluated) != []
    )
    told = workshop.grpo("diagnose", workshop.run).stdout
    assert "`f` failed on 100% of the completions" in " ".join(told.split())
    assert "always" in told


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_run(workshop):
    command = workshop.command("train", workshop.write(), "--set", "evaluation.limit=0")
    process = ForkedPopen(**command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert workshop.status()["state"] == "completed"


def test_a_rank_that_dies_is_named_and_not_its_neighbour(workshop):
    body = "if os.environ['RANK'] == '1': os._exit(0)\n    return [1.0] * len(completions)"
    path = own_reward(workshop, body)
    flags = ["--set", "launch.num_processes=2", "--set", "evaluation.limit=0"]
    done = workshop.grpo("train", path, *flags)
    assert done.returncode == 1
    assert "process 1 exited without reporting an error" in workshop.status()["reason"]


def test_early_stopping_says_why_it_ended(workshop):
    extra = (
        "max_steps: 6\n  eval_strategy: steps\n  eval_steps: 1\n  per_device_eval_batch_size: 2\n"
        "  save_strategy: no\n  early_stopping: {{patience: 1, min_delta: 1000.0}}"
    )
    done = workshop.grpo("train", workshop.write(RECIPE.replace("max_steps: 2", extra)))
    assert done.returncode == 0, done.stderr
    assert workshop.status()["step"] < 6
    assert "stopped early: eval_reward no longer improved" in done.stdout


def test_the_held_out_answers_are_kept(workshop):
    assert workshop.grpo("train", workshop.write()).returncode == 0
    lines = (workshop.run / "eval" / "after.jsonl").read_bytes().splitlines()
    first = json.loads(lines[0])
    assert len(lines) == 2
    assert {"row", "prompt", "text", "rewards", "clipped"} <= first.keys()


@pytest.mark.slow
def test_two_processes_share_one_training(workshop):
    text = RECIPE.replace("use_cpu: true", "use_cpu: true, num_processes: 2")
    text = text.replace("per_device_train_batch_size: 4", "per_device_train_batch_size: 2")
    done = workshop.grpo("train", workshop.write(text), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["after"]["prompts"] == 2
    assert {path.name for path in (workshop.run / "completions").iterdir()} == {
        "rank_0.jsonl",
        "rank_1.jsonl",
    }
    assert len(workshop.records("train")) == 2


def alive_workers(run):
    """Processes whose command line names the run folder."""
    found = subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True)
    return found.stdout.split()


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        (signal.SIGINT, 1),
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(workshop, number, processes):
    text = RECIPE.replace("use_cpu: true", f"use_cpu: true, num_processes: {processes}")
    text = text.replace("max_steps: 2", "max_steps: 100000")
    # A socket below it has at most 107 characters.
    temporary = workshop.folder / "t"
    temporary.mkdir()
    process = ForkedPopen(
        **workshop.command("train", workshop.write(text), TMPDIR=str(temporary)),
        stderr=subprocess.PIPE,
    )
    workshop.wait_for_step(process)
    # A terminal's Ctrl-C reaches the supervisor alone, which passes it on.
    assert os.getsid(int(alive_workers(workshop.run)[0])) != os.getsid(process.pid)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    status = workshop.status()
    assert status["state"] == "stopped"
    assert status["step"] >= 1
    checkpoint = workshop.run / "checkpoints" / f"checkpoint-{status['step']}"
    assert (checkpoint / "trainer_state.json").exists()
    assert alive_workers(workshop.run) == []
    assert list(temporary.glob("torchelastic_*")) == []


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_worker_outlives_a_killed_supervisor(workshop, processes):
    text = RECIPE.replace("use_cpu: true", f"use_cpu: true, num_processes: {processes}")
    text = text.replace("max_steps: 2", "max_steps: 100000")
    process = ForkedPopen(
        **workshop.command("train", workshop.write(text)), stderr=subprocess.DEVNULL
    )
    workshop.wait_for_step(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while alive_workers(workshop.run) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert alive_workers(workshop.run) == []
    if processes == 1:
        # It ends as if it had been asked to: with what it learned. torchrun gives its processes 30 seconds.
        assert workshop.status()["state"] == "stopped"
        assert list((workshop.run / "checkpoints").glob("checkpoint-*"))


@pytest.mark.slow
def test_a_quiet_training_prints_its_end_alone(workshop):
    # The probe warns: every answer gets the same reward.
    text = RECIPE.replace('pattern: "a"', 'pattern: "^"')
    done = workshop.process("train", workshop.write(text), "--quiet", probe=True)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("✓ completed")
    assert "'reward': " not in next(workshop.run.rglob("worker.log")).read_text()
