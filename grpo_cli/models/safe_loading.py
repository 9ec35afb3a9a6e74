"""Reading checkpoints that hold pickles without running what they may hold."""

import importlib
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_cli.errors import RunError

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
