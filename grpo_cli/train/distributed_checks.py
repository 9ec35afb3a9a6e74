"""The processes that train together, against those that were planned, and how they share the model."""

import torch
from accelerate import DistributedType
from accelerate.utils import gather_object
from transformers import Trainer

from grpo_cli.errors import SetupError
from grpo_cli.train.session import Session

_SHARED = {"fsdp": DistributedType.FSDP, "zero": DistributedType.DEEPSPEED}


def check_device(planned: str, actual: str) -> None:
    """Compare the device that was planned with what torch works on.

    Args:
        planned: `cpu` or `cuda`, from the run's plan.
        actual: Likewise.

    Raises:
        SetupError: They differ.
    """
    if planned == actual:
        return
    if actual == "cpu":
        has_kernels = torch.version.cuda or torch.version.hip
        build = "sees none" if has_kernels else "is a build for CPUs"
        raise SetupError(
            f"the run was planned for GPUs, but torch {torch.__version__} {build}. Fix: install a build of torch "
            "for this machine's GPUs (`grpo doctor` looks at both), or set `launch.use_cpu: true`"
        )
    raise SetupError(
        f"no GPU was found when the run was planned, but torch sees {torch.cuda.device_count()}. Fix: see what "
        "`grpo doctor` says of the driver; to train on the CPU, set `launch.use_cpu: true`"
    )


def check_world(session: Session) -> None:
    """Compares the processes that were planned with those that work together.

    accelerate can start fewer, or several that do not know of each other, without a word.

    Raises:
        SetupError: They are others.
    """
    planned, actual = session.recipe.launch.num_processes, session.processes.num_processes
    if planned not in ("auto", actual):
        raise SetupError(
            f"{planned} processes were planned but {actual} work together. "
            "Fix: start the run with `grpo train`, and check `launch` in the recipe"
        )


def check_machines(session: Session) -> None:
    """Compares from where every machine starts: without a disk in common they differ, in silence.

    Raises:
        SetupError: They would not train together.
    """
    if session.recipe.launch.num_machines == 1:
        return
    # By then, machine 0 has written the recipe that the others look for.
    seen = session.folder.main.resolved.is_file()
    step = int(session.folder.read_resumption().get("step", 0))
    found = gather_object([(seen, step)])
    fix = "Fix: with --run-id, put --runs on a disk that all machines see; without, leave out --resume"
    if not all(seen for seen, _ in found):
        raise SetupError(f"a machine does not see the run folder of machine 0. {fix}")
    if len({step for _, step in found}) > 1:
        steps = ", ".join(str(step) for _, step in found)
        raise SetupError(f"the processes would go on from different steps ({steps}). {fix}")


def check_strategy(session: Session, trainer: Trainer) -> None:
    """Compares how the model was to be shared with how it is: accelerate may do otherwise, in silence.

    Raises:
        SetupError: It is shared in another way.
    """
    planned = str(session.folder.read_plan().get("strategy"))
    wanted = _SHARED.get(planned.rstrip("123"))
    actual = trainer.accelerator.distributed_type
    if wanted is not None and actual != wanted:
        raise SetupError(
            f"{planned} was planned, but accelerate set up {actual.value}. "
            "Fix: fsdp2 needs GPUs; `launch.strategy: ddp` works everywhere"
        )
