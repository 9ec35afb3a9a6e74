"""What every test starts from."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Read by torch and the hub's client as they are imported. Tests run side by side, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As in an activated environment: messages then say `pip`, not the path of an interpreter.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# It would hide output that a command forgets to flush.
os.environ.pop("PYTHONUNBUFFERED", None)

import pytest
from filelock import FileLock
from hypothesis import settings

from tests.fake_cuda import shim
from tests.nightly import NIGHTLY

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` has a hang-up ignored, which commands inherit; a handler they do not.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
# How long an example takes depends on what else the machine is doing; only `make test-nightly` tries
# other examples each time, so what passes here passes elsewhere.
settings.register_profile("here", deadline=None, derandomize=not NIGHTLY)
settings.load_profile("here")


@pytest.fixture(scope="session", autouse=True)
def own_extensions(tmp_path_factory) -> None:
    """Have torch compile what DeepSpeed needs in a folder of this process.

    In a shared one, a lock that a killed process has left keeps all others waiting without end.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.getbasetemp() / "extensions")


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


@pytest.fixture(scope="session")
def guesser(once, made):
    """A model that answers one of the digits 1 to 9, each as often at temperature 1, and 5 at temperature 0."""
    from transformers import AutoTokenizer

    from tests.tiny_models import make_guesser

    tokenizer = AutoTokenizer.from_pretrained(made / "tiny-guesser")
    return once("guesser", lambda folder: make_guesser(folder, tokenizer))


def _make_offline(folder: Path) -> None:
    maker = Path(__file__).parents[1] / "recipes" / "offline" / "make.py"
    runpy.run_path(str(maker))["main"](folder)
    for name, numbers in (("rows", range(40)), ("held_out", range(40, 80))):
        rows = "".join(f'{{"question": "{i}", "answer": "so #### {i}"}}\n' for i in numbers)
        (folder / f"{name}.jsonl").write_text(rows)


@pytest.fixture(scope="session")
def fake_cuda(request):
    """Call a function where there seems to be a CUDA device: `fake_cuda(module, function, **json)`."""
    if shim.compiler() is None:
        pytest.skip("there is no C++ compiler to build the CUDA device that is not there")
    folder = Path(request.config.cache.mkdir("fake_cuda"))
    with FileLock(folder / "lock"):
        library = shim.build(folder)

    def call(module: str, function: str, **arguments):
        command = [sys.executable, "-m", "tests.fake_cuda.run", str(library), module, function]
        done = subprocess.run(
            [*command, json.dumps(arguments)],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
        )
        # Torch lists the backends of an operator that it does not find.
        lines = [line for line in done.stderr.splitlines() if "registered at" not in line]
        assert done.returncode == 0, "\n".join(lines[-40:])
        return json.loads(done.stdout.splitlines()[-1])

    return call
