"""Tags of a task that are special tokens: left out of texts, or kept, wherever completions become texts."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.launch.server_plan import find_served
from grpo_cli.serve.chat import SamplingParams, open_model
from tests.integration.conftest import Workshop
from tests.tiny_models import make_tiny_model

RECIPE = """\
name: tags
seed: 1
model: {model}
dataset: {kind: inline, eval_fraction: 0.5, prompt: {user: "{{ q }}"},
  rows: [{q: one}, {q: two}, {q: three}, {q: four}]}
rewards: [{kind: regex, name: has_call, pattern: '<call\\>'}, {kind: python, path: ./rw.py:calls, weight: 0.1}]
generation: {num_generations: 4, max_completion_length: 12, skip_special_tokens: SKIP}
training: {per_device_train_batch_size: 8, max_steps: 1}
logging: {log_completions: true}
launch: {use_cpu: true}
"""


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model that writes `<call>`, a special token of its tokenizer, in most places."""
    folder = make_tiny_model(tmp_path_factory.mktemp("caller") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    call = tokenizer.convert_tokens_to_ids("<call>")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.fill_(1)
        model.lm_head.weight.zero_()
        model.lm_head.weight[call] = 0.2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def open_workshop(tmp_path, caller, *, skips):
    workshop = Workshop(tmp_path, caller)
    text = RECIPE.replace("SKIP", str(skips).lower()).replace("{model}", f"{{path: {caller}}}")
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "rw.py").write_text(
        "def calls(completions, **_):\n"
        "    return [float(each[0]['content'].count('<call>')) for each in completions]\n"
    )
    return workshop


@pytest.mark.parametrize("skips", [True, False])
def test_texts_and_rewards_everywhere_have_the_tags_or_not(tmp_path, caller, skips):
    workshop = open_workshop(tmp_path, caller, skips=skips)
    done = workshop.grpo("train", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    texts = [
        text
        for line in (workshop.run / "completions/rank_0.jsonl").open()
        for text in json.loads(line)["completions"]
    ]
    texts += [json.loads(line)["text"] for line in (workshop.run / "eval/after.jsonl").open()]
    assert all("<call>" in text for text in texts) != skips
    assert not any("<|im_end|>" in text or "<|pad|>" in text for text in texts)
    (record,) = workshop.records("train")
    assert (record["rewards/has_call/mean"] > 0) != skips
    assert (record["rewards/calls/mean"] > 5) != skips

    measured = workshop.grpo("eval", workshop.run, "--json")
    assert measured.returncode == 0, measured.stderr
    texts = [
        json.loads(line)["text"]
        for path in (workshop.run / "eval").rglob("*.jsonl")
        for line in path.open()
        if '"text"' in line
    ]
    assert len(texts) > 2
    assert all("<call>" in text for text in texts) != skips
    served = find_served(workshop.run, None)
    answer = "".join(
        open_model(served, SamplingParams(0, 6, **served.reading))(
            [{"role": "user", "content": "one"}]
        )
    )
    assert answer == ("" if skips else "<call>" * 6)


def test_the_probe_names_special_tokens_that_rewards_do_not_see(tmp_path, caller):
    workshop = open_workshop(tmp_path, caller, skips=True)
    result = json.loads(workshop.grpo("probe", "recipe.yaml", "--json").stdout)
    issues = [issue for issue in result["findings"] if "<call>" in issue["seen"]]
    assert [issue["level"] for issue in issues] == ["warning", "warning"]
    assert "names the special token <call>" in issues[0]["seen"]
    assert "texts lack the special tokens that they hold: <call> in 8" in issues[1]["seen"]
    assert all("set `generation.skip_special_tokens: false`" in issue["fix"] for issue in issues)
    open_workshop(tmp_path, caller, skips=False)
    result = json.loads(workshop.grpo("probe", "recipe.yaml", "--json").stdout)
    assert not [issue for issue in result["findings"] if "<call>" in issue["seen"]]
