"""Tensors on a CUDA device that is not there: what would run on it is counted, and computed on the CPU if at all.

Import this module before any other that takes `scaled_dot_product_attention` from torch, in a process that has
loaded the shim (`run.py` does both).
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.fake_cuda.kernels import PLAIN

aten = torch.ops.aten
_DEVICE = torch.device("cuda:0")
_WITHOUT_KERNEL = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided lift_fresh _unsafe_view _reshape_alias "
    "_local_scalar_dense is_same_size resize_".split()
)
_READING = frozenset(
    "_local_scalar_dense nonzero masked_select equal _unique2 unique_dim unique_consecutive".split()
)
"""Operators for whose result the host waits: a value, or a size that depends on values."""
_ROOT = f"{Path(__file__).parents[2]}/"
_sdpa = torch.nn.functional.scaled_dot_product_attention


class CudaTensor(torch.Tensor):
    """Says that it is on `cuda:0`; its values, if there are any, are those of `backing`."""

    backing: torch.Tensor

    @staticmethod
    def __new__(cls, backing: torch.Tensor) -> "CudaTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            backing.size(),
            strides=backing.stride(),
            storage_offset=backing.storage_offset(),
            dtype=backing.dtype,
            device=_DEVICE,
        )

    def __init__(self, backing: torch.Tensor) -> None:
        self.backing = backing

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({list(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Copy the values to the host; torch refuses that for any subclass."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a CudaTensor outside of FakeCuda")


class FakeCuda(TorchDispatchMode):
    """Inside, `cuda:0` is a device. Counts are by the line of code that called, or by the operator."""

    def __init__(self, backing: Literal["cpu", "meta"] = "cpu") -> None:
        """Make a device.

        Args:
            backing: `cpu` computes values, with plain attention in place of CUDA's kernels; `meta` computes and
                holds none, for tensors of any size that nobody reads.
        """
        super().__init__()
        self._backing = backing
        self.reads = Counter[str]()
        """Where the host waits for the device: values, sizes that depend on values, copies to the host."""
        self.blocking_uploads = Counter[str]()
        """Copies to the device that wait until it has them."""
        self.kernels = Counter[str]()
        """Operators that launch a kernel; views launch none."""
        self._patches: list[Any] = []

    def __enter__(self) -> Any:
        self._patches = [
            mock.patch.object(torch.cuda, "_lazy_init"),
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
            mock.patch.object(torch.cuda, "device_count", return_value=1),
            mock.patch.object(torch.cuda, "current_device", return_value=0),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
            mock.patch.object(torch.version, "cuda", "12.8"),
        ]
        for patch in self._patches:
            patch.start()
        # Else `torch.tensor` copies to the device out of this mode's sight.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch._C._set_only_lift_cpu_tensors(False)
        for patch in self._patches:
            patch.stop()

    def reset(self) -> None:
        """Begin all counts anew."""
        for counts in (self.reads, self.blocking_uploads, self.kernels):
            counts.clear()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, without counting a copy."""
        return CudaTensor(tensor.detach().to(self._backing))

    def put_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move weights and buffers to the device; `Module.to` cannot, as the kind of tensor changes."""
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    moved = torch.nn.Parameter(self.put(weight), weight.requires_grad)
                    module._parameters[name] = moved
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.put(buffer)
        return model

    @contextmanager
    def kept(self, *, without: Any = ()) -> Iterator[SimpleNamespace]:
        """Add up what autograd keeps for the backward pass inside: `bytes`, each storage once.

        Args:
            without: Tensors that are there anyway, such as weights.
        """
        total = SimpleNamespace(bytes=0)
        storages = {_storage(tensor)._cdata: _storage(tensor) for tensor in without}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = _storage(tensor)
            if storage._cdata not in storages:
                # The storage is held, or another could take its address.
                storages[storage._cdata] = storage
                total.bytes += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name == "_pin_memory":
            return args[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wrapped = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        target = kwargs.get("device")
        to_cuda = target is not None and torch.device(target).type == "cuda"
        if not wrapped and not to_cuda:
            return func(*args, **kwargs)
        if self._is_copy_to_host(func, args, target):
            self.reads[_site()] += 1
            return func(*_unwrap(args), **_unwrap(kwargs))
        if name in ("_to_copy", "copy_") and len(wrapped) < max(len(tensors), 1):
            if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                self.blocking_uploads[_site()] += 1
        else:
            _check_devices(name, tensors)
        self._count(func, name, args)
        if target is not None:
            kwargs["device"] = self._backing
        compute = PLAIN.get(str(func), func) if self._backing == "cpu" else func
        result = compute(*_unwrap(args), **_unwrap(kwargs))
        return self._wrap(result, wrapped)

    def _is_copy_to_host(self, func: Any, args: Any, target: Any) -> bool:
        if func is aten.copy_.default:
            return not isinstance(args[0], CudaTensor)
        named = target is not None and torch.device(target).type == "cpu"
        return func is aten._to_copy.default and named

    def _count(self, func: Any, name: str, args: Any) -> None:
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [each for each in indices if each is not None and each.dtype == torch.bool]
        if name in _READING or masks:
            self.reads[_site()] += 1
        if not func.is_view and name not in _WITHOUT_KERNEL:
            self.kernels[name] += 1

    def _wrap(self, result: Any, arguments: list[CudaTensor]) -> Any:
        known = {id(tensor.backing): tensor for tensor in arguments}

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            # An operator in place returns its argument.
            return known.get(id(leaf)) if id(leaf) in known else CudaTensor(leaf)

        return tree_map(wrap, result)


def _unwrap(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.backing if isinstance(leaf, CudaTensor) else leaf, tree)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "backing", tensor).untyped_storage()


def _check_devices(name: str, tensors: list[torch.Tensor]) -> None:
    """Refuse what CUDA refuses: tensors of the CPU, except single values and indices."""
    for tensor in tensors:
        if not isinstance(tensor, CudaTensor) and tensor.dim() and not name.startswith("index"):
            raise RuntimeError(f"{name}: expected all tensors on cuda:0, and one is on the CPU")


def _site() -> str:
    """Return file and line of the innermost caller that is not torch."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__ and path != "<string>":
            return f"{path.split('site-packages/')[-1].removeprefix(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward pass"


def _scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Choose the kernel that CUDA would: flash in 16 bits without a mask, else the memory-efficient one."""
    options = {"dropout_p": dropout_p, "scale": scale, "is_causal": is_causal}
    if not isinstance(query, CudaTensor):
        return _sdpa(query, key, value, attn_mask, **options, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if isinstance(attn_mask, CausalBias):
        attn_mask, options["is_causal"] = None, True
    if attn_mask is None and query.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(query, key, value, **options)[0]
    if enable_gqa:
        # Of the kernels, only flash takes grouped heads; with them torch falls back to plain products.
        raise NotImplementedError("grouped heads without flash attention")
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), **options
    )[0]


torch.nn.functional.scaled_dot_product_attention = _scaled_dot_product_attention
