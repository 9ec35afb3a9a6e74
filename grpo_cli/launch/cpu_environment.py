"""Environment variables of a training on the processor: threads, and how memory is kept. Pure."""

from grpo_cli.preflight.hardware import Hardware

_KEEP_BYTES = 16 * 2**30
_ENOUGH = 0.5
"""Of a processor: less than this is what any machine does besides."""


def plan_cpu_environment(hardware: Hardware, local_processes: int) -> dict[str, str]:
    """What each worker process on a machine should find in its environment.

    Args:
        hardware: The machine.
        local_processes: Workers that share its cores; they compute at the same time. vLLM is none of them:
            it and training take turns.
    """
    environment = {"OMP_NUM_THREADS": str(max(hardware.cpus // max(local_processes, 1), 1))}
    if _is_shared(hardware):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    if hardware.linux:
        # glibc gives large blocks back to the kernel at once and page-faults them in again on
        # the next step; keeping them took a float32 step of SmolLM2-135M from 17 to 13 s.
        environment |= {
            "MALLOC_MMAP_THRESHOLD_": str(_KEEP_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(_KEEP_BYTES),
            "MALLOC_TOP_PAD_": str(64 * 2**20),
        }
    return environment


def _is_shared(hardware: Hardware) -> bool:
    """Whether other programs run on cores that training would take.

    A thread that waits for the others of its process turns in a loop, which is a little faster than to sleep
    as long as nobody else wants the core, and holds up everybody where somebody does. SmolLM2-135M in bf16 on 2
    cores: alone, asleep takes 1.06 times as long to learn and 1.15 to sample; beside other trainings a
    sixteenth.
    """
    idle = hardware.idle_cpus
    return idle is not None and hardware.cpus > idle + _ENOUGH
