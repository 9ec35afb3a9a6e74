"""How long the commands that need no model take, next to TRL's own: `make bench`.

Runs each command in turn, A B A B, and prints the median and the ratio to `trl --help`. Measures
processes from the outside, with warm caches; nothing is asserted.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 7
ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def measure(command: list[str]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - started


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        schema = str(Path(folder) / "schema.json")
        quickstart = str(ROOT / "recipes" / "quickstart.yaml")
        commands = {
            "trl --help": [BIN / "trl", "--help"],
            "trl grpo --help": [BIN / "trl", "grpo", "--help"],
            "grpo --help": [BIN / "grpo", "--help"],
            "grpo check": [BIN / "grpo", "check", quickstart],
            "grpo check-batch (flags)": [BIN / "grpo", "check-batch", "--dataset-size", "8000"],
            "grpo check-batch (recipe)": [BIN / "grpo", "check-batch", quickstart],
            "grpo schema": [BIN / "grpo", "schema", "-o", schema],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(measure([str(part) for part in command]))
    reference = statistics.median(times["trl --help"])
    for name, values in times.items():
        middle = statistics.median(values)
        spread = f"{min(values):.2f}–{max(values):.2f}"
        print(f"{name:28} {middle:6.2f} s  ({spread})  {middle / reference:6.2f} × trl --help")


if __name__ == "__main__":
    main()
