"""What is sent to vLLM: adapters as they are, or merged in a copy of the weights; and how long sending may hang.

The base weights of a model with adapters are never changed: in bfloat16 merging and unmerging round, so that the
base would drift with every step (trl issue 6688).
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from grpo_cli.errors import RunError
from grpo_cli.models.weights import merge_copy, whole
from grpo_cli.upstream import replaced
from grpo_cli.upstream.vllm import RELOAD_WEIGHTS

Weights = Iterator[tuple[str, torch.Tensor]]
_SILENCE_S = 60.0
_READ_BYTES_S = 50e6
"""Bytes a second at which weights are at least written, read or finalised."""
_TICK_S, _LONGEST_TICK_S = 0.5, 5.0
"""How often progress is looked for; a longer gap means that this process was suspended."""


class SyncWatch:
    """Ends the training if no part of sending weights has made progress for a minute.

    A broadcast over NCCL never returns if the network between two machines is broken, and cannot be interrupted:
    `on_hang` gets the error, and has to end the process.
    """

    def __init__(self, on_hang: Callable[[RunError], None] = print) -> None:
        self._on_hang = on_hang
        self._step = ""
        self._limit_s = _SILENCE_S
        self._silent_s = 0.0
        self.sent_bytes = 0
        """Of the tensors that were taken since watching began."""

    def note(self, step: str, num_bytes: int = 0) -> None:
        """Record progress: what begins now, and how many bytes it has to write, read or finalise."""
        self._step, self._silent_s = step, 0.0
        self._limit_s = _SILENCE_S + num_bytes / _READ_BYTES_S

    def count(self, weights: Weights) -> Weights:
        """Yield weights; each one is progress."""
        for count, (name, tensor) in enumerate(weights):
            self.sent_bytes += tensor.nbytes
            self.note(f"{count} tensors")
            yield name, tensor

    @contextmanager
    def active(self, target: str, fix: str) -> Iterator[None]:
        """Watch what is done inside; `target` and `fix` are for the message."""
        ended = threading.Event()
        self.sent_bytes = 0
        self.note("nothing was sent")
        threading.Thread(target=self._watch, args=(ended, target, fix), daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, ended: threading.Event, target: str, fix: str) -> None:
        looked = time.monotonic()
        while not ended.wait(_TICK_S):
            now = time.monotonic()
            self._silent_s += min(now - looked, _LONGEST_TICK_S)
            looked = now
            if self._silent_s > self._limit_s:
                silence = f"no progress for {self._silent_s:.0f} s after {self._step}"
                self._on_hang(RunError(f"sending weights to {target} hangs: {silence}", fix))
                return


def reload_from_folder(
    weights: Weights, folder: Path, watch: SyncWatch, post: Callable[[dict[str, Any], int], Any]
) -> Any:
    """Pass weights to a vLLM server on a CPU of this machine.

    Args:
        weights: By the names of a checkpoint.
        post: Sends a body to `COLLECTIVE_RPC`; also gets the number of bytes that the server has to read.
    """
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        watch.note(f"{len(tensors)} tensors: they are written to {folder}", num_bytes)
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        body = {"method": RELOAD_WEIGHTS, "kwargs": {"weights_path": str(folder)}}
        return post(body, num_bytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def base_kept(model: Any) -> Iterator[None]:
    """Keep TRL from merging adapters into the weights before it sends them: use `merge_weights`."""
    if not isinstance(model, PeftModel):
        yield
        return

    def leave(*args: Any, **options: Any) -> None:
        pass

    with replaced(model, merge_adapter=leave, unmerge_adapter=leave):
        yield


def merge_weights(model: Any, weights: Weights) -> Weights:
    """Yield the weights of a model, with LoRA adapters merged in a copy of one layer at a time.

    Every process of a sharded model (FSDP2) has to iterate: layers are gathered on the way.

    Args:
        weights: Its whole weights, by the names that TRL sends them under.

    Raises:
        RunError: A weight with an adapter is not among them.
    """
    layers = dict(_adapted_layers(model))
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        owner = name.rpartition(".")[0]
        if owner in layers:
            sums = merge_copy(layers.pop(owner))
            merged = {f"{owner}.{leaf}": total for leaf, total in sums.items()}
        yield name, merged.pop(name, tensor)
    if layers:
        raise RunError(
            f"{len(layers)} weights with an adapter were not sent to vLLM",
            "`generation.backend: transformers`, or fewer modules in `model.lora.target_modules`",
        )


def _adapted_layers(model: Any) -> Iterator[tuple[str, LoraLayer]]:
    """Yield the layers with an adapter, by their names in the checkpoint of the base."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            name = name.removeprefix("base_model.model.").replace("_checkpoint_wrapped_module.", "")
            yield name, module


def read_adapter(
    model: PeftModel, gather: Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]
) -> dict[str, torch.Tensor]:
    """Return the active adapter's weights on the CPU, by peft's names, with its scale in `lora_B`.

    vLLM then needs to know nothing of scales: neither rsLoRA's nor those of single layers. Every process of a
    sharded model takes part.

    Args:
        model: With one active LoRA adapter.
        gather: Makes the shards of DeepSpeed ZeRO-3 whole inside.
    """
    (adapter,) = model.active_adapters
    layers = dict(_adapted_layers(model))
    tensors = {}
    pairs = [(layer.lora_A[adapter], layer.lora_B[adapter]) for layer in layers.values()]
    with gather([factor.weight for pair in pairs for factor in pair]):
        for (name, layer), (first, second) in zip(layers.items(), pairs, strict=True):
            factor = whole(second.weight)
            scaled = (factor.float() * layer.scaling[adapter]).to(factor.dtype)
            # A copy: a shard that was gathered is released.
            tensors[f"base_model.model.{name}.lora_A.weight"] = whole(first.weight).to(
                "cpu", copy=True
            )
            tensors[f"base_model.model.{name}.lora_B.weight"] = scaled.cpu()
    return tensors


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write an adapter with a scale of 1 as peft would, for vLLM to read."""
    folder.mkdir(parents=True)
    rank = max(each.shape[0] for name, each in tensors.items() if ".lora_A." in name)
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    contiguous = {name: each.contiguous() for name, each in tensors.items()}
    save_file(contiguous, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
