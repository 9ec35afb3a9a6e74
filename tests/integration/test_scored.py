"""Training on scored responses: nothing sampled, TRL's own loss, and the better ones become likelier."""

import json
import statistics

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.conftest import Workshop

RECIPE = """\
name: tiny
seed: 1
model:
  path: {model}
  dtype: float32
dataset:
  kind: scored
  train: scored.jsonl
generation:
  num_generations: 4
  max_completion_length: 16
training:
  per_device_train_batch_size: 8
  max_steps: 2
  learning_rate: 1e-3
  lr_scheduler_type: constant
  gradient_checkpointing: false
  disable_dropout: true
launch: {{use_cpu: true}}
"""
GOOD, BAD = (" yes", " yes please", " of course"), (" no", " no way", " never ever")


def write_rows(folder, sizes, name="scored.jsonl"):
    """Rows of prompts with so many responses, in turn good and bad ones; those of a prompt lie apart."""
    rows = [
        {
            "prompt": f"Say something {number}:",
            "response": (GOOD, BAD)[place % 2][(number + place) % 3],
            "reward": 1.0 - place % 2,
        }
        for place in range(max(sizes))
        for number, size in enumerate(sizes)
        if place < size
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def scored(tmp_path, base_model):
    return Workshop(tmp_path, base_model)


def train(workshop, *flags, text=RECIPE):
    done = workshop.grpo("train", workshop.write(text), *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def sets(**values):
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def test_the_better_responses_become_likelier(scored):
    sizes = [2, 3, 4, 6, 1, 2, 4, 3, 5, 2, 4, 3]
    write_rows(scored.folder, sizes)
    write_rows(scored.folder, [4, 2, 3, 1], name="held.jsonl")
    text = RECIPE.replace("train: scored.jsonl", "train: scored.jsonl\n  eval: held.jsonl")
    done = train(
        scored,
        *sets(**{"training.max_steps": 30, "training.beta": 0.04}),
        *sets(**{"training.eval_strategy": "steps", "training.eval_steps": 15}),
        text=text,
    )
    before, after = scored.records("measure")
    assert before["accuracy"]["ranking"] < after["accuracy"]["ranking"]
    assert after["accuracy"]["ranking"] == 1.0
    assert after["likelihood_gap"] > before["likelihood_gap"] + 0.5
    assert [record["step"] for record in scored.records("eval")] == [15, 30]
    assert scored.records("eval")[-1]["eval_likelihood_gap"] == pytest.approx(
        after["likelihood_gap"]
    )
    # The KL term holds the policy, and the rewards are those of the data.
    assert scored.records("train")[-1]["kl"] > 0
    assert 0 < statistics.fmean(record["reward"] for record in scored.records("train")) < 1
    # One prompt of each file has a single response.
    groups = json.loads((scored.run / "manifest.json").read_text())["data"]["groups"]
    assert (groups["prompts"], groups["single"], groups["largest"]) == (11, 1, 6)
    answers = (scored.run / "eval" / "answers.jsonl").read_bytes().splitlines()
    assert json.loads(answers[0])["prompt"] == "Say something 0:"
    assert "» Say something 0:" in done.stdout
    assert not list((scored.run / "completions").glob("*"))


def test_held_out_responses_to_the_same_prompts_are_not_trained_on(scored):
    write_rows(scored.folder, [4, 4, 4, 4])
    rows = [json.loads(line) for line in (scored.folder / "scored.jsonl").read_text().splitlines()]
    held = [{**row, "response": " held out", "reward": row["reward"] + 100} for row in rows]
    (scored.folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    text = RECIPE.replace("train: scored.jsonl", "train: scored.jsonl\n  eval: held.jsonl")
    train(scored, text=text)
    assert all(0 <= record["reward"] <= 1 for record in scored.records("train"))
    # Equal responses cannot be told apart, and none of a kind is likelier.
    assert scored.records("measure")[0]["accuracy"]["ranking"] == 0.5


def test_held_out_responses_that_cannot_be_ranked_are_said(scored):
    write_rows(scored.folder, [4, 4, 4, 4])
    rows = [json.loads(line) for line in (scored.folder / "scored.jsonl").read_text().splitlines()]
    held = [{**row, "reward": 1.0} for row in rows]
    (scored.folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    text = RECIPE.replace("train: scored.jsonl", "train: scored.jsonl\n  eval: held.jsonl")
    flags = sets(**{"training.eval_strategy": "steps", "training.eval_steps": 1})
    done = scored.grpo("train", scored.write(text), *flags)
    assert done.returncode == 1
    assert "there is nothing to rank" in scored.status()["reason"]


def test_a_step_is_the_one_worked_out_by_hand(scored):
    """Groups of 2, 3 and 4 in places for 4: the places left over must not count in any way."""
    write_rows(scored.folder, [2, 3, 4, 4])
    train(
        scored,
        *sets(**{"training.per_device_train_batch_size": 16, "training.max_steps": 1}),
        *sets(**{"training.optim": "sgd", "training.learning_rate": 0.1}),
        *sets(**{"training.max_grad_norm": 1e9, "training.loss_type": "dapo"}),
    )
    model = AutoModelForCausalLM.from_pretrained(scored.model)
    tokenizer = AutoTokenizer.from_pretrained(scored.model)
    rows = [json.loads(line) for line in (scored.folder / "scored.jsonl").read_text().splitlines()]
    total, tokens = torch.tensor(0.0), 0
    for row in rows:
        group = [each["reward"] for each in rows if each["prompt"] == row["prompt"]]
        spread = statistics.stdev(group)
        advantage = (row["reward"] - statistics.fmean(group)) / (spread + 1e-4)
        asked = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([asked + answer])).logits[0, len(asked) - 1 : -1]
        found = torch.log_softmax(logits, -1)[range(len(answer)), answer]
        total = total - advantage * found.sum()
        tokens += len(answer)
    (total / tokens).backward()
    trained = load_file(scored.run / "model" / "model.safetensors")
    for name, weight in model.named_parameters():
        if name in trained:
            moved = trained[name] - weight.detach()
            assert torch.allclose(moved, -0.1 * weight.grad, atol=1e-6), name
    assert max(weight.grad.abs().max() for weight in model.parameters()) > 1e-3


def test_a_chat_model_with_lora_learns_from_its_own_turns(workshop):
    write_rows(workshop.folder, [4] * 8)
    text = RECIPE.replace("dtype: float32", "dtype: float32\n  lora: {{r: 4}}")
    text = text.replace(
        "kind: scored", "kind: scored\n  eval_fraction: 0.25\n  prompt: {{style: chat}}"
    )
    train(workshop, *sets(**{"training.max_steps": 20, "training.learning_rate": 0.02}), text=text)
    before, after = workshop.records("measure")
    assert after["prompts"] == 2
    assert after["likelihood_gap"] > before["likelihood_gap"] + 0.1
    assert (workshop.run / "model" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_learn_what_one_does(scored, tmp_path, base_model):
    sizes = [2, 3, 4, 6, 4, 2, 5, 3]
    weights = []
    for processes, batch in ((1, 8), (2, 4)):
        folder = tmp_path / f"of_{processes}"
        folder.mkdir()
        workshop = Workshop(folder, base_model)
        write_rows(folder, sizes)
        train(
            workshop,
            *sets(**{"launch.num_processes": processes}),
            *sets(**{"training.per_device_train_batch_size": batch, "training.max_steps": 4}),
            *sets(**{"training.optim": "sgd", "training.learning_rate": 0.1}),
        )
        weights.append(load_file(workshop.run / "model" / "model.safetensors"))
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-6), name


@pytest.mark.slow
def test_a_run_goes_on_exactly(scored, tmp_path, base_model):
    """Also where a group is larger than its places, so that chance chooses."""
    write_rows(scored.folder, [6, 7, 8, 6])
    whole = Workshop(tmp_path / "whole", base_model)
    whole.folder.mkdir()
    write_rows(whole.folder, [6, 7, 8, 6])
    flags = sets(**{"training.max_steps": 6, "training.save_steps": 3})
    train(whole, *flags)
    train(scored, *flags)
    checkpoint = scored.run / "checkpoints" / "checkpoint-3"
    done = scored.grpo("train", scored.folder / "recipe.yaml", *flags, "--resume-from", checkpoint)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [load_file(each.run / "model" / "model.safetensors") for each in (whole, scored)]
    for name, weight in runs[0].items():
        assert torch.equal(weight, runs[1][name]), name


def test_a_response_too_long_for_the_model_is_refused_before_training(scored):
    write_rows(scored.folder, [2, 2, 2, 2])
    row = {"prompt": "Say something 0:", "response": "long " * 200, "reward": 0.5}
    with (scored.folder / "scored.jsonl").open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    done = scored.grpo(
        "train", scored.write(RECIPE), *sets(**{"generation.max_completion_length": 2000})
    )
    assert done.returncode == 1
    assert "and the model reads 512" in scored.status()["reason"]


def test_the_probe_says_what_is_cut_and_what_cannot_teach(scored):
    write_rows(scored.folder, [4, 4, 4, 4])
    flags = sets(**{"generation.max_completion_length": 4})
    done = scored.grpo("probe", scored.write(RECIPE), "--quick", "--json", *flags)
    findings = {each["subject"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0
    assert (
        "of the responses are cut at 4 tokens; the longest has"
        in findings["length: cut off"]["seen"]
    )
    rows = [json.loads(line) for line in (scored.folder / "scored.jsonl").read_text().splitlines()]
    # All of a prompt are worth the same, but for one prompt.
    even = [{**row, "reward": 1.0 if "0:" not in row["prompt"] else row["reward"]} for row in rows]
    (scored.folder / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in even))
    done = scored.grpo("probe", scored.write(RECIPE), "--quick", "--json")
    findings = {each["subject"]: each for each in json.loads(done.stdout)["findings"]}
    assert "the responses of 3 of 4 prompts" in findings["data: groups without spread"]["seen"]
