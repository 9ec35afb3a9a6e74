"""Environment variables of work on the processor: threads, and how memory is kept."""

import os
from collections.abc import Mapping

from grpo_cli.machine import Hardware

_KEEP_BYTES = 16 * 2**30
_THREADS, _SPIN = "OMP_NUM_THREADS", "GOMP_SPINCOUNT"
_TURNS = 1000
"""How often a thread that waits for the others of its process looks again before it sleeps.

By itself it looks 300,000 times, which holds up everybody where somebody else wants the core. SmolLM2-135M in bf16
on 2 cores, seconds to sample and learn from 32 completions: alone 3.3 (300,000 turns: 3.2; none: 3.9), beside
another training 6.1 (12.8; 5.7)."""


def plan_cpu_environment(hardware: Hardware, local_processes: int) -> dict[str, str]:
    """What each worker process on a machine should find in its environment.

    Args:
        hardware: The machine.
        local_processes: Workers that share its cores; they compute at the same time. vLLM is none of them:
            it and training take turns.
    """
    environment = {_THREADS: str(max(hardware.cpus // max(local_processes, 1), 1))}
    if hardware.linux:
        environment[_SPIN] = str(_TURNS)
        # glibc gives large blocks back to the kernel at once and page-faults them in again on
        # the next step; keeping them took a float32 step of SmolLM2-135M from 17 to 13 s.
        environment |= {
            "MALLOC_MMAP_THRESHOLD_": str(_KEEP_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(_KEEP_BYTES),
            "MALLOC_TOP_PAD_": str(64 * 2**20),
        }
    return environment


def merge(planned: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str]:
    """The variables that are present, and those planned ones that contradict none of them."""
    # A spin count would come before the user's own policy.
    ruled_out = {_SPIN} if "OMP_WAIT_POLICY" in present else set()
    ours = {name: value for name, value in planned.items() if name not in ruled_out}
    return {**ours, **present}


def set_thread_env(hardware: Hardware, local_processes: int) -> None:
    """Has this process compute as one of so many workers would; in time only before it has loaded torch."""
    planned = plan_cpu_environment(hardware, local_processes)
    threads = {name: planned[name] for name in (_THREADS, _SPIN) if name in planned}
    os.environ.update(merge(threads, os.environ))
