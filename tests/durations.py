"""Write `durations.md`: what `make test` and `make test-all` take, and their 30 slowest tests.

python -m tests.durations
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TARGETS = ("test", "test-all")
SLOWEST = 30


@dataclass(frozen=True)
class Duration:
    """One test: what it took with its fixtures, and the target that runs it."""

    seconds: float
    target: str
    name: str


def main() -> int:
    """Run the targets; return their exit code."""
    lines, found = [], []
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            started = time.monotonic()
            done = subprocess.run(["make", target, f"PYTEST_FLAGS=--junitxml={report}"], cwd=ROOT)
            if done.returncode:
                return done.returncode
            tests = read_durations(report, target)
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        lines.append(f"- `make {target}`: {minutes} min {seconds} s, {len(tests)} tests")
        found += tests
    slowest = sorted(found, key=lambda each: each.seconds, reverse=True)[:SLOWEST]
    rows = [f"| {each.seconds:.1f} | {each.target} | `{each.name}` |" for each in slowest]
    table = ["| seconds | target | test |", "| ---: | --- | --- |", *rows]
    title = ["# Durations", "", "Written by `make durations`, on 2 cores in two workers.", ""]
    text = "\n".join([*title, *lines, "", *table])
    (ROOT / "tests" / "durations.md").write_text(f"{text}\n", encoding="utf-8")
    return 0


def read_durations(report: Path, target: str) -> list[Duration]:
    """Read the tests of a report in JUnit's format, but those that were skipped."""
    return [
        Duration(
            float(case.attrib["time"]), target, f"{case.attrib['classname']}::{case.attrib['name']}"
        )
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("skipped") is None
    ]


if __name__ == "__main__":
    sys.exit(main())
