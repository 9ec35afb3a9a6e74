"""Training processes that are running here, and those that outlived their launcher.

Reads Linux's /proc; elsewhere it finds nothing. Ends nobody.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.issues import Finding

WORKER = "grpo_cli.train.worker"
"""The module a worker runs."""
_LAUNCHER = "accelerate.commands.launch"
_ADOPTERS = ("systemd", "init", "tini", "dumb-init", "docker-init")
"""Who takes in a process whose parent has died, besides process 1."""


@dataclass(frozen=True)
class Process:
    """One process: who started it, and with what arguments."""

    pid: int
    parent: int
    argv: tuple[str, ...]

    def is_training(self) -> bool:
        """Whether it is a worker of ours, or the launcher of one."""
        return WORKER in self.argv


def read_processes(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Every process that can be read, by its number."""
    found: dict[int, Process] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # The name in brackets may hold spaces and brackets itself.
            stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(folder.name)
        # A zombie holds nothing: it only waits to be read.
        if stat[0] != "Z":
            found[pid] = Process(pid, int(stat[1]), tuple(argv))
    return found


def check_processes(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Workers that nobody watches any more, and trainings that share this machine."""
    processes = read_processes(proc)
    orphans: list[int] = []
    watched: list[int] = []
    for process in processes.values():
        if process.is_training():
            lost = _is_orphan(process, processes)
            (orphans if lost else watched).append(process.pid)
    if orphans:
        pids = " ".join(map(str, sorted(orphans)))
        yield Finding(
            "processes: left over",
            "warning",
            f"{len(orphans)} training processes have outlived the program that watched them "
            f"({pids}), and hold memory, devices and ports",
            f"kill {pids}",
        )
    if watched:
        pids = ", ".join(map(str, sorted(watched)))
        yield Finding(
            "processes: training",
            "note",
            f"another training runs here (processes {pids}) and shares the machine",
            "wait for its end, or plan for less memory",
        )
    if not orphans and not watched:
        yield Finding("processes", "ok", "no training is running or left over")


def _is_orphan(process: Process, processes: dict[int, Process]) -> bool:
    """Whether the top of its chain of training processes was taken in by the system."""
    while True:
        parent = processes.get(process.parent)
        if parent is None:
            return process.parent == 1
        if not (parent.is_training() or _LAUNCHER in parent.argv):
            return _is_adopter(parent)
        process = parent


def _is_adopter(process: Process) -> bool:
    # In a container `grpo train` itself may be process 1.
    if any("grpo" in part for part in process.argv):
        return False
    return process.pid == 1 or Path(process.argv[0]).name in _ADOPTERS
