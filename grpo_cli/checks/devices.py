"""Processes, machines, Slurm jobs, precision, and the packages that a launch needs."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from grpo_cli.errors import install_extra, pip
from grpo_cli.input_files import find_fault
from grpo_cli.issues import Issue, Level
from grpo_cli.machine import Hardware, is_on_cpu
from grpo_cli.recipe.launch import KEEPS_FLOAT32, LaunchConfig, SlurmConfig
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe

_SLURM_HOMES = {
    "chdir": "where the command is run",
    "job-name": "`name`",
    "nodes": "`launch.num_machines`",
    "ntasks": "one for each machine",
    "ntasks-per-node": "1",
    "no-requeue": "`launch.slurm.requeue`",
    "open-mode": "append",
    "output": "a file beside the run folder",
    "parsable": "always on",
    "signal": "`launch.slurm.signal_before_end_s`",
    "wrap": "the script's own",
}
"""Options of sbatch without a key of their own, and what decides them."""
_ELSEWHERE = "`grpo check --gpus N` checks a recipe for another machine"
_LEAST_MIB = 1024
"""Memory of a node below which a job's `mem` must lack its unit."""
_LEAST_TIMEOUT_S = 60
"""Below it, `stall_timeout_s` is shorter than what loading a model or saving it may take."""
_FINE_ENOUGH = 5e-5
"""The learning rate from which an update by AdamW moves a usual weight, of 0.02, by half a step of bfloat16."""
_COMPENSATED = ("use_kahan_summation", "bf16_stochastic_round", "kahan_sum")
"""`optim_args` of optimizers that do not lose what bfloat16 rounds away."""
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


def check_devices(recipe: Recipe, processes: int, hardware: Hardware) -> Iterator[Issue]:
    """Find launches that this machine, the strategy or Slurm would refuse, and packages that are missing."""
    launch = recipe.launch
    cpu = checks_on_cpu(launch, hardware)
    yield from check_gpus(recipe, processes, hardware)
    yield from _check_launch(recipe, processes)
    yield from _check_machines(recipe.launch, processes)
    yield from _check_strategy(recipe.launch, cpu=cpu)
    yield from _check_packages(recipe, cpu=cpu)
    yield from _check_slurm(recipe)


def checks_on_cpu(launch: LaunchConfig, hardware: Hardware) -> bool:
    """Return whether training is known to be on a CPU; a job's nodes may have GPUs that this machine lacks."""
    return is_on_cpu(launch, hardware) and (launch.use_cpu or launch.slurm is None)


def check_gpus(recipe: Recipe, processes: int, hardware: Hardware) -> Iterator[Issue]:
    """Find processes without a GPU, GPUs without a process, and a lone process with nothing to share."""
    launch = recipe.launch
    gpus = (hardware.gpus - recipe.generation.managed_gpus) * launch.num_machines
    if launch.slurm is not None or is_on_cpu(launch, hardware) or gpus <= 0:
        return
    if gpus < processes:
        seen = f"{processes} processes need a GPU each, and training has {gpus}"
        fix = f"set `num_processes: {gpus}`, or `auto`; {_ELSEWHERE}"
        yield Issue(seen, fix, "launch.num_processes")
    elif processes < gpus and not recipe.model.init_kwargs.get("device_map"):
        yield _leaves_idle(launch, processes, gpus, "note")
    if processes == 1 and launch.strategy in KEEPS_FLOAT32:
        seen = f"{launch.strategy} has nothing to share: there is one process"
        yield Issue(seen, "set `strategy: single`", "launch.strategy", level="note")


def _leaves_idle(launch: LaunchConfig, processes: int, gpus: int, level: Level) -> Issue:
    idle = f"leaves {gpus - processes} of the {gpus} GPUs for training idle"
    if launch.strategy == "single":
        return Issue(f"`single` {idle}", "set `strategy: ddp`", "launch.strategy", level=level)
    fix = f"set `num_processes: {gpus}`, or `auto`"
    return Issue(f"{processes} {idle}", fix, "launch.num_processes", level=level)


def _check_launch(recipe: Recipe, processes: int) -> Iterator[Issue]:
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
    elif launch.strategy.startswith("zero") and not _installed("deepspeed"):
        fix = install_extra("deepspeed")
        yield Issue("deepspeed is not installed", fix, "launch.strategy", package="deepspeed")
    elif launch.strategy == "fsdp2" and cpu:
        seen = "fsdp2 shares a model among GPUs; without one accelerate trains copies of it, in silence"
        fix = "set `strategy: ddp`" if launch.use_cpu else f"set `strategy: ddp`; {_ELSEWHERE}"
        yield Issue(seen, fix, "launch.strategy")


def _check_packages(recipe: Recipe, *, cpu: bool) -> Iterator[Issue]:
    attention, path = recipe.model.attn_implementation or "", "model.attn_implementation"
    if attention.startswith("flash_attention"):
        fix = "set `attn_implementation: sdpa`, or remove it"
        if cpu:
            yield Issue(f"{attention} needs a GPU", fix, path)
        elif not _installed("flash_attn") and not _installed("kernels"):
            seen = f"{attention} needs flash-attn, which is not installed"
            fix = f"{pip('install flash-attn --no-build-isolation')}, or {fix}"
            yield Issue(seen, fix, path, package="flash-attn")
    bits = recipe.model.quantization
    if bits is not None and recipe.launch.use_cpu:
        seen = f"{bits} needs a GPU, and `launch.use_cpu` is true"
        yield Issue(seen, "remove `quantization`, or `use_cpu`", "model.quantization")
    if recipe.generation.backend == "vllm" and not _installed("vllm"):
        fix = f"{install_extra('vllm')}, or set `generation.backend: transformers`"
        yield Issue("vllm is not installed", fix, "generation.backend", package="vllm")
    if recipe.setting("use_liger_kernel") and not _installed("liger_kernel"):
        fix = f"{pip('install liger-kernel')}, or remove `use_liger_kernel`"
        path, package = "training.use_liger_kernel", "liger-kernel"
        yield Issue("liger-kernel is not installed", fix, path, package=package)
    optimizer = str(recipe.setting("optim"))
    needed = find_package(optimizer)
    without = "or remove `optim`: adamw_torch_fused needs nothing more"
    if needed is not None and needed[0] == "bitsandbytes" and recipe.launch.use_cpu:
        seen = f"the optimizer {optimizer} needs a GPU, and `launch.use_cpu` is true"
        yield Issue(seen, f"remove `use_cpu`, {without}", "training.optim")
    elif needed is not None and not _installed(needed[0]):
        seen = f"the optimizer {optimizer} needs {needed[0]}, which is not installed"
        yield Issue(seen, f"{needed[1]}, {without}", "training.optim", package=needed[0])


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def find_package(optimizer: str) -> tuple[str, str] | None:
    """Return the module that brings an optimizer, and how to install it; None if torch has it."""
    for beginning, (module, name) in _OPTIMIZER_PACKAGES.items():
        if optimizer.startswith(beginning):
            return module, pip(f"install {name}") if name else install_extra("quantization")
    return None


def _check_slurm(recipe: Recipe) -> Iterator[Issue]:
    launch, slurm = recipe.launch, recipe.launch.slurm
    if slurm is None:
        return
    homes = {name.replace("_", "-"): f"`launch.slurm.{name}`" for name in SlurmConfig.model_fields}
    homes |= _SLURM_HOMES
    for name in slurm.options:
        if home := homes.get(name):
            seen = f"`{name}` is set already (by {home})" if "`" in home else f"`{name}` is {home}"
            fix = f"use {home}" if "`launch." in home or home == "`name`" else "remove it"
            yield Issue(seen, fix, f"launch.slurm.options.{name}")
    if slurm.server_nodes:
        yield from _check_server_node(recipe, slurm)
    yield from _check_job(recipe, slurm)
    if launch.use_cpu and slurm.gpus_per_node is not None:
        seen = "the job asks for GPUs, and `launch.use_cpu` leaves them idle"
        yield Issue(seen, "remove one of them", "launch.slurm.gpus_per_node", level="warning")
    if slurm.gpus_per_node is not None and slurm.cpus_per_task is None:
        seen = "many clusters give a job that does not ask one processor a node, which starves the GPUs"
        fix = "set `launch.slurm.cpus_per_task` (8 or more for each GPU)"
        yield Issue(seen, fix, "launch.slurm", level="note")
    if recipe.setting("save_on_each_node"):
        seen = "the machines of a job write into one folder, and would overwrite each other's files"
        yield Issue(seen, "remove it", "training.save_on_each_node")


def _check_job(recipe: Recipe, slurm: SlurmConfig) -> Iterator[Issue]:
    """Find a time, a memory and a number of GPUs that the training cannot use as they are."""
    limit, early = _read_time(slurm.time), slurm.signal_before_end_s
    if limit and limit <= early:
        seen = f"the job ends after {limit} s, and `signal_before_end_s` stops it {early} s before that"
        fix = 'write a longer time, such as "04:00:00", or a smaller `signal_before_end_s`'
        yield Issue(f"{seen}, so nothing is trained", fix, "launch.slurm.time")
    elif re.fullmatch(r"\d+:\d+", str(slurm.time)) and limit < 3600:
        minutes = str(slurm.time).partition(":")[0]
        seen = f"`{slurm.time}` is {limit / 60:g} minutes: sbatch reads two numbers as minutes and seconds"
        fix = f'if hours are meant, write "{slurm.time}:00"; otherwise `{int(minutes)}`, which is minutes too'
        yield Issue(seen, fix, "launch.slurm.time", level="warning")
    mem = str(slurm.mem or "")
    if mem.isdecimal() and 0 < int(mem) < _LEAST_MIB:
        seen = f"{mem} without a unit is {mem} MiB, less than PyTorch alone takes"
        yield Issue(seen, f"write `{mem}G`", "launch.slurm.mem")
    processes, launch = recipe.launch.num_processes, recipe.launch
    if processes == "auto" or slurm.gpus is None or launch.use_cpu:
        return
    taken = 0 if slurm.server_nodes else recipe.generation.managed_gpus
    gpus = slurm.gpus * launch.num_machines - taken
    change = ", or change `launch.slurm.gpus_per_node`"
    if 0 < gpus < processes:
        seen = f"{processes} processes need a GPU each, and training has {gpus} of the job's"
        fix = f"set `num_processes: {gpus}`, or `auto`{change}"
        yield Issue(seen, fix, "launch.num_processes")
    elif processes < gpus:
        idle = _leaves_idle(launch, processes, gpus, "warning")
        yield replace(idle, fix=f"{idle.fix}{change}")


def _read_time(time: int | str | None) -> int:
    """Return a time limit of sbatch in seconds; 0 if there is none."""
    days, _, clock = str(time or "").rpartition("-")
    if not clock[:1].isdecimal():
        return 0
    parts = [int(part) for part in clock.split(":")]
    # Without days, one or two parts begin with minutes.
    parts = parts if days or parts[2:] else [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_server_node(recipe: Recipe, slurm: SlurmConfig) -> Iterator[Issue]:
    path, vllm = "launch.slurm.server_nodes", recipe.generation.vllm
    if recipe.generation.backend != "vllm" or vllm.mode != "server":
        seen = "a node for the vLLM server is of no use: nothing would talk to it"
        fix = "set `generation.backend: vllm` with `generation.vllm.mode: server`, or remove it"
        yield Issue(seen, fix, path)
    elif recipe.launch.use_cpu:
        seen = "on a CPU weights are handed to the vLLM server in a folder of the same machine"
        fix = "remove `server_nodes`: `grpo train` then runs the server beside the training"
        yield Issue(seen, fix, path)
    elif slurm.gpus is not None:
        size = int(recipe.setting("vllm_tensor_parallel_size"))
        if size > slurm.gpus:
            seen = f"is {size}, and the node of the server has {slurm.gpus} GPUs (launch.slurm.gpus_per_node)"
            path = "generation.vllm.tensor_parallel_size"
            yield Issue(seen, f"write {slurm.gpus} or less", path)


# --- precision ---------------------------------------------------------------------------------


def settle_dtype(loaded: LoadedRecipe) -> LoadedRecipe:
    """Replace `model.dtype: auto` by float32 if all weights are trained."""
    recipe = loaded.recipe
    if recipe is None or recipe.model.dtype != "auto" or not _trains_all(recipe):
        return loaded
    model = recipe.model.model_copy(update={"dtype": "float32"})
    return replace(loaded, recipe=recipe.model_copy(update={"model": model}))


def check_precision(recipe: Recipe, hardware: Hardware) -> Iterator[Issue]:
    """Find 16-bit weights that lose what they learn, and bfloat16 that the processor emulates.

    Source: trl 1.16, `GRPOTrainer._generate_single_turn`, `unwrapped_model.to(torch.bfloat16)`.
    """
    cpu = is_on_cpu(recipe.launch, hardware)
    extras = recipe.training.extras
    if extras.get("fp16") and extras.get("bf16"):
        seen = "`fp16` and `bf16` are both true, and a model is computed in one precision"
        yield Issue(seen, "remove `fp16`", "training.fp16")
    elif extras.get("fp16") and cpu:
        seen = "fp16 needs a GPU, and this training is on a CPU"
        yield Issue(seen, "remove `fp16`", "training.fp16")
    names = {"bf16": "bfloat16", "fp16": "float16", "no": None}
    mixed, dtype = names[recipe.training.mixed_precision(cpu=cpu)], recipe.model.dtype
    if _loses_updates(recipe, mixed):
        rate = float(recipe.setting("learning_rate"))
        seen = (
            f"with all weights in bfloat16, a learning rate of {rate:g} is lost: a weight changes only if its "
            "update is more than 1/512 of it, and most updates are rounded away"
        )
        fix = (
            "set `dtype: float32` (on a GPU it is computed in bfloat16 all the same), or add `lora`"
        )
        yield Issue(seen, fix, "model.dtype")
    trained = dtype if _trains_all(recipe) else "float32"
    if mixed == trained == "float16":
        seen = "with fp16, torch scales gradients and refuses those of float16 weights"
        yield Issue(
            seen, "set `dtype: float32`: it is computed in float16 all the same", "model.dtype"
        )
    attention = str(recipe.model.attn_implementation)
    if attention.startswith("flash_attention") and mixed is None and dtype == "float32":
        seen = f"{attention} computes in 16 bits alone, and these weights are float32 without `bf16` or `fp16`"
        yield Issue(seen, "set `training.bf16: true`", "model.attn_implementation", level="warning")
    batching = recipe.generation.backend == "transformers_continuous_batching"
    if batching and mixed not in (None, trained):
        seen = f"before each sampling it turns the whole model to {mixed}, and rounds the trained weights with it"
        fix = "set `backend: vllm` or `backend: transformers`, or `training.bf16: false`"
        yield Issue(seen, fix, "generation.backend")
    if not cpu or hardware.bfloat16 is not False:
        return
    for path, is_set, value in (
        ("model.dtype", dtype == "bfloat16", "auto"),
        ("training.bf16", extras.get("bf16"), "false"),
    ):
        if is_set:
            seen = (
                "this processor emulates bfloat16 (it has none of avx512_bf16, amx_bf16 and ARM's bf16), which "
                "takes two to ten times as long as float32"
            )
            yield Issue(seen, f"set `{path}: {value}`", path, level="warning")


def _trains_all(recipe: Recipe) -> bool:
    return recipe.model.lora is None and recipe.model.quantization is None


def _loses_updates(recipe: Recipe, mixed: str | None) -> bool:
    rate, launch = float(recipe.setting("learning_rate")), recipe.launch
    if not _trains_all(recipe) or recipe.model.dtype != "bfloat16" or rate >= _FINE_ENOUGH:
        return False
    if launch.accelerate_config or (mixed and launch.strategy in KEEPS_FLOAT32):
        return False
    options = str(recipe.setting("optim_args") or "").lower().replace(" ", "")
    return not any(f"{name}=true" in options for name in _COMPENSATED)
