"""Merges LoRA adapters in a copy of their layer's weights, for vLLM and for sampling with CUDA graphs."""

import torch
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor


def merge_copy(layer: LoraLayer) -> dict[str, torch.Tensor]:
    """Return the merged weights of a layer by their names in it; the layer keeps its own.

    It is merged in copies of its parameters, whole and in float32: the sum is rounded once.
    """
    parameters = [
        (owner, name, parameter)
        for owner in (module._parameters for module in layer.modules())
        for name, parameter in owner.items()
        if parameter is not None
    ]
    dtypes = {name: each.dtype for name, each in layer.get_base_layer().named_parameters()}
    try:
        for owner, name, parameter in parameters:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            copy = whole(parameter).to(dtype, copy=True)
            owner[name] = torch.nn.Parameter(copy, requires_grad=False)
        layer.merge()
        merged = layer.get_base_layer().named_parameters(recurse=False)
        return {name: weight.data.to(dtypes[name]) for name, weight in merged}
    finally:
        layer.merged_adapters.clear()
        for owner, name, parameter in parameters:
            owner[name] = parameter


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter without gradient; a collective if it is sharded."""
    value = parameter.detach()
    if isinstance(value, DTensor):
        # Shards may be kept in host memory.
        return value.to(value.device_mesh.device_type).full_tensor()
    return value
