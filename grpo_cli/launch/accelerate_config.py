"""accelerate's config for each strategy. Pure; the run folder keeps it as `launch/accelerate.yaml`.

Source: accelerate 1.15, `ClusterConfig` and `accelerate.commands.launch`.
"""

from typing import Any

from grpo_cli.recipe.launch import LaunchConfig

_FSDP2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    # Checkpoints hold the weights as one process would save them, so that every tool loads them.
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}


def build_config(
    launch: LaunchConfig, strategy: str, processes: int, *, mixed_precision: str
) -> dict[str, Any]:
    """The config of a launch with several processes.

    Args:
        launch: The recipe's section.
        strategy: `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`.
        processes: Over all machines.
        mixed_precision: `no`, `bf16` or `fp16`: what DeepSpeed and FSDP2 compute in.
    """
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        # What makes accelerate start several processes on a CPU too: MULTI_CPU starts one, in silence.
        "distributed_type": "MULTI_GPU",
        "num_processes": processes,
        "num_machines": launch.num_machines,
        "machine_rank": launch.machine_rank,
        "main_process_port": launch.main_process_port or 0,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "use_cpu": False,
        "debug": False,
    }
    if launch.num_machines > 1:
        config["main_process_ip"] = launch.main_process_ip
    if strategy == "fsdp2":
        config |= {
            "distributed_type": "FSDP",
            "mixed_precision": mixed_precision,
            "fsdp_config": dict(_FSDP2),
        }
    if strategy.startswith("zero"):
        config |= {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": mixed_precision,
            "deepspeed_config": _zero(int(strategy[-1])),
        }
    return config


def _zero(stage: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_stage": stage,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "offload_optimizer_device": "none",
        # Each machine starts its own processes. By default DeepSpeed reaches the others with pdsh and a hostfile.
        "deepspeed_multinode_launcher": "standard",
    }
    if stage == 3:
        # The last one lets checkpoints hold whole weights, as with FSDP2.
        config |= {
            "offload_param_device": "none",
            "zero3_init_flag": False,
            "zero3_save_16bit_model": True,
        }
    return config
