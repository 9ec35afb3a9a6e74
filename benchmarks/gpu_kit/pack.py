"""Packs the kit for a machine without network: `python -m benchmarks.gpu_kit.pack [--python 3.12]`."""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_PRESENT = _HERE / "present.txt"
_MOST_MIB = 60
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(34, 4, -1)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
_RUN = """#!/bin/sh
# Measures this machine's GPU. Arguments: --minutes N, --only PART,PART, --out FOLDER.
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
case $("$python" -V) in
    "Python VERSION."*) ;;
    *) echo "this kit is for Python VERSION. Fix: set PYTHON, or make gpu-kit KIT_PYTHON=…" >&2; exit 2 ;;
esac
PYTHONPATH="$here/project:$here/site" exec "$python" -m benchmarks.gpu_kit "$@"
"""


def main() -> int:
    """Write the archive; return 1 if it is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="the version on that machine")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "gpu-kit.tar.gz")
    options = parser.parse_args()
    packages = find_missing(options.python, set(_read_lines(_PRESENT)))
    print("packing", *packages)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder, tarfile.open(options.out, "w:gz") as archive:
        site, script = Path(folder) / "site", Path(folder) / "run.sh"
        _install(packages, options.python, site)
        script.write_text(_RUN.replace("VERSION", options.python))
        archive.add(site, "gpu-kit/site")
        archive.add(script, "gpu-kit/run.sh")
        for name in listed.stdout.splitlines():
            archive.add(_ROOT / name, f"gpu-kit/project/{name}")
    size = options.out.stat().st_size / 2**20
    print(f"{options.out}: {size:.1f} MiB")
    if size > _MOST_MIB:
        print(f"more than {_MOST_MIB} MiB. Fix: list large packages that are there in {_PRESENT}")
    return int(size > _MOST_MIB)


def find_missing(python: str, present: set[str]) -> list[str]:
    """Return `name==version` of what the project needs besides what is present, from the installed metadata.

    Args:
        python: Version of the interpreter there, such as 3.12.
        present: Packages; what only they need is not looked for.
    """
    pins = dict(line.split("==") for line in _read_lines(_ROOT / "constraints.txt"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    waiting, seen = [Requirement("grpo-cli")], dict[str, None]()
    while waiting:
        package = waiting.pop()
        name = canonicalize_name(package.name)
        if name in present or str(package) in seen:
            continue
        seen[str(package)] = None
        for needed in map(Requirement, distribution(name).requires or ()):
            extras = [{**environment, "extra": extra} for extra in ("", *package.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                waiting.append(needed)
    names = {canonicalize_name(Requirement(each).name) for each in seen} - {"grpo-cli"}
    return sorted(f"{name}=={versions[name]}" for name in names)


def _read_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _install(packages: list[str], python: str, site: Path) -> None:
    """Unpack the packages' wheels for that machine into a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [part for each in _PLATFORMS for part in ("--platform", each)]
    subprocess.run([*command, "--target", str(site), *packages], check=True)


if __name__ == "__main__":
    sys.exit(main())
