"""What every test starts from."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Read by torch and the hub's client as they are imported. Tests run side by side, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# It would hide output that a command forgets to flush.
os.environ.pop("PYTHONUNBUFFERED", None)

import pytest
from filelock import FileLock
from hypothesis import settings

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` has a hang-up ignored, which commands inherit; a handler they do not.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
# How long an example takes depends on what else the machine is doing.
settings.register_profile("here", deadline=None)
settings.load_profile("here")


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[..., Path]:
    """Make something in a folder once for all workers of pytest-xdist: `once(name, make)`.

    The folder is shared: who changes something works on a copy.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, complete = root / "once" / name, root / "once" / f"{name}.complete"
        folder.parent.mkdir(exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not complete.exists():
                # What another worker failed to make is made again, and fails there with its own cause.
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def made(once):
    """What `recipes/offline/make.py` makes, and rows as GSM8K has them."""
    return once("made", _make_offline)


def _make_offline(folder: Path) -> None:
    maker = Path(__file__).parents[1] / "recipes" / "offline" / "make.py"
    subprocess.run([sys.executable, str(maker), str(folder)], check=True, capture_output=True)
    rows = "".join(f'{{"question": "{i}", "answer": "so #### {i}"}}\n' for i in range(40))
    (folder / "rows.jsonl").write_text(rows)
