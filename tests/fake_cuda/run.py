"""Calls one function on a fake CUDA device: `python -m tests.fake_cuda.run SHIM MODULE FUNCTION [JSON]`.

The last line that it prints is what the function returned, as JSON. A process of its own, since the shim and the
choice of attention kernels stay in a process.
"""

import importlib
import json
import sys
from pathlib import Path

from tests.fake_cuda import shim


def main(library: str, module: str, function: str, arguments: str = "{}") -> None:
    """Print what `function(**arguments)` of a module returns."""
    shim.load(Path(library))
    importlib.import_module("tests.fake_cuda.device")
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
