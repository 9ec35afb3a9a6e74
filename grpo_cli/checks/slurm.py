"""Checks of `launch.slurm`."""

import re
from collections.abc import Iterator
from dataclasses import replace

from grpo_cli.checks.context import CheckContext
from grpo_cli.checks.launch import leaves_idle
from grpo_cli.issues import Issue
from grpo_cli.recipe.launch import SlurmConfig
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

_LEAST_MIB = 1024
"""Memory of a node below which a job's `mem` must lack its unit."""


def check_slurm(context: CheckContext) -> Iterator[Issue]:
    """Find options that sbatch would refuse, and jobs whose nodes do not fit the processes."""
    recipe, launch, slurm = context.recipe, context.recipe.launch, context.recipe.launch.slurm
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
        idle = leaves_idle(launch, processes, gpus, "warning")
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
