"""Real runs made to fail, what `grpo diagnose` says of them, and rules that stop a run."""

import json

import pytest

from tests.integration.conftest import RECIPE

pytestmark = pytest.mark.slow

OWN = """\
def constant(completions, **kwargs):
    return [0.5 for _ in completions]


def digit(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [text.count(right) / max(len(text), 1) for text, right in zip(texts, answer)]
"""


def write(workshop, reward, **training):
    """A recipe with one reward of our own, and settings of training."""
    (workshop.folder / "own.py").write_text(OWN)
    start = RECIPE.index("rewards:")
    end = RECIPE.index("generation:")
    one = f"rewards:\n  - {{{{kind: python, path: ./own.py:{reward}}}}}\n"
    text = RECIPE[:start] + one + RECIPE[end:] + "evaluation: {{limit: 0}}\n"
    lines = "".join(f"  {name}: {value}\n" for name, value in training.items())
    return workshop.write(text.replace("training:\n", f"training:\n{lines}"))


def diagnose(workshop):
    done = workshop.grpo("diagnose", workshop.run, "--json")
    assert done.stderr == ""
    found = {each["rule"]: each for each in json.loads(done.stdout)["symptoms"]}
    errors = any(each["level"] == "error" for each in found.values())
    assert done.returncode == int(errors)
    return found


def test_a_constant_reward_and_short_answers_are_told_at_the_end_and_by_diagnose(workshop):
    recipe = write(workshop, "constant")
    done = workshop.grpo("train", recipe, "--set", "training.max_steps=10")
    assert done.returncode == 0, done.stderr
    assert "no_signal: 100% of the groups" in done.stderr
    assert f"more: grpo diagnose {workshop.run}" in done.stderr
    found = diagnose(workshop)
    assert found["no_signal"]["level"] == "error"
    assert f"`grpo rewards test {workshop.run}/resolved.json`" in found["no_signal"]["fix"]
    assert "were cut off at 8 tokens" in found["truncation"]["seen"]
    assert "`generation.max_completion_length: 16`" in found["truncation"]["fix"]
    said = workshop.grpo("diagnose", workshop.run).stdout
    assert said.startswith("✗ 2 problems\n")


def test_a_learning_rate_of_1_leaves_a_model_that_says_one_thing(workshop):
    # What it says depends on luck; that groups no longer differ does not.
    text = ["per_device_train_batch_size=32", "learning_rate=1.0", "max_steps=30"]
    flags = [part for each in text for part in ("--set", f"training.{each}")]
    done = workshop.grpo(
        "train", write(workshop, "digit"), *flags, "--set", "generation.num_generations=8"
    )
    assert done.returncode == 0, done.stderr
    found = diagnose(workshop)
    assert "no_signal" in found
    assert {"entropy_collapse", "repeated_answers"} & found.keys()


def test_a_rule_stops_a_run_which_is_saved_and_says_why(workshop):
    recipe = write(workshop, "constant", stop_when="no_signal", save_strategy="no")
    done = workshop.grpo("train", recipe, "--set", "training.max_steps=40")
    assert done.returncode == 1
    status = workshop.status()
    assert (status["state"], status["stopped_by"], status["step"]) == ("stopped", "no_signal", 10)
    assert status["reason"].startswith(
        "stopped by the rule no_signal after step 10, which is saved"
    )
    assert status["fix"].startswith("`grpo rewards test ")
    assert f"{status['reason']}. Fix: {status['fix']}" in done.stderr
    assert (workshop.run / "checkpoints" / "checkpoint-10" / "trainer_state.json").is_file()
    assert not (workshop.run / "model").exists()
    # Its window must fill with records of the new attempt before it stops again.
    done = workshop.grpo("train", recipe, "--set", "training.max_steps=40", "--resume")
    assert done.returncode == 1
    assert workshop.status()["step"] == 20


def test_a_rule_stops_all_processes_at_the_same_step(workshop):
    recipe = write(workshop, "constant", stop_when="[nan_loss, no_signal]")
    flags = ("--set", "training.max_steps=40", "--set", "launch.num_processes=2")
    done = workshop.grpo("train", recipe, *flags)
    assert done.returncode == 1, done.stderr
    status = workshop.status()
    assert (status["state"], status["stopped_by"], status["step"]) == ("stopped", "no_signal", 10)
    saved = {path.name for path in (workshop.run / "checkpoints" / "checkpoint-10").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= saved
