"""What the machine has: versions, the device, and what each attention kernel takes."""

import platform
from collections.abc import Iterator
from importlib import import_module, metadata
from inspect import signature
from itertools import product

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_kit.bench import Bench, Row

_PACKAGES = "torch transformers trl accelerate peft datasets pydantic vllm flash-attn".split()
_KERNELS = "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"


def describe_machine(bench: Bench) -> Iterator[Row]:
    """Versions and device, then one row for each kernel."""
    yield {"what": "python", "found": platform.python_version()}
    for name in _PACKAGES:
        try:
            yield {"what": name, "found": metadata.version(name)}
        except metadata.PackageNotFoundError:
            yield {"what": name, "found": "no"}
    device = f"CPU, {torch.get_num_threads()} threads"
    if bench.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        device = f"{found.name}, {memory}, compute capability {found.major}.{found.minor}"
    yield {"what": "device", "found": device}
    for name in _KERNELS:
        takes = [
            f"{'mask' if masked else 'causal'}{', grouped heads' if grouped else ''}"
            for masked, grouped in product((False, True), repeat=2)
            if _runs(bench, SDPBackend.__members__[name], masked=masked, grouped=grouped)
        ]
        yield {"what": name.lower(), "found": "; ".join(takes) or "no"}
    yield {"what": "varlen_attn, grouped heads", "found": _try_varlen(bench)}


def _tensors(bench: Bench, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=bench.device, dtype=torch.bfloat16, requires_grad=True)


def _runs(bench: Bench, backend: SDPBackend, *, masked: bool, grouped: bool) -> bool:
    """Try forward and backward in bfloat16, with 14 heads of width 64."""
    query, key = _tensors(bench, 1, 14, 64, 64), _tensors(bench, 1, 2 if grouped else 14, 64, 64)
    mask = torch.ones(64, 64, dtype=torch.bool, device=bench.device).tril() if masked else None
    options = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": grouped}
    try:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(query, key, key, **options).sum().backward()
    except RuntimeError:
        return False
    return True


def _try_varlen(bench: Bench) -> str:
    """Try two causal sequences of 64 tokens, forward and backward."""
    query, key = _tensors(bench, 128, 14, 64), _tensors(bench, 128, 2, 64)
    ends = torch.tensor([0, 64, 128], dtype=torch.int32, device=bench.device)
    try:
        attend = import_module("torch.nn.attention.varlen").varlen_attn
        # Newer versions take grouped heads only with `enable_gqa`.
        named = {"enable_gqa": True} if "enable_gqa" in signature(attend).parameters else {}
        output = attend(query, key, key, ends, ends, 64, 64, window_size=(-1, 0), **named)
        output.sum().backward()
    except Exception as error:  # what a kernel refuses is what this part reports
        return f"no: {type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    return "runs"
