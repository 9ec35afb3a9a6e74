"""Stand-ins for Slurm's commands on one machine, and a controller that starts a job again when asked to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_SBATCH = """\
cat > "$SLURM_STANDIN/job.sh"
echo "$*" > "$SLURM_STANDIN/sbatch"
sed -n 's/^#SBATCH --array=\\([^%]*\\).*/\\1/p' "$SLURM_STANDIN/job.sh" | tr , '\\n' | tr - ' ' |
  while read -r first last; do seq "$first" "${last:-$first}"; done |
  sed 's/.*/7 & PENDING/' > "$SLURM_STANDIN/queue"
echo "7;here"
"""
_SCONTROL = """\
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.2\\n127.0.0.3\\n'; exit; fi
echo "$*" >> "$SLURM_STANDIN/scontrol"
"""
_SQUEUE = """\
cat "$SLURM_STANDIN/queue" 2>/dev/null || true
"""
# Tasks get the signals of their step, and the worst exit code is the step's.
_SRUN = """\
import os, signal, subprocess, sys

start = next(at for at, text in enumerate(sys.argv) if at and not text.startswith("--"))
flags = dict(text[2:].partition("=")[::2] for text in sys.argv[1:start])
tasks = [
    subprocess.Popen(sys.argv[start:], env={**os.environ, "SLURM_PROCID": str(rank)})
    for rank in range(int(flags["ntasks"]))
]
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
name = "server.pid" if "serve" in sys.argv else "srun.pid"
with open(os.path.join(os.environ["SLURM_STANDIN"], name), "w") as file:
    file.write(str(os.getpid()))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


class Cluster:
    """Commands in a folder of their own, and job 7."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self.write("sbatch", f"#!/bin/sh\n{_SBATCH}")
        self.write("scontrol", f"#!/bin/sh\n{_SCONTROL}")
        self.write("squeue", f"#!/bin/sh\n{_SQUEUE}")
        self.write("srun", f"#!{sys.executable}\n{_SRUN}")

    def write(self, name: str, text: str) -> None:
        """Makes a command."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """What a shell on this cluster has."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "SLURM_STANDIN": str(self.folder)}

    def start(
        self, cwd: Path, *, restarts: int = 0, seconds_left: int = 3600, task: int | None = None
    ) -> subprocess.Popen:
        """Starts the submitted job, or a task of its array, as the controller would."""
        job = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "SLURM_JOB_END_TIME": str(int(time.time()) + seconds_left),
            "SLURM_RESTART_COUNT": str(restarts),
        }
        if task is not None:
            own = {"SLURM_JOB_ID": str(7 + task), "SLURM_ARRAY_JOB_ID": "7"}
            job |= {**own, "SLURM_ARRAY_TASK_ID": str(task)}
        (self.folder / "srun.pid").unlink(missing_ok=True)
        return subprocess.Popen(
            ["bash", self.folder / "job.sh"],
            cwd=cwd,
            env={**os.environ, **self.environment, "HF_HUB_OFFLINE": "1", **job},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask_to_stop(self, job: subprocess.Popen) -> None:
        """What comes shortly before the time limit: a SIGTERM for every step, and here for the script."""
        os.kill(int((self.folder / "srun.pid").read_text()), signal.SIGTERM)
        job.send_signal(signal.SIGTERM)

    def queue(self, tasks: dict[int, str]) -> None:
        """Sets which tasks of array 7 are in the queue, and their states."""
        lines = [f"7 {task} {state}\n" for task, state in tasks.items()]
        (self.folder / "queue").write_text("".join(["6 N/A RUNNING\n", *lines]))

    @property
    def asked(self) -> list[str]:
        """What scontrol was asked to do."""
        path = self.folder / "scontrol"
        return path.read_text().splitlines() if path.is_file() else []
