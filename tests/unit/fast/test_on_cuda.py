"""The fast step where there seems to be a CUDA device: memory of attention, and where the host waits.

One process measures all of it, since most of its time goes into imports.
"""

import pytest

from tests.tiny_models import make_tiny_model

SHAPES = {
    "Qwen2.5-0.5B": (14, 2, 64),
    "Qwen2.5-7B": (28, 4, 128),
    "Llama-3.1-8B": (32, 8, 128),
}
BATCHES = ((2, 4, 512, 2048), (2, 4, 512, 8192), (1, 8, 512, 32768))
CASES = [(shape, batch) for shape in SHAPES.values() for batch in BATCHES]


@pytest.fixture(scope="module")
def measured(fake_cuda, tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    return fake_cuda("tests.fake_cuda.learning", "measure", folder=str(folder), cases=CASES)


def test_attention_keeps_its_inputs_and_output_and_no_mask(measured):
    for case, counts in zip(CASES, measured["bytes"], strict=True):
        assert counts["least"] < counts["kept"] <= 1.3 * counts["least"], case


def test_a_step_waits_for_the_device_once_and_for_trls_metrics(measured):
    step = measured["step"]
    assert step["left_off"] == {}
    ours = {site: count for site, count in step["reads"].items() if site.startswith("grpo_cli")}
    assert step["micro_batches"] >= 3
    assert sum(ours.values()) == 1, step
    # Ten metrics of `_compute_loss`, each `.item()` (TRL 1.16).
    assert sum(step["reads"].values()) <= 1 + 10 * step["micro_batches"], step
    assert step["uploads"] == {}, step


def test_the_tree_of_the_asynchronous_trainer_is_never_read(measured):
    tree = measured["tree"]
    assert tree["reads"] == {}
    assert tree["kernels"]["_varlen_attn"] == 2
    # The gradient's order of copies is found once, by the first layer.
    assert tree["kernels"]["sort"] == 1
    assert tree["difference"] < 0.05


def test_what_runs_on_the_device_is_counted_and_computed(measured):
    """The device itself, which all of these tests rely on."""
    found = measured["example"]
    assert set(found["kernels"]) >= {"mm", "relu", "sum", "threshold_backward"}
    assert not {"t", "detach", "view"} & set(found["kernels"])
    assert found["gradient"] == [[3.0] * 4] * 2
    assert found["chosen"] == [3, 4]
    # The gradient that was read, and rows chosen by their values.
    assert list(found["reads"].values()) == [1, 1]
    assert all(site.startswith("tests/fake_cuda/example.py:") for site in found["reads"])
    assert sum(found["uploads"].values()) == 1
    assert "cuda:0" in found["refused"]
    # Inputs `[3, 4]` and the output of relu `[3, 2]` in float32.
    assert found["kept"] == 3 * 4 * 4 + 3 * 2 * 4
    kernels = ["_scaled_dot_product_flash_attention"]
    assert found["attention"] == [[1, 8, 2**20, 64], kernels]
