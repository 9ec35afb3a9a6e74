"""Weights that are refused: missing ones, ones that are not numbers, pickles that run code; and merged copies."""

import importlib
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from grpo_cli.errors import RunError, SetupError
from grpo_cli.recipe.model import ADAPTER_WEIGHTS


def check_names(path: str, model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Refuse missing weights, which transformers would make random, and layers that it would leave out."""
    absent, others = sorted(missing), sorted(unexpected)
    if not absent:
        own = {_any_layer(name) for name in model.state_dict()}
        if extra := [name for name in others if _any_layer(name) in own]:
            message = (
                f"config.json leaves out layers of {path}: {len(extra)} weights, such as {extra[0]}"
            )
            fix = "correct the number of layers in config.json"
            raise SetupError(message, fix, path="model.path")
        return
    message = f"{path} lacks {len(absent)} of its weights, such as {absent[0]}"
    if others:
        message += f"; it holds {len(others)} that the model does not have, such as {others[0]}"
    other = others[0] if others else ""
    prefix = next((other.removesuffix(each) for each in absent if other.endswith(each)), "")
    if prefix.endswith("."):
        fix = f"remove the prefix `{prefix}` from the names of its tensors"
    elif all("layers" in each or ".h." in each for each in absent):
        fix = "correct the number of layers in config.json, or download the weights again"
    else:
        fix = (
            "download it again, or name a model that was saved with its language-modelling head; if it shares "
            "that with the embeddings, set `tie_word_embeddings: true` in config.json"
        )
    raise SetupError(message, fix, path="model.path")


def _any_layer(name: str) -> str:
    """Return a weight's name with `*` for the layer's number."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def check_sizes(path: str, mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> None:
    """Refuse weights of other sizes than the model's, which transformers would make random."""
    others = sorted(mismatched)
    if not others:
        return
    name, *both = others[0]
    stored, expected = (" × ".join(map(str, size)) for size in both)
    message = (
        f"{len(others)} weights of {path} have other sizes than config.json gives them: "
        f"{name} is {stored}, and should be {expected}"
    )
    fix = "correct config.json (hidden_size, vocab_size, …), or download both again"
    raise SetupError(message, fix, path="model.path")


def check_values(path: str, model: Any) -> None:
    """Refuse weights that are not finite; sums show them without taking memory."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.element_size() == 1:
            continue
        # A sum in half precision can also overflow.
        if not weight.sum().isfinite() and not weight.isfinite().all():
            raise _refused_values(path, name)


def sample_values(path: str, folder: Path) -> None:
    """Refuse weights whose first rows are not finite."""
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in sorted(weights.keys()):
                part = weights.get_slice(name)
                row = part[:1] if part.get_shape() else torch.zeros(1)
                if row.is_floating_point() and row.element_size() > 1 and not row.isfinite().all():
                    raise _refused_values(path, name)


def _refused_values(path: str, name: str, key: str = "model.path") -> SetupError:
    fix = "download the weights again, or name an earlier checkpoint of their training"
    return SetupError(f"{path} has NaN or infinite values in {name}", fix, path=key)


def check_adapter_values(adapter: Path) -> None:
    """Refuse an adapter with weights that are not finite, with a `SetupError`."""
    with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as tensors:
        for name in sorted(tensors.keys()):
            if not tensors.get_tensor(name).isfinite().all():
                raise _refused_values(str(adapter), name, "model.adapter")


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


_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata TensorProperties "
        "ChunkStorageMetadata StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "Path PosixPath PurePosixPath",
    "collections": "OrderedDict",
}
"""Module → what `.metadata` of torch's distributed checkpoints is made of (torch 2.13)."""
_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}
"""Module → what DeepSpeed's shards hold beside tensors and plain values (deepspeed 0.19)."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or name in _METADATA.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


@contextmanager
def weights_only(checkpoint: Path, *, trusted: bool) -> Iterator[None]:
    """Let nothing but tensors and plain values be unpickled from a checkpoint, unless the user has `trusted` it.

    `torch.load(…, weights_only=False)`, as DeepSpeed and `torch.distributed.checkpoint` (torch 2.13) call it, is
    overruled by `TORCH_FORCE_WEIGHTS_ONLY_LOAD`, and their `.metadata` is checked before torch unpickles it.

    Raises `RunError` if it holds objects of other classes.
    """
    if trusted:
        yield
        return
    try:
        for file in sorted(checkpoint.rglob(".metadata")):
            with file.open("rb") as metadata:
                _MetadataUnpickler(metadata).load()
        classes: list[Any] = []
        for module, names in _DEEPSPEED.items():
            # Not installed, or another version.
            with suppress(ImportError, AttributeError):
                loaded = importlib.import_module(module)
                classes += [getattr(loaded, name) for name in names.split()]
        environment = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}
        with mock.patch.dict(os.environ, environment), torch.serialization.safe_globals(classes):
            yield
    except pickle.UnpicklingError as error:
        raise unpickling_error(checkpoint, error) from error


def unpickling_error(checkpoint: Path, error: pickle.UnpicklingError) -> RunError:
    """Return the refusal of a checkpoint that cannot be read with `weights_only`."""
    return RunError(
        f"{checkpoint} is not unpickled, since it holds more than tensors and plain values, or is damaged "
        f"({unpickling_reason(error)})",
        "take another checkpoint; if you trust whoever wrote this one, "
        "--trust-checkpoint reads it anyway, and runs what it holds",
    )


def unpickling_reason(error: pickle.UnpicklingError) -> str:
    """Return what a pickle holds that is not unpickled, without torch's suggestion to load everything."""
    found = re.search(
        r"[Uu]nsupported (?:global: )?GLOBAL \S+|Unsupported \w+: \w+ \S+|it holds \S+", str(error)
    )
    return found[0].strip(". ") if found else "torch does not read it with `weights_only=True`"
