"""The memory that `grpo probe` foretells, against what the worker's process takes at its peak."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from recipes.offline.make import LLAVA_TEMPLATE, make_word_tokenizer
from tests.integration.test_probe import SMOLLM2
from tests.nightly import nightly

ROWS = [{"question": "word " * 60, "answer": "1"}] * 32
CASES = {
    "all weights in float32": (
        {"dtype": "float32"},
        {"per_device_train_batch_size": 4, "gradient_checkpointing": False},
    ),
    "adapters": (
        {"dtype": "float32", "lora": {"r": 16}},
        {"per_device_train_batch_size": 16, "gradient_checkpointing": False},
    ),
    "checkpointing, accumulation and a reference": (
        {"dtype": "float32"},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "beta": 0.1},
    ),
}

REWARD = """
def differ(completions, **_):
    return [float(number) for number, _ in enumerate(completions)]
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "name",
    [
        nightly("adapters"),
        "checkpointing, accumulation and a reference",
        nightly("all weights in float32"),
    ],
)
def test_the_estimate_is_near_the_measured_peak(name, tmp_path):
    model, training = CASES[name]
    recipe = {
        "name": "memory",
        "model": {"path": SMOLLM2, **model},
        "dataset": {"kind": "inline", "prompt": {"user": "{{ question }}"}, "rows": ROWS},
        # Every completion is learned from, as in the worst step.
        "rewards": [{"kind": "python", "path": "./rewards.py:differ"}],
        "generation": {"num_generations": 4, "max_completion_length": 48},
        "training": {"max_steps": 2, "learning_rate": 1e-6, "save_strategy": "no", **training},
        "launch": {"use_cpu": True},
    }
    _compare(name, recipe, tmp_path)


def make_llava(folder):
    """A Llava with random weights: 26 million that look at pictures of 224 × 224 pixels, 29 million that write."""
    words = make_word_tokenizer(["<image>", "colour", "?", "red", "blue"], LLAVA_TEMPLATE)
    size, patch = {"height": 224, "width": 224}, 14
    images = LlavaImageProcessorPil(size={"shortest_edge": 224}, crop_size=size)
    chosen = {"patch_size": patch, "vision_feature_select_strategy": "default"}
    processor = LlavaProcessor(images, words, num_additional_image_tokens=1, **chosen)
    shared = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            image_size=224, patch_size=patch, intermediate_size=2048, **shared
        ),
        text_config=LlamaConfig(
            vocab_size=len(words),
            intermediate_size=1536,
            num_key_value_heads=8,
            max_position_embeddings=1024,
            pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id,
            bos_token_id=None,
            **shared,
        ),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        image_seq_length=256,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder / "llava")
    processor.save_pretrained(folder / "llava")
    Image.new("RGB", (300, 240), "red").save(folder / "red.png")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_estimate_of_images_is_near_the_measured_peak(tmp_path):
    make_llava(tmp_path)
    recipe = {
        "name": "memory",
        "model": {"path": "./llava", "dtype": "float32"},
        "dataset": {
            "kind": "inline",
            "prompt": {"images": ["pictures"], "user": "colour ?"},
            "rows": [{"pictures": ["red.png"]}] * 16,
        },
        "rewards": [{"kind": "python", "path": "./rewards.py:differ"}],
        "generation": {"num_generations": 4, "max_completion_length": 4},
        "training": {
            "max_steps": 1,
            "learning_rate": 1e-6,
            "save_strategy": "no",
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": False,
        },
        "launch": {"use_cpu": True},
    }
    _compare("images", recipe, tmp_path)


def _compare(name, recipe, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    told = json.loads(_grpo(tmp_path, "probe", path, "--quick", "--json"))
    planned = json.loads(_grpo(tmp_path, "train", path, "--dry-run", "--json"))
    measured = _peak_bytes(planned["argv"], planned["environment"], tmp_path)
    ratio = told["memory"]["peak_bytes"] / measured
    print(f"{name}: estimated {told['memory']['peak_bytes']:,}, measured {measured:,}, {ratio:.3f}")
    assert 0.75 <= ratio <= 1.25


def _grpo(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "grpo_cli", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def _peak_bytes(argv, environment, folder):
    """The most memory that a process held, as the kernel counts it.

    Read from `/proc` while it runs: what `wait4` tells counts the test's own memory before `exec` too.
    """
    peak = 0
    with (folder / "worker.txt").open("w") as log:
        worker = subprocess.Popen(
            argv, env={**os.environ, **environment}, cwd=folder, stdout=log, stderr=log
        )
        while worker.poll() is None:
            lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
            peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
            peak = max([peak, *peaks])
            time.sleep(0.02)
    assert worker.returncode == 0, (folder / "worker.txt").read_text()[-2000:]
    return peak * 1024
