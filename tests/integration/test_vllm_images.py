"""Images with a real vLLM, on the CPU: trainings, measurements and answers; skipped if vLLM is not installed.

The model is a Llava that vLLM runs with transformers' own classes: vLLM's need torchvision.
"""

import json
import runpy
from pathlib import Path

import pytest
from PIL import Image

from tests.integration.conftest import Workshop
from tests.integration.vllm_runs import (
    AGREEMENT,
    EAGER,
    ENVIRONMENT,
    LORA,
    NEEDS_VLLM,
    SKIP_LATER_SYNCS,
    SPREAD,
    differences,
    sets,
    train,
)

pytestmark = NEEDS_VLLM
MAKE = Path(__file__).parents[2] / "recipes" / "offline" / "make.py"
COLOURS = ("red", "green", "blue")
RECIPE = """\
name: looking
model:
  path: {model}
  dtype: bfloat16
dataset:
  kind: files
  train: rows.jsonl
  eval: held_out.jsonl
  prompt: {{images: pictures, user: "colour ?"}}
rewards:
  - {{kind: python, path: ./spread.py:spread}}
  - {{kind: exact, answer: colour}}
generation:
  backend: vllm
  num_generations: 2
  max_completion_length: 4
  vllm: {{gpu_memory_utilization: 0.05, max_model_length: 256, model_impl: transformers, %s}}
training:
  per_device_train_batch_size: 6
launch: {{use_cpu: true}}
"""
# vLLM changes transformers' class in its own process (0.31), which in colocate mode is the training's too.
ONE_PROCESS = """\
from transformers.models.llama.modeling_llama import LlamaModel

LlamaModel.do_not_compile = True
"""


@pytest.fixture(scope="session")
def wide_llava(once):
    """A Llava with heads of 32, which vLLM's CPU kernels require, and more words than the offline recipe's."""

    def make(folder):
        import torch
        from transformers import LlavaForConditionalGeneration

        made = runpy.run_path(str(MAKE))
        words = ["<image>", "colour", "?", *COLOURS, *(f"word{n}" for n in range(100))]
        processor, model = made["make_llava"](
            made["make_word_tokenizer"](words, made["LLAVA_TEMPLATE"])
        )
        for part in (model.config.text_config, model.config.vision_config):
            part.num_attention_heads = 2
        model.config.text_config.update({"num_key_value_heads": 2, "head_dim": 32})
        torch.manual_seed(0)
        LlavaForConditionalGeneration(model.config).save_pretrained(folder)
        processor.save_pretrained(folder)

    return once("wide_llava", make)


def write(folder, model, vllm, spread=SPREAD):
    for colour in COLOURS:
        Image.new("RGB", (40, 24), colour).save(folder / f"{colour}.png")
    for name, counts in (("rows", [0, 1, 3] * 6), ("held_out", [0, 1, 3, 1])):
        rows = [
            {
                "pictures": [f"{COLOURS[(n + each) % 3]}.png" for each in range(count)],
                "colour": "red",
            }
            for n, count in enumerate(counts)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "spread.py").write_text(spread)
    workshop = Workshop(folder, model)
    workshop.write(RECIPE % vllm)
    return workshop


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_colocated_vllm_samples_from_images_with_the_weights_of_the_step(
    tmp_path, wide_llava, lora
):
    workshop = write(
        tmp_path, wide_llava, "mode: colocate", ONE_PROCESS + SKIP_LATER_SYNCS + SPREAD
    )
    more = ["--set", LORA] if lora else []
    train(workshop, *sets(6, lr_scheduler_type="constant"), *more, **EAGER)
    assert len(differences(workshop)) == 6
    assert max(differences(workshop)[:4]) < AGREEMENT
    assert differences(workshop)[-1] > AGREEMENT
    assert min(record["grad_norm"] for record in workshop.records("train")[:4]) > 0


def test_a_server_samples_and_measures_with_an_adapter(tmp_path, wide_llava):
    workshop = write(tmp_path, wide_llava, "mode: server, server_args: {{enforce-eager: true}}")
    more = ["--set", LORA, "--set", "evaluation.limit=4"]
    train(workshop, *sets(4, lr_scheduler_type="constant"), *more)
    assert len(differences(workshop)) == 4
    assert max(differences(workshop)) < AGREEMENT
    measured = json.loads((workshop.run / "eval" / "after.json").read_text())
    assert (measured["backend"], measured["prompts"]) == ("vllm", 4)


def test_both_backends_measure_the_same(tmp_path, wide_llava):
    workshop = write(tmp_path, wide_llava, "mode: colocate")
    found = {}
    for backend in ("transformers", "vllm"):
        flags = ["--backend", backend, "--out", backend, "--set", "model.dtype=float32"]
        done = workshop.process("eval", tmp_path / "recipe.yaml", *flags, **ENVIRONMENT, **EAGER)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (tmp_path / backend / "samples" / "model.0.jsonl").read_text().splitlines()
        found[backend] = {each["row"]: each["text"] for each in map(json.loads, lines)}
    assert found["vllm"] == found["transformers"]
    assert len(set(found["vllm"].values())) > 1
