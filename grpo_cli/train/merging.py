"""Weights with LoRA adapters merged in, for vLLM, which leave the model as it was.

TRL merges the adapters into the weights before it sends them, and subtracts them again afterwards. In bfloat16
both round, so that the base drifts with every step, and an export merges onto another base than was trained
(trl issue 6688). Here each layer is merged in a copy.

Source: trl 1.16.0, `VLLMGeneration._iter_named_params` and `AsyncGRPOTrainer._sync_weight_merged`; peft 0.21,
`LoraLayer.merge`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor

from grpo_cli.errors import RunError

Weights = Iterator[tuple[str, torch.Tensor]]


@contextmanager
def base_kept(model: Any) -> Iterator[None]:
    """Keep `merge_adapter` and `unmerge_adapter` from changing the base weights of a model.

    Sharded weights (FSDP2) are merged in place, and copied back from what they were: each process holds one
    more copy of its shards meanwhile. Otherwise nothing is merged: pass the weights through `merge_weights`.
    """
    if not isinstance(model, PeftModel):
        yield
        return
    if _is_sharded(model):
        kept = [(weight, weight.detach().clone()) for weight in _base_weights(model)]
        try:
            yield
        finally:
            for weight, before in kept:
                weight.data.copy_(before)
        return
    model.merge_adapter = model.unmerge_adapter = lambda *args, **options: None
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter


def merge_weights(model: Any, weights: Weights) -> Weights:
    """Yield the weights of a model, those with an adapter merged in a copy.

    Args:
        model: A PEFT model; any other model's weights pass through, and so do sharded ones.
        weights: Names and tensors that share their memory with the model's parameters.

    Raises:
        RunError: A weight with an adapter is not among them.
    """
    if not isinstance(model, PeftModel) or _is_sharded(model):
        yield from weights
        return
    layers: dict[int, LoraLayer] | None = None
    merged: dict[int, torch.Tensor] = {}
    for name, tensor in weights:
        if layers is None:
            # Not earlier: ZeRO-3 gathers the weights when the iteration begins.
            layers = {w.data_ptr(): layer for layer in _layers(model) for w in _weights_of(layer)}
        address = tensor.data_ptr()
        if address not in merged and address in layers:
            merged = _merge(layers[address])
        yield name, merged.pop(address, tensor)
        layers.pop(address, None)
    if layers:
        raise RunError(
            f"{len(layers)} weights with an adapter were not sent to vLLM. Fix: "
            "`generation.backend: transformers`, or fewer modules in `model.lora.target_modules`"
        )


def _merge(layer: LoraLayer) -> dict[int, torch.Tensor]:
    """Return the merged weights of a layer by the address of the weights without the adapter."""
    weights = _weights_of(layer)
    kept = [weight.data for weight in weights]
    try:
        for weight, base in zip(weights, kept, strict=True):
            # The sum is rounded once, as it is sent.
            weight.data = base.float() if base.dtype.itemsize == 2 else base.clone()
        layer.merge()
        sums = [w.data.to(base.dtype) for w, base in zip(weights, kept, strict=True)]
    finally:
        layer.merged_adapters.clear()
        for weight, base in zip(weights, kept, strict=True):
            weight.data = base
    return {base.data_ptr(): total for base, total in zip(kept, sums, strict=True)}


def _layers(model: Any) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _weights_of(layer: LoraLayer) -> list[torch.nn.Parameter]:
    return list(layer.get_base_layer().parameters(recurse=False))


def _base_weights(model: Any) -> list[torch.nn.Parameter]:
    return [weight for layer in _layers(model) for weight in _weights_of(layer)]


def _is_sharded(model: Any) -> bool:
    return any(isinstance(weight, DTensor) for weight in _base_weights(model))
