"""Builds and loads the shim that lets a build of torch without CUDA take tensors on `cuda:0`."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("shim.cpp")


def compiler() -> str | None:
    """Return the C++ compiler of this machine; None if there is none."""
    return shutil.which("g++") or shutil.which("c++")


def build(folder: Path) -> Path:
    """Build the shim into a folder, unless it is there for this source and this torch."""
    torch = _torch_folder()
    key = hashlib.sha256(_SOURCE.read_bytes() + importlib.metadata.version("torch").encode())
    library = folder / f"shim-{key.hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(".tmp")
        includes = [torch / "include", torch / "include/torch/csrc/api/include"]
        command = [compiler() or "g++", "-O0", "-shared", "-fPIC", "-std=c++20", str(_SOURCE)]
        command += [f"-I{path}" for path in includes] + ["-o", str(unfinished)]
        command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True)
        unfinished.rename(library)
    return library


def load(library: Path) -> None:
    """Load the shim; to be called before torch is imported, since torch looks for CUDA once."""
    for needed in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / needed), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
