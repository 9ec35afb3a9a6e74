"""How many kernels and host reads a sampled token takes where there seems to be a CUDA device."""

import pytest


@pytest.mark.slow
def test_a_token_keeps_to_its_budget(fake_cuda):
    counts = fake_cuda("tests.fake_cuda.token_counts", "count")
    # Per token: one in transformers' stop check, and before 5.24 one in its mask; with graphs one at each check
    # for ended rows.
    for name, most in (("decode", 2), ("graphs", 1 / 4)):
        assert counts[name]["reads"] <= most
        assert counts[f"{name} with LoRA"]["reads"] == counts[name]["reads"]
    assert counts["graphs with LoRA"] == counts["graphs"]
    for loop, layer, rest in (("decode", 40, 65), ("graphs", 40, 40)):
        assert counts[loop]["layer"] <= layer
        assert counts[loop]["rest"] <= rest
    assert counts["decode with LoRA"]["layer"] <= 85
