"""Two processes, started as a training starts them, that add up a number between them.

Owns both sides: `check_rendezvous` launches this very module with `accelerate launch` (as
`launch/plan.py` does for several processes), and `main` is what each process runs.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_cli.doctor.subprocess_checks import QUIET
from grpo_cli.issues import Finding

TIMEOUT_S = 60.0
"""It takes 4 s on two slow cores; a rendezvous that has not come about by then will not."""
_MODULE = "grpo_cli.doctor.rendezvous"
_PROCESSES = 2
_SUM = 3
"""1 from rank 0 and 2 from rank 1."""
_NETWORK = re.compile(r"gloo|nccl|address|connect|resol|timed? ?out|within", re.IGNORECASE)
"""What a failure says that lies in how the two reach each other."""


def check_rendezvous(
    gpus: int,
    on_progress: Callable[[str], None] = lambda text: None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Finding]:
    """Whether two processes find each other and exchange a tensor: NCCL with two GPUs, else gloo.

    Args:
        gpus: Visible devices.
        on_progress: Told what is going on.
        timeout_s: After this everything that was started is ended.
    """
    backend = "nccl" if gpus >= _PROCESSES else "gloo"
    subject = f"two processes ({backend})"
    on_progress(f"two processes over {backend}")
    with tempfile.TemporaryDirectory(prefix="grpo-doctor-") as name:
        folder = Path(name)
        failure = _launch(folder, backend, timeout_s)
        answers = [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
    errors = [answer["error"] for answer in answers if answer["error"]]
    sums = [answer["sum"] for answer in answers]
    if sums == [_SUM] * _PROCESSES:
        seconds = max(answer["seconds"] for answer in answers)
        seen = f"accelerate launched both; their all-reduce is right ({seconds:.1f} s)"
        yield Finding(subject, "ok", seen)
        return
    if errors:
        seen = errors[0]
    elif failure:
        seen = failure
    else:
        worlds = ", ".join(str(answer["world"]) for answer in answers) or "no answer"
        seen = f"{_PROCESSES} processes were asked for, and those that came count {worlds}"
    yield Finding(subject, "error", seen, _mend(backend, seen))


def _launch(folder: Path, backend: str, timeout_s: float) -> str | None:
    """Launches both and waits; returns what went wrong with the launch itself."""
    command = (
        f"-m accelerate.commands.launch --multi_gpu --num_processes {_PROCESSES} --num_machines 1 "
        f"--mixed_precision no --dynamo_backend no --main_process_port 0 -m {_MODULE}"
    ).split()
    environment = {**QUIET, "OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(
                # The processes end themselves a little earlier: the launcher's end would not reach them.
                [sys.executable, *command, str(folder), backend, str(max(int(timeout_s) - 2, 1))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {timeout_s:g} s"
        log.seek(0)
        lines = log.read()[-8000:].decode(errors="replace").strip().splitlines()
    if done.returncode == 0:
        return None
    if "SIGALRM" in "\n".join(lines):
        return f"the processes did not find each other within {timeout_s:g} s"
    return _tell(lines) or f"accelerate launch ended with exit code {done.returncode}"


def _tell(lines: list[str]) -> str:
    """The line of a traceback that names the error, or the last one."""
    told = [line.strip() for line in lines if "Error: " in line and not line.startswith(" ")]
    return told[-1] if told else (lines[-1].strip() if lines else "")


def _mend(backend: str, seen: str) -> str:
    if "GPU ids" in seen:
        return "move accelerate's own config away (see the finding `accelerate config`)"
    if "ImportError" in seen or "No module" in seen:
        return "mend the imports first; else pip install --force-reinstall --no-deps accelerate"
    if not _NETWORK.search(seen):
        return "unset the variables that `env | grep -E 'ACCELERATE_|MASTER_|RANK'` shows, and try again"
    if backend == "nccl":
        return (
            "look for the cause with NCCL_DEBUG=INFO set; on consumer boards and in virtual machines "
            "export NCCL_P2P_DISABLE=1 often mends it"
        )
    return (
        "export GLOO_SOCKET_IFNAME=lo (the loopback interface), see that a firewall lets 127.0.0.1 "
        "through and that this host's name resolves; or set `launch.num_processes: 1`"
    )


def main() -> None:
    """One of the two processes: `FOLDER BACKEND SECONDS`."""
    folder, backend, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    _end_after(seconds)
    answer: dict[str, Any] = {"sum": None, "world": None, "seconds": None, "error": None}
    try:
        answer |= _add(backend)
    except Exception as error:  # whatever it is, the launcher would swallow it
        lines = str(error).strip().splitlines()
        answer["error"] = f"{type(error).__name__}: {lines[0] if lines else ''}"
    target = folder / f"rank_{os.environ.get('RANK', 0)}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(answer))
    part.rename(target)
    sys.exit(1 if answer["error"] else 0)


def _end_after(seconds: int) -> None:
    """Has the kernel end this process, wherever it hangs: it lives in a session of its own."""
    if sys.platform != "win32":
        import signal

        signal.alarm(seconds)


def _add(backend: str) -> dict[str, Any]:
    import time

    import torch
    from accelerate import PartialState

    began = time.monotonic()
    state = PartialState(cpu=backend == "gloo")
    number = torch.tensor([state.process_index + 1.0], device=state.device)
    if state.num_processes > 1:
        torch.distributed.all_reduce(number)
    answer = {"sum": int(number.item()), "world": state.num_processes}
    state.destroy_process_group()
    return {**answer, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main()
