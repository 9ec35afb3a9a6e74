"""Measures a GPU part by part: `python -m benchmarks.gpu_kit [--minutes 10] [--only a,b] [--out DIR] [--tiny]`.

Each part runs in a process of its own with a time limit. `results.json` and `table.txt` in the output folder are
written after each; the table is printed at the end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_kit.table import compare_memory, format_part

_LEAST_S = 20.0
"""A part is not begun with less time than that."""
_MARGIN_S = 8.0
"""How long before its limit a part begins no further measurement."""


class Part(NamedTuple):
    """One table."""

    title: str
    function: str
    """Module and name, under `benchmarks.gpu_kit`."""
    limit_s: float
    """If all parts have ten minutes."""


PARTS = {
    "machine": Part("Versions and kernels", "machine.describe_machine", 60),
    "parity": Part("One step, grpo against TRL", "steps.check_parity", 80),
    "learning": Part("Learning step without sampling", "steps.measure_learning", 190),
    "sampling": Part("Sampling", "sampling.measure_sampling", 130),
    "syncs": Part("Host syncs", "steps.count_syncs", 50),
    "run": Part("grpo train, killed and resumed", "whole_run.train_whole", 240),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, or one in this process."""
    options = _parse(arguments)
    if options.part:
        return run_part(options)
    # Asked to end, it ends the part first, as with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = Path(options.out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + 60 * options.minutes
    results: dict[str, dict[str, Any]] = {}
    for name in options.only or PARTS:
        left = ends_at - time.monotonic()
        if left < _LEAST_S:
            results[name] = {"state": "skipped: the time is used up", "seconds": 0.0, "rows": []}
        else:
            limit_s = min(PARTS[name].limit_s * options.minutes / 10, left)
            results[name] = _start_part(name, limit_s, out, options)
        _write(out, results)
        print(f"{name}: {results[name]['state']}", file=sys.stderr, flush=True)
    print((out / "table.txt").read_text(encoding="utf-8"))
    return int(any(result["state"].startswith("failed") for result in results.values()))


def run_part(options: argparse.Namespace) -> int:
    """Write a part's rows, each as soon as it is known."""
    from importlib import import_module

    from benchmarks.gpu_kit.bench import Bench

    module, _, name = PARTS[options.part].function.partition(".")
    function = getattr(import_module(f"benchmarks.gpu_kit.{module}"), name)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.tiny, time.monotonic() + options.seconds - _MARGIN_S)
        with Path(options.rows).open("w", encoding="utf-8") as file:
            for row in function(bench):
                file.write(json.dumps(row) + "\n")
                file.flush()
    return 0


def _start_part(
    name: str, limit_s: float, out: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run a part in a process that is killed at its limit; return its state, seconds and rows."""
    rows, log = (out / "logs" / f"{name}.{suffix}" for suffix in ("jsonl", "log"))
    rows.write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu_kit", "--part", name]
    command += ["--rows", str(rows), "--seconds", str(limit_s), *["--tiny"] * options.tiny]
    environment = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", **os.environ}
    # Trainers of one process would use all GPUs.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    environment["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    if options.tiny:
        # Threads that share a core with others wait for each other longer than they compute.
        environment["OMP_NUM_THREADS"] = "1"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
            state = "done" if code == 0 else f"failed: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            state = f"cut off after {limit_s:.0f} s"
        finally:
            # Also on Ctrl-C, and what a part has left running.
            _kill_group(process)
    # Without a line that a kill has cut.
    lines = rows.read_text(encoding="utf-8").split("\n")[:-1]
    seconds = round(time.monotonic() - started, 1)
    return {"state": state, "seconds": seconds, "rows": [json.loads(line) for line in lines]}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "no output"


def _write(out: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write what is known so far."""
    measured = [
        row for each in ("learning", "sampling") if each in results for row in results[each]["rows"]
    ]
    memory = {"state": "from the parts above", "seconds": 0.0, "rows": compare_memory(measured)}
    text = [format_part(PARTS[name].title, result) for name, result in results.items()]
    text += [format_part("Peak memory, estimated and measured", memory)] * bool(memory["rows"])
    (out / "table.txt").write_text("\n".join(text), encoding="utf-8")
    everything = json.dumps({**results, "memory": memory}, indent=1)
    (out / "results.json").write_text(everything + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", type=lambda text: text.split(","), help=", ".join(PARTS))
    parser.add_argument("--out", default="gpu-kit-results", help="a folder for the results")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--part", choices=PARTS, help="run one in this process")
    parser.add_argument("--rows", help="the file that --part writes")
    parser.add_argument("--seconds", type=float, help="the limit of --part")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only or () if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}. Fix: name some of {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
