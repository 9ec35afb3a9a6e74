"""Checks of what a launch needs: devices, processes, machines, strategy, and packages."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import install_extra, pip
from grpo_cli.input_files import find_fault
from grpo_cli.issues import Issue, Level
from grpo_cli.machine import Hardware
from grpo_cli.recipe.launch import KEEPS_FLOAT32, LaunchConfig
from grpo_cli.recipe.recipe import Recipe

_ELSEWHERE = "`grpo check --gpus N` checks a recipe for another machine"

_LEAST_TIMEOUT_S = 60
"""Below it, `stall_timeout_s` is shorter than what loading a model or saving it may take."""
_OPTIMIZER_PACKAGES = {
    "galore_": ("galore_torch", "galore-torch"),
    "apollo_": ("apollo_torch", "apollo-torch"),
    "schedule_free_": ("schedulefree", "schedulefree"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "adalomo": ("lomo_optim", "lomo-optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "adamw_anyprecision": ("torchdistx", "torchdistx"),
    "adamw_torch_4bit": ("torchao", "torchao"),
    "adamw_torch_8bit": ("torchao", "torchao"),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_", "ademamix", "lion_", "paged_", "rmsprop_bnb"),
        ("bitsandbytes", ""),
    ),
}
"""Of optimizers whose names begin so: the module, and its distribution (empty for our own extra). All others
need nothing more."""


def check_launch(context: CheckContext) -> Iterator[Issue]:
    """Find launches that this machine or the strategy would refuse."""
    recipe, processes = context.recipe, context.num_processes
    yield from check_gpus(recipe, processes, context.hardware)
    yield from _check_processes(recipe, processes)
    yield from _check_machines(recipe.launch, processes)
    yield from _check_strategy(recipe.launch, cpu=context.on_cpu)


def check_gpus(recipe: Recipe, processes: int, hardware: Hardware) -> Iterator[Issue]:
    """Find processes without a GPU, GPUs without a process, and a lone process with nothing to share."""
    launch = recipe.launch
    gpus = (hardware.gpus - recipe.generation.managed_gpus) * launch.num_machines
    if launch.slurm is not None or launch.use_cpu or gpus <= 0:
        return
    if gpus < processes:
        seen = f"{processes} processes need a GPU each, and training has {gpus}"
        fix = f"set `num_processes: {gpus}`, or `auto`; {_ELSEWHERE}"
        yield Issue(seen, fix, "launch.num_processes")
    elif processes < gpus and not recipe.model.init_kwargs.get("device_map"):
        yield leaves_idle(launch, processes, gpus, "note")
    if processes == 1 and launch.strategy in KEEPS_FLOAT32:
        seen = f"{launch.strategy} has nothing to share: there is one process"
        yield Issue(seen, "set `strategy: single`", "launch.strategy", level="note")


def leaves_idle(launch: LaunchConfig, processes: int, gpus: int, level: Level) -> Issue:
    """Return that GPUs for training would be idle."""
    idle = f"leaves {gpus - processes} of the {gpus} GPUs for training idle"
    if launch.strategy == "single":
        return Issue(f"`single` {idle}", "set `strategy: ddp`", "launch.strategy", level=level)
    fix = f"set `num_processes: {gpus}`, or `auto`"
    return Issue(f"{processes} {idle}", fix, "launch.num_processes", level=level)


def _check_processes(recipe: Recipe, processes: int) -> Iterator[Issue]:
    launch = recipe.launch
    if processes > 1 and recipe.model.init_kwargs.get("device_map"):
        seen = f"spreads one model over the GPUs, and {processes} processes hold a copy each"
        fix = "remove it, or set `launch.num_processes: 1`"
        yield Issue(seen, fix, "model.init_kwargs.device_map")
    if launch.stall_timeout_s is not None and launch.stall_timeout_s < _LEAST_TIMEOUT_S:
        seen = f"{launch.stall_timeout_s:g} seconds: a step or a checkpoint that takes longer ends the run"
        fix = "set it to 3600, or remove it (the default is 3600)"
        yield Issue(seen, fix, "launch.stall_timeout_s", level="warning")
    if launch.strategy == "single" and launch.num_machines > 1:
        seen = f"`single` is one process, but num_machines is {launch.num_machines}"
        yield Issue(seen, "set `strategy: ddp`, or `num_machines: 1`", "launch.strategy")
    elif launch.strategy == "single" and processes > 1:
        seen = f"`single` is one process, but num_processes is {processes}"
        yield Issue(seen, "set `strategy: ddp`, or `num_processes: 1`", "launch.strategy")


def _check_machines(launch: LaunchConfig, processes: int) -> Iterator[Issue]:
    machines, rank = launch.num_machines, launch.machine_rank
    if rank >= machines:
        seen = f"{machines} machines are numbered 0 to {machines - 1} (got {rank})"
        fix = "give each machine its own number with --set launch.machine_rank=N"
        if machines == 1:
            seen = f"there is one machine, number 0 (got {rank})"
            fix = "remove it, or set `num_machines`"
        yield Issue(seen, fix, "launch.machine_rank")
    for key in ("main_process_ip", "main_process_port"):
        if machines > 1 and getattr(launch, key) is None:
            seen = f"is needed with {machines} machines"
            fix = f"set `launch.{key}` to that of machine 0, the same on all machines"
            if launch.slurm is None:
                yield Issue(seen, fix, f"launch.{key}")
            else:
                seen, fix = (
                    f"{seen}; a job sets it by itself",
                    f"submit with `grpo train --slurm`, or {fix}",
                )
                yield Issue(seen, fix, f"launch.{key}", level="note")
    ip = launch.main_process_ip or ""
    if host := re.fullmatch(r"\w+://([^:/]+).*|([^:/]+):\d+", ip):
        fix = (
            f"write `main_process_ip: {host[1] or host[2]}`; the port is `launch.main_process_port`"
        )
        yield Issue(f"should be an address alone (got {ip!r})", fix, "launch.main_process_ip")
    elif machines > 1 and ip.startswith(("127.", "localhost", "::1")):
        seen = f"{ip} is each machine itself, so {machines} machines never find each other"
        fix = "write the address of machine 0 in their network"
        yield Issue(seen, fix, "launch.main_process_ip", level="warning")
    if processes % machines and launch.strategy != "single":
        seen = f"{processes} processes do not spread evenly over {machines} machines"
        yield Issue(seen, f"use a multiple of {machines}", "launch.num_processes")


def _check_strategy(launch: LaunchConfig, *, cpu: bool) -> Iterator[Issue]:
    config = launch.accelerate_config
    if config is not None:
        if launch.strategy != "auto":
            seen = "is not read beside `accelerate_config`"
            yield Issue(seen, "remove one of them", "launch.strategy")
        if fault := find_fault(config):
            yield Issue(fault, "correct the path", "launch.accelerate_config")
        elif '"zero_optimization"' in (text := Path(config).read_text(errors="replace")):
            stage = re.search(r'"stage"\s*:\s*([123])', text)
            seen = "is a config of DeepSpeed, not of accelerate"
            fix = f"remove it, and set `launch.strategy: zero{stage[1] if stage else 2}`"
            yield Issue(seen, fix, "launch.accelerate_config")
    elif launch.strategy.startswith("zero") and not has_module("deepspeed"):
        fix = install_extra("deepspeed")
        yield Issue("deepspeed is not installed", fix, "launch.strategy", package="deepspeed")
    elif launch.strategy == "fsdp2" and cpu:
        seen = "fsdp2 shares a model among GPUs; without one accelerate trains copies of it, in silence"
        fix = "set `strategy: ddp`" if launch.use_cpu else f"set `strategy: ddp`; {_ELSEWHERE}"
        yield Issue(seen, fix, "launch.strategy")


def check_packages(context: CheckContext) -> Iterator[Issue]:
    """Find packages and devices that a setting needs and this machine lacks."""
    recipe = context.recipe
    attention, path = recipe.model.attn_implementation or "", "model.attn_implementation"
    if attention.startswith("flash_attention"):
        fix = "set `attn_implementation: sdpa`, or remove it"
        if context.on_cpu:
            yield Issue(f"{attention} needs a GPU", fix, path)
        elif not has_module("flash_attn") and not has_module("kernels"):
            seen = f"{attention} needs flash-attn, which is not installed"
            fix = f"{pip('install flash-attn --no-build-isolation')}, or {fix}"
            yield Issue(seen, fix, path, package="flash-attn")
    bits = recipe.model.quantization
    if bits is not None and recipe.launch.use_cpu:
        seen = f"{bits} needs a GPU, and `launch.use_cpu` is true"
        yield Issue(seen, "remove `quantization`, or `use_cpu`", "model.quantization")
    if recipe.generation.backend == "vllm" and not has_module("vllm"):
        fix = f"{install_extra('vllm')}, or set `generation.backend: transformers`"
        yield Issue("vllm is not installed", fix, "generation.backend", package="vllm")
    if recipe.setting("use_liger_kernel") and not has_module("liger_kernel"):
        fix = f"{pip('install liger-kernel')}, or remove `use_liger_kernel`"
        path, package = "training.use_liger_kernel", "liger-kernel"
        yield Issue("liger-kernel is not installed", fix, path, package=package)
    optimizer = str(recipe.setting("optim"))
    needed = find_package(optimizer)
    without = "or remove `optim`: adamw_torch_fused needs nothing more"
    if needed is not None and needed[0] == "bitsandbytes" and recipe.launch.use_cpu:
        seen = f"the optimizer {optimizer} needs a GPU, and `launch.use_cpu` is true"
        yield Issue(seen, f"remove `use_cpu`, {without}", "training.optim")
    elif needed is not None and not has_module(needed[0]):
        seen = f"the optimizer {optimizer} needs {needed[0]}, which is not installed"
        yield Issue(seen, f"{needed[1]}, {without}", "training.optim", package=needed[0])


def has_module(package: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def find_package(optimizer: str) -> tuple[str, str] | None:
    """Return the module that brings an optimizer, and how to install it; None if torch has it."""
    for beginning, (module, name) in _OPTIMIZER_PACKAGES.items():
        if optimizer.startswith(beginning):
            return module, pip(f"install {name}") if name else install_extra("quantization")
    return None
