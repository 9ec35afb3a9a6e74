"""The reference model: where TRL loads it, and an adapter as the reference that `sync_ref_model` changes."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import ParameterList
from trl import SyncRefModelCallback
from trl.trainer import grpo_trainer

from grpo_cli.upstream import replaced


def reference_on(device: torch.device | None) -> AbstractContextManager[None]:
    """Make TRL read the reference model to a device too: with several processes its `device_map` is None."""
    read = grpo_trainer.create_model_from_path

    def read_to_device(path: str, **options: Any) -> Any:
        if device is not None and options.get("device_map", "auto") is None:
            options["device_map"] = {"": device}
        return read(path, **options)

    return replaced(grpo_trainer, create_model_from_path=read_to_device)


class SyncAdapterCallback(SyncRefModelCallback):
    """Mixes the trained adapter into the reference, a copy of it at the start.

    Source: trl 1.16, `SyncRefModelCallback`, which mixes models; `GRPOTrainer.__init__`, which makes the copy.
    """

    def __init__(self, model: Any) -> None:
        """Find the weights of the adapters `default` (trained) and `ref` in a `peft.PeftModel`."""
        weights = dict(model.named_parameters())
        names = [name for name in weights if ".default." in name]
        self._trained = ParameterList(weights[name] for name in names)
        reference = ParameterList(weights[name.replace(".default.", ".ref.")] for name in names)
        super().__init__(ref_model=reference, accelerator=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mix the weights if it is time."""
        super().on_step_end(args, state, control, **{**more, "model": self._trained})


def sync_adapter(trainer: Any) -> ParameterList:
    """Make the reference of a trainer with an adapter follow that adapter; return the reference."""
    callback = SyncAdapterCallback(trainer.accelerator.unwrap_model(trainer.model))
    trainer.add_callback(callback)
    reference: ParameterList = callback.ref_model
    return reference
