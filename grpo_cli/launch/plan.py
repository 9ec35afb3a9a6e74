"""The plan of a launch: argv, environment, accelerate's config and who runs where. Pure; starts nothing.

Source: accelerate 1.15, `ClusterConfig` and `accelerate.commands.launch`.
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from grpo_cli.launch.server_plan import UNBOUND, ManagedServer, ServerLocation, plan_managed_server
from grpo_cli.machine import Hardware, is_on_cpu, resolve_num_processes
from grpo_cli.processes import run_module
from grpo_cli.recipe.launch import LaunchConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder

_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_DIRECT = "no_proxy"
"""Hosts that requests reach without a proxy; requests and httpx read it before `NO_PROXY`."""
_THREADS, _SPIN = "OMP_NUM_THREADS", "GOMP_SPINCOUNT"
WORKER = "grpo_cli.training.worker"
"""The module that trains; never imported on this side of the process boundary."""
_SPINS = 1000
"""How often a thread that waits for the others of its process looks again before it sleeps: the default of 300,000
starves other processes on a shared core, and a step beside another training takes twice as long."""
# glibc gives large blocks back to the kernel at once and page-faults them in again on the next step; keeping them
# took a float32 step of SmolLM2-135M from 17 to 13 s.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
_FSDP2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    # Checkpoints hold the weights as one process would save them, so that every tool loads them.
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
_ZERO = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "offload_optimizer_device": "none",
    # Each machine starts its own processes. By default DeepSpeed reaches the others with pdsh and a hostfile.
    "deepspeed_multinode_launcher": "standard",
}
_ZERO3 = {
    "offload_param_device": "none",
    # Each process reads only its part of the weights (`deepspeed.zero.Init`).
    "zero3_init_flag": True,
    # Checkpoints hold full weights, as with FSDP2.
    "zero3_save_16bit_model": True,
}


@dataclass(frozen=True)
class LaunchPlan:
    """What will be started on this machine."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    """Variables added to the current ones; those the user has set win, unless they are derived from
    them (`CUDA_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES`, `no_proxy`)."""
    strategy: str
    """`single`, `ddp`, `fsdp2`, `zero1`, `zero2`, `zero3`, or `custom` for a config of the user's own."""
    num_processes: int
    """Over all machines."""
    num_machines: int
    machine_rank: int
    device: Literal["cpu", "cuda"]
    stall_timeout_s: float | None
    """Seconds without progress after which the run is ended; None waits for ever."""
    accelerate: dict[str, Any] | None
    """accelerate's config, for the run folder; None if it is not needed, or the user's own."""
    server: ManagedServer | None = None

    def command_line(self) -> str:
        """Return the command as one would type it."""
        return shlex.join(self.argv)

    def add_environment(self, present: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the workers, from those of this process."""
        derived = {name: self.environment[name] for name in _DEVICES if name in self.environment}
        if host := self.environment.get(_DIRECT):
            hosts = present.get(_DIRECT) or present.get(_DIRECT.upper())
            derived[_DIRECT] = f"{hosts},{host}" if hosts else host
        return {**_merge(self.environment, present), **derived}

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {**asdict(self), "argv": list(self.argv)}


def plan_launch(
    recipe: Recipe,
    run: Path,
    hardware: Hardware,
    worker: str = WORKER,
    location: ServerLocation | None = None,
) -> LaunchPlan:
    """Work out what to start for a recipe on this machine.

    A single process is started directly: a launcher in between would only be one more process to lose.
    """
    launch = recipe.launch
    processes = resolve_num_processes(recipe, hardware)
    device: Literal["cpu", "cuda"] = "cpu" if is_on_cpu(launch, hardware) else "cuda"
    strategy = _choose_strategy(launch, processes)
    single = strategy == "single"
    launcher = () if single else _accelerate(launch, processes, RunFolder(run).accelerate)
    module = run_module(worker) if single else ("-m", worker)
    server = None
    if recipe.generation.has_managed_server:
        devices = () if device == "cpu" else _split_devices(recipe, hardware)[1]
        server = plan_managed_server(
            recipe,
            location or ServerLocation(),
            device=device,
            visible_devices=hardware.select(devices),
        )
    return LaunchPlan(
        argv=(*launcher, *module, str(run)),
        environment=_environment(recipe, processes, hardware, cpu=device == "cpu"),
        strategy=strategy,
        num_processes=processes,
        num_machines=launch.num_machines,
        machine_rank=launch.machine_rank,
        device=device,
        stall_timeout_s=launch.stall_timeout_s,
        accelerate=None
        if single or strategy == "custom"
        else build_config(
            launch,
            strategy,
            processes,
            mixed_precision=recipe.mixed_precision(cpu=device == "cpu"),
        ),
        server=server,
    )


def _split_devices(recipe: Recipe, hardware: Hardware) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the GPUs of training, and those of a managed server, which takes the last."""
    count = len(hardware.devices) - recipe.generation.managed_gpus
    return hardware.devices[:count], hardware.devices[count:]


def _choose_strategy(launch: LaunchConfig, processes: int) -> str:
    if launch.accelerate_config is not None:
        return "custom"
    if launch.strategy in ("auto", "single", "ddp"):
        return "single" if processes == 1 else "ddp"
    return launch.strategy


def _accelerate(launch: LaunchConfig, processes: int, config: Path) -> tuple[str, ...]:
    """Return the command of `accelerate launch`; the user's own config is overridden in who runs where."""
    flags: dict[str, Any] = {
        "--config_file": launch.accelerate_config or config,
        # Otherwise it leaves a temporary folder behind if it is killed.
        "--log_dir": config.parent / "torchelastic",
    }
    if launch.accelerate_config is not None:
        flags |= {
            "--num_processes": processes,
            "--num_machines": launch.num_machines,
            "--machine_rank": launch.machine_rank,
            "--main_process_port": launch.main_process_port or 0,
        }
        if launch.num_machines > 1:
            flags["--main_process_ip"] = launch.main_process_ip or ""
    named = [str(part) for flag in flags.items() for part in flag]
    return (*run_module("accelerate.commands.launch"), *named)


def _environment(
    recipe: Recipe, processes: int, hardware: Hardware, *, cpu: bool
) -> dict[str, str]:
    environment = {
        "PYTHONUNBUFFERED": "1",
        # As `-P` for what the launcher starts: no file in the working directory shadows a library.
        "PYTHONSAFEPATH": "1",
        # Whatever the locale: recipes, data and prompts are UTF-8.
        "PYTHONUTF8": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if recipe.generation.asks_server:
        # A proxy would not find addresses of this machine, or of a cluster's nodes.
        host = urlsplit(recipe.generation.vllm.address or "").hostname
        environment[_DIRECT] = host or "127.0.0.1"
    if recipe.launch.use_cpu:
        environment |= hardware.select(())
    elif not cpu:
        devices, _ = _split_devices(recipe, hardware)
        # A single process that sees several would train on all of them with DataParallel, which TRL refuses.
        used = devices[:1] if processes == 1 else devices
        if used != hardware.devices:
            environment |= hardware.select(used)
    if not cpu:
        return environment
    if recipe.generation.backend == "vllm":
        environment |= UNBOUND
    local_processes = processes // recipe.launch.num_machines
    return {**environment, **_plan_cpu_environment(hardware, local_processes)}


def _plan_cpu_environment(hardware: Hardware, local_processes: int) -> dict[str, str]:
    threads = max(hardware.cpus // max(local_processes, 1), 1)
    linux = {_SPIN: str(_SPINS), **_KEEP_MEMORY} if hardware.linux else {}
    return {_THREADS: str(threads), **linux}


def _merge(planned: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str]:
    """Return the present variables, and the planned ones that contradict none of them."""
    # A spin count would override the user's own wait policy.
    dropped = _SPIN if "OMP_WAIT_POLICY" in present else None
    return {**{name: value for name, value in planned.items() if name != dropped}, **present}


def set_thread_env(hardware: Hardware, local_processes: int) -> None:
    """Limit this process to the threads of one of `local_processes` workers; call before torch is imported."""
    planned = _plan_cpu_environment(hardware, local_processes)
    threads = {name: planned[name] for name in (_THREADS, _SPIN) if name in planned}
    os.environ.update(_merge(threads, os.environ))


def build_config(
    launch: LaunchConfig, strategy: str, processes: int, *, mixed_precision: str
) -> dict[str, Any]:
    """Return accelerate's config of a launch with several processes.

    Args:
        processes: Over all machines.
        mixed_precision: `no`, `bf16` or `fp16`: what DeepSpeed and FSDP2 compute in.
    """
    config: dict[str, Any] = {
        # Makes accelerate start several processes on a CPU too: MULTI_CPU silently starts one.
        "distributed_type": "MULTI_GPU",
        "num_processes": processes,
        "num_machines": launch.num_machines,
        "machine_rank": launch.machine_rank,
        "main_process_port": launch.main_process_port or 0,
        "mixed_precision": "no" if strategy == "ddp" else mixed_precision,
    }
    if launch.num_machines > 1:
        config["main_process_ip"] = launch.main_process_ip
    if strategy == "fsdp2":
        config |= {"distributed_type": "FSDP", "fsdp_config": dict(_FSDP2)}
    elif strategy.startswith("zero"):
        stage = int(strategy[-1])
        zero = {"zero_stage": stage, **_ZERO, **(_ZERO3 if stage == 3 else {})}
        config |= {"distributed_type": "DEEPSPEED", "deepspeed_config": zero}
    return config
