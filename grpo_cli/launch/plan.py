"""The plan of a launch: argv, environment and who runs where. Pure; nothing is started here."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_cli.launch.accelerate_config import build_config
from grpo_cli.launch.cpu_environment import merge, plan_cpu_environment
from grpo_cli.launch.server_location import ServerLocation
from grpo_cli.launch.server_plan import UNBOUND, ServerPlan, plan_training_server
from grpo_cli.machine import Hardware, is_on_cpu, resolve_num_processes
from grpo_cli.processes import run_module
from grpo_cli.recipe.launch import LaunchConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder

_DEVICES = "CUDA_VISIBLE_DEVICES"
WORKER = "grpo_cli.train.worker"
"""The module that trains; named, never imported, on this side of the process boundary."""


@dataclass(frozen=True, kw_only=True)
class ManagedServer(ServerPlan):
    """A server that is started, watched and ended with the training."""

    group_port: int
    """Where weights are handed over."""
    max_restarts: int


@dataclass(frozen=True)
class LaunchPlan:
    """What will be started on this machine."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    """Variables added to the current ones; those the user has set win, unless they are worked out from
    them (`CUDA_VISIBLE_DEVICES`)."""
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
    """accelerate's config, for the run folder; None where it is not needed, or the user's own."""
    server: ManagedServer | None = None
    """The vLLM server that goes with it."""

    def command_line(self) -> str:
        """The command as one would type it."""
        return shlex.join(self.argv)

    def add_environment(self, present: Mapping[str, str]) -> dict[str, str]:
        """The variables of the workers, from those of this process."""
        decided = {name: self.environment[name] for name in [_DEVICES] if name in self.environment}
        return {**merge(self.environment, present), **decided}

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {**asdict(self), "argv": list(self.argv)}


def plan_launch(
    recipe: Recipe,
    run: Path,
    hardware: Hardware,
    worker: str = WORKER,
    location: ServerLocation | None = None,
) -> LaunchPlan:
    """Works out what to start for a recipe on this machine.

    One process is started directly: a launcher in between would only be one more process to lose.
    """
    processes = resolve_num_processes(recipe, hardware)
    cpu = is_on_cpu(recipe.launch, hardware)
    strategy = _choose_strategy(recipe.launch, processes)
    single = strategy == "single"
    precision = recipe.training.mixed_precision(cpu=cpu)
    written = not single and strategy != "custom"
    return LaunchPlan(
        argv=(
            *(() if single else _accelerate(recipe.launch, processes, RunFolder(run).accelerate)),
            *(run_module(worker) if single else ("-m", worker)),
            str(run),
        ),
        environment=_environment(recipe, processes, hardware, cpu=cpu),
        strategy=strategy,
        num_processes=processes,
        num_machines=recipe.launch.num_machines,
        machine_rank=recipe.launch.machine_rank,
        device="cpu" if cpu else "cuda",
        stall_timeout_s=recipe.launch.stall_timeout_s,
        accelerate=build_config(recipe.launch, strategy, processes, mixed_precision=precision)
        if written
        else None,
        server=_plan_server(recipe, hardware, location or ServerLocation(), cpu=cpu),
    )


def _plan_server(
    recipe: Recipe, hardware: Hardware, location: ServerLocation, *, cpu: bool
) -> ManagedServer | None:
    """The server where the recipe wants one; it takes the last of the visible GPUs."""
    vllm = recipe.generation.vllm
    if not recipe.generation.has_managed_server:
        return None
    plan = plan_training_server(
        recipe,
        location.vllm,
        location.model or recipe.model.path,
        host="127.0.0.1",
        port=location.server_port,
        device="cpu" if cpu else "cuda",
        visible_devices="" if cpu else ",".join(_split_devices(recipe, hardware)[1]),
    )
    return ManagedServer(
        plan.argv,
        plan.host,
        plan.port,
        plan.environment,
        group_port=int(vllm.extras.get("group_port", location.group_port)),
        max_restarts=vllm.max_restarts,
    )


def _split_devices(recipe: Recipe, hardware: Hardware) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The GPUs of training, and those of a managed server."""
    ours = len(hardware.devices) - recipe.generation.managed_gpus
    return hardware.devices[:ours], hardware.devices[ours:]


def _choose_strategy(launch: LaunchConfig, processes: int) -> str:
    if launch.accelerate_config is not None:
        return "custom"
    if launch.strategy in ("auto", "single", "ddp"):
        return "single" if processes == 1 else "ddp"
    return launch.strategy


def _accelerate(launch: LaunchConfig, processes: int, config: Path) -> tuple[str, ...]:
    """Arguments of `accelerate launch`; a config of the user's own leaves the world to us."""
    flags: dict[str, Any] = {
        "--config_file": launch.accelerate_config or config,
        # Otherwise it leaves a temporary folder behind wherever it is killed.
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
        # As `-P` for what the launcher starts: no file in the working directory takes a library's place.
        "PYTHONSAFEPATH": "1",
        # Whatever the locale: recipes, data and prompts are UTF-8.
        "PYTHONUTF8": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if recipe.launch.use_cpu:
        environment[_DEVICES] = ""
    elif not cpu:
        devices, _ = _split_devices(recipe, hardware)
        # A process of its own that sees several would train on all of them with DataParallel, which TRL refuses.
        used = devices[:1] if processes == 1 else devices
        if used != hardware.devices:
            environment[_DEVICES] = ",".join(used)
    if not cpu:
        return environment
    if recipe.generation.backend == "vllm":
        environment |= UNBOUND
    local_processes = processes // recipe.launch.num_machines
    return {**environment, **plan_cpu_environment(hardware, local_processes)}
