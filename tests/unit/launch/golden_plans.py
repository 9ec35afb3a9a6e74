"""What is started on each kind of machine, in files that a person can review.

    python -m tests.unit.launch.golden_plans     # writes tests/unit/launch/plans/ anew

Descriptions of machines go through `read_hardware`, the checks of a launch and `plan_launch`; several processes
then go through `accelerate launch` itself, up to the call of torchrun. No process is started.
"""

import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, get_args
from unittest import mock

import pynvml
import yaml
from accelerate.commands import launch as accelerate_launch
from torch.distributed import run as torchrun

from grpo_cli import machine
from grpo_cli.checks import launch as launch_checks
from grpo_cli.checks.slurm import check_slurm
from grpo_cli.checks.vllm import check_vllm
from grpo_cli.launch.plan import LaunchPlan, plan_launch
from grpo_cli.launch.server_plan import ServerLocation
from grpo_cli.machine import Hardware, read_hardware
from grpo_cli.recipe.launch import LaunchConfig, Strategy
from grpo_cli.recipe.loading import load_recipe
from tests.contexts import make_context, run_check
from tests.recipe_texts import write_recipe

FOLDER = Path(__file__).parent / "plans"
STRATEGIES = get_args(Strategy)
MODES = {
    "transformers": {},
    "vllm colocate": {"mode": "colocate"},
    "vllm server, managed": {"mode": "server"},
    "vllm server, base_url": {"mode": "server", "base_url": "http://10.0.0.9:8000"},
}
INHERITED = {"PATH": "/usr/bin", "HOME": "/root"}


@dataclass(frozen=True)
class Machine:
    """A machine as its driver and its environment describe it."""

    title: str
    nvidia: int = 0
    """GPUs that NVML counts."""
    divided: bool = False
    """Whether they are divided into instances (MIG)."""
    amd: int = 0
    """GPUs that the kernel lists, and this container may use."""
    environment: dict[str, str] = field(default_factory=dict)
    launch: dict[str, object] = field(default_factory=dict)
    """The recipe's `launch`, besides the strategy."""


def one_of(machines: int, rank: int) -> dict[str, object]:
    address = {"main_process_ip": "10.0.0.1", "main_process_port": 29500}
    return {"num_machines": machines, "machine_rank": rank, **address}


MACHINES = {
    "no_gpu": Machine("no GPU"),
    "no_gpu_2_processes": Machine("no GPU, num_processes: 2", launch={"num_processes": 2}),
    "1_gpu": Machine("1 GPU", 1),
    "wsl2": Machine("WSL2 with 1 GPU, which NVML counts as elsewhere", 1),
    "cdi": Machine(
        "a CDI container with one of eight GPUs",
        1,
        environment={"NVIDIA_VISIBLE_DEVICES": "void"},
    ),
    "2_gpus": Machine("2 GPUs", 2),
    "8_gpus": Machine("8 GPUs", 8),
    "8_gpus_1_process": Machine("8 GPUs, num_processes: 1", 8, launch={"num_processes": 1}),
    "8_gpus_4_processes": Machine("8 GPUs, num_processes: 4", 8, launch={"num_processes": 4}),
    "8_gpus_use_cpu": Machine("8 GPUs, use_cpu: true", 8, launch={"use_cpu": True}),
    "2_of_8_gpus": Machine(
        "2 of 8 GPUs by UUID, as Kubernetes names them",
        8,
        environment={"CUDA_VISIBLE_DEVICES": "GPU-4f1c,GPU-9ab2"},
    ),
    "mig": Machine(
        "two instances, of two divided GPUs (MIG)",
        2,
        divided=True,
        environment={"CUDA_VISIBLE_DEVICES": "MIG-11aa,MIG-22bb"},
    ),
    "mig_8_gpus": Machine("8 divided GPUs (MIG), none of them named", 8, divided=True),
    "mig_by_index": Machine(
        "2 divided GPUs (MIG), named whole by index",
        2,
        divided=True,
        environment={"CUDA_VISIBLE_DEVICES": "0,1"},
    ),
    "mig_by_uuid": Machine(
        "2 of 4 divided GPUs (MIG), named whole by UUID",
        4,
        divided=True,
        environment={"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"},
    ),
    "rocm": Machine("8 GPUs of AMD (ROCm)", amd=8),
    "rocm_hip": Machine(
        "2 of 8 GPUs of AMD, by HIP", amd=8, environment={"HIP_VISIBLE_DEVICES": "4,5"}
    ),
    "rocm_slurm": Machine(
        "2 of 8 GPUs of AMD, by ROCr (as Slurm)", amd=8, environment={"ROCR_VISIBLE_DEVICES": "4,5"}
    ),
    "2_machines_rank_0": Machine("2 machines of 8 GPUs, the first", 8, launch=one_of(2, 0)),
    "2_machines_rank_1": Machine("2 machines of 8 GPUs, the second", 8, launch=one_of(2, 1)),
    "4_machines_rank_3": Machine("4 machines of 1 GPU, the last", 1, launch=one_of(4, 3)),
}


def give(result: object):
    return lambda *_: result


@cache
def hardware_of(name: str) -> Hardware:
    """Return a machine as it is read, with NVML, the kernel and the environment standing in."""
    of = MACHINES[name]
    driver = {
        "nvmlInit": give(None),
        "nvmlShutdown": give(None),
        "nvmlDeviceGetCount": give(of.nvidia),
        "nvmlDeviceGetHandleByIndex": str,
        "nvmlDeviceGetUUID": "GPU-{}-4f1c".format,
        "nvmlDeviceGetMigMode": give([int(of.divided), int(of.divided)]),
    }
    with (
        mock.patch.multiple(pynvml, **driver),
        mock.patch.multiple(
            machine, has_nvidia_driver=give(True), _count_amd=give(of.amd), count_cores=give(32)
        ),
        mock.patch.dict(os.environ, INHERITED | of.environment, clear=True),
    ):
        return read_hardware()


@cache
def load(mode: str):
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(write_recipe(Path(folder)))
    backend = "transformers" if mode == "transformers" else "vllm"
    vllm = type(recipe.generation.vllm).model_validate(MODES[mode])
    generation = recipe.generation.model_copy(update={"backend": backend, "vllm": vllm})
    return recipe.model_copy(update={"generation": generation})


def refuse(recipe, hardware: Hardware) -> list[str]:
    """Return the errors of the checks, with vLLM and DeepSpeed installed."""
    context = make_context(recipe, hardware)
    with mock.patch.object(launch_checks, "has_module", give(True)):
        issues = [*launch_checks.check_launch(context), *launch_checks.check_packages(context)]
    issues += [*run_check(check_slurm, context), *run_check(check_vllm, context)]
    return [
        f"{each.path}: {each.seen}. Fix: {each.fix}" for each in issues if each.level == "error"
    ]


class Started(NamedTuple):
    """What the workers get."""

    environment: dict[str, str]
    """Variables that differ from the inherited ones."""
    command: list[str]
    meeting: str
    """How the processes find each other."""


@cache
def parser():
    return accelerate_launch.launch_command_parser()


def start(plan: LaunchPlan, inherited: dict[str, str]) -> Started:
    """Return what the workers of a plan get, by way of `accelerate launch` if it has a launcher."""
    environment = plan.add_environment(inherited)
    if plan.accelerate is None:
        return Started(differing(environment, inherited), list(plan.argv), "started directly")
    config = yaml.safe_dump(plan.accelerate)
    found = accelerate(plan.argv, config, frozenset(environment.items()))
    return found._replace(environment=differing(found.environment, inherited))


def differing(environment: dict[str, str], inherited: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if inherited.get(name) != value}


@cache
def accelerate(
    argv: tuple[str, ...], config: str, environment: frozenset[tuple[str, str]]
) -> Started:
    """Return what the workers get from `accelerate launch`, with their whole environment."""
    started = []

    def run(arguments):
        launch, command, rest = torchrun.config_from_args(arguments)
        meeting = (
            f"torchrun {launch.max_nodes} × {launch.nproc_per_node}, {launch.rdzv_backend} rendezvous at "
            f"{launch.rdzv_endpoint}, machine {launch.rdzv_configs['rank']}, {launch.max_restarts} restarts"
        )
        started.append(Started(dict(os.environ), [command, *rest], meeting))

    runner = ModuleType("deepspeed.launcher.runner")
    runner.DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
    modules = {"deepspeed": mock.Mock(), "deepspeed.launcher": mock.Mock(), runner.__name__: runner}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, dict(environment), clear=True),
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(torchrun, "run", run),
        mock.patch.multiple(
            accelerate_launch,
            is_deepspeed_available=give(True),
            check_cuda_p2p_ib_support=give(True),
        ),
        mock.patch.multiple(
            "accelerate.utils.launch", get_free_port=give("PORT"), is_port_in_use=give(False)
        ),
    ):
        (Path(folder) / "accelerate.yaml").write_text(config)
        words = argv[argv.index("accelerate.commands.launch") + 1 :]
        words = [word.replace("RUN/launch", folder) for word in words]
        accelerate_launch.launch_command(parser().parse_args(words))
    return started[0]


class Outcome(NamedTuple):
    """What becomes of one combination."""

    refusals: list[str]
    started: Started | None = None
    processes: int = 0
    server: str | None = None


def combine(name: str, strategy: str, mode: str) -> Outcome:
    of, hardware, recipe = MACHINES[name], hardware_of(name), load(mode)
    launch = LaunchConfig.model_validate({"strategy": strategy, **of.launch})
    recipe = recipe.model_copy(update={"launch": launch})
    if refusals := refuse(recipe, hardware):
        return Outcome(refusals)
    location = ServerLocation(server_port=8123, group_port=50123)
    plan = plan_launch(recipe, Path("RUN"), hardware, location=location)
    started = start(plan, INHERITED | of.environment)
    return Outcome([], started, plan.num_processes, plan.server and plan.server.command_line())


def as_lines(environment: dict[str, str]) -> list[str]:
    return [
        f"  {name}={value.replace(str(Path.cwd()), 'CWD')}"
        for name, value in sorted(environment.items())
    ]


@cache
def usual(strategy: str) -> Started:
    """Return what the workers of a strategy get on two GPUs, or on one."""
    name = "1_gpu" if strategy == "single" else "2_gpus"
    return combine(name, strategy, "transformers").started


def describe_machine(name: str) -> str:
    """Return the outcomes on a machine, equal ones together."""
    blocks = defaultdict(lambda: defaultdict(list))
    for strategy in STRATEGIES:
        for mode in MODES:
            found = combine(name, strategy, mode)
            if found.refusals:
                block = [f"refused: {refusal}" for refusal in found.refusals]
            else:
                unusual = (
                    found.started.environment.items() - usual(actual(found)).environment.items()
                )
                block = [f"num_processes {found.processes}: {found.started.meeting}"]
                block += as_lines(dict(unusual))
                block += [f"server: {found.server}"] if found.server else []
            blocks["\n".join(block)][strategy].append(mode)
    texts = [f"{heading(combinations)}\n{block}\n" for block, combinations in blocks.items()]
    of = MACHINES[name]
    given = [f"{name}={value}" for name, value in of.environment.items()]
    return "\n".join([f"# {': '.join([of.title, *given])}", "", *texts])


def actual(found: Outcome) -> str:
    """Return the strategy of an outcome: of `auto`, and of one process, it is another than the recipe's."""
    environment = found.started.environment
    if environment.get("ACCELERATE_USE_DEEPSPEED"):
        return f"zero{environment['ACCELERATE_DEEPSPEED_ZERO_STAGE']}"
    if environment.get("ACCELERATE_USE_FSDP"):
        return "fsdp2"
    return "ddp" if found.started.meeting.startswith("torchrun") else "single"


def heading(combinations: dict[str, list[str]]) -> str:
    together = defaultdict(list)
    for strategy, modes in combinations.items():
        together[tuple(modes)].append(strategy)
    lines = [
        f"## {', '.join(strategies)}: {'; '.join(modes) if len(modes) < len(MODES) else 'all'}"
        for modes, strategies in together.items()
    ]
    return "\n".join(lines)


def describe_strategies() -> str:
    """Return what is the same on every machine."""
    single = usual("single")
    lines = [
        "# What the workers get on every machine",
        "",
        "PYTHONPATH is accelerate's: the worker takes it out again (`grpo_cli/training/__init__.py`).",
        "",
        "single",
        f"  {' '.join(single.command)}",
    ]
    lines += as_lines(single.environment)
    for strategy in STRATEGIES[2:]:
        started = usual(strategy)
        more = dict(started.environment.items() - single.environment.items())
        lines += ["", f"{strategy}, besides the variables of single"]
        lines += [f"  {' '.join(started.command)}", *as_lines(more)]
    return "\n".join(lines).replace(sys.executable, "python") + "\n"


def describe(name: str) -> str:
    """Return the text of a file."""
    return describe_strategies() if name == "strategies" else describe_machine(name)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in ("strategies", *MACHINES):
        (FOLDER / f"{name}.txt").write_text(describe(name))
    refused = sum(
        bool(combine(name, strategy, mode).refusals)
        for name in MACHINES
        for strategy in STRATEGIES
        for mode in MODES
    )
    total = len(MACHINES) * len(STRATEGIES) * len(MODES)
    print(f"{total} combinations, {refused} of them refused")
