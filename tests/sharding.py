"""Writes a checkpoint's weights again in shards, as real FSDP2 and DeepSpeed ZeRO-3 do (one process each).

    torchrun --nproc-per-node 2 -m tests.sharding fsdp|zero3|send WHOLE BASE SHARDED

WHOLE is a checkpoint as one process saves it, BASE the model below its adapter, SHARDED the folder to write.
`send` writes `sent.pt` there: what FSDP2 sends to vLLM of a bfloat16 model, merged and as an adapter, and its
weights after 200 times.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import peft
import torch
from transformers import AutoModelForCausalLM

from grpo_cli.models.source import is_adapter


def load(whole, base):
    if not is_adapter(whole):
        return AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, whole, is_trainable=True)


def shard_fsdp(model, target):
    """By `fully_shard`, and the function with which accelerate saves a model for the trainer."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model

    split(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
    )
    save_fsdp_model(plugin, Accelerator(cpu=True), model, target, adapter_only=True)


def split(model):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def send(model, target):
    """By TRL's own iteration five times, and as an adapter 200 times."""
    from accelerate import Accelerator

    from grpo_cli.training.vllm_client import VLLMLink
    from grpo_cli.training.vllm_generation import RunGeneration
    from grpo_cli.training.vllm_weights import SyncWatch, read_adapter

    model = model.bfloat16()
    split(model)
    sender = object.__new__(RunGeneration)
    sender.link = VLLMLink(Path(), SyncWatch(), print, print)
    sender.model, sender.accelerator = model, Accelerator(cpu=True)
    sender._dist = SimpleNamespace(
        is_fsdp=True, fsdp_version=2, gather_params=lambda weights: nullcontext()
    )
    for _ in range(5):
        sent = {name: weight.clone() for name, weight in sender._iter_named_params()}
    for _ in range(200):
        adapter = read_adapter(model, sender._dist.gather_params)
    base = {name: weight.full_tensor() for name, weight in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        target.mkdir()
        torch.save({"sent": sent, "adapter": adapter, "base": base}, target / "sent.pt")


def shard_zero3(model, target):
    """By DeepSpeed's engine, whose shards hold optimizer states beside float32 weights."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )
    engine.save_checkpoint(str(target), tag="global_step2")


if __name__ == "__main__":
    kind, whole, base, sharded = sys.argv[1], *map(Path, sys.argv[2:])
    {"fsdp": shard_fsdp, "zero3": shard_zero3, "send": send}[kind](load(whole, base), sharded)
    torch.distributed.barrier()
    sys.stdout.flush()
    # A thread of gloo that releases a tensor while the interpreter ends aborts the process (pytorch issue 179291).
    os._exit(0)
