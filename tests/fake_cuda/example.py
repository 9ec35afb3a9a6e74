"""What the fake CUDA device counts, on the smallest example."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.fake_cuda.device import FakeCuda


def run() -> dict[str, Any]:
    """Return counts and values of a few operators."""
    with FakeCuda() as device:
        model = device.put_model(torch.nn.Linear(4, 2, bias=False))
        torch.nn.init.ones_(model.weight)
        rows = device.put(torch.ones(3, 4))
        device.reset()
        with device.kept(without=model.parameters()) as kept:
            loss = model(rows).relu().sum()
        loss.backward()
        kernels = dict(device.kernels)
        gradient = model.weight.grad.tolist()
        chosen = rows[rows.sum(1) > 3]
        torch.tensor([1.0], device="cuda")
        torch.ones(1).to("cuda", non_blocking=True)
        refused = ""
        try:
            rows + torch.ones(3, 4)
        except RuntimeError as error:
            refused = str(error)
        counts = {"reads": dict(device.reads), "uploads": dict(device.blocking_uploads)}
    with FakeCuda("meta") as large:
        sides = (
            torch.empty(1, 8, 2**20, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)
        )
        output = scaled_dot_product_attention(*sides, is_causal=True)
        of_attention = [list(output.shape), list(large.kernels)]
    return {
        "kernels": kernels,
        "gradient": gradient,
        "chosen": list(chosen.shape),
        "refused": refused,
        "kept": kept.bytes,
        "attention": of_attention,
        **counts,
    }
