"""How many files a reader of `grpo train` goes through: pairs of files, one of which calls the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import RECIPE
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
# May only fall. The goal is 110 and 120. A command calls the checks of each section, which are files of their own.
MOST = {"command": 109, "worker": 118}
COUNTING = """
import json, os, sys
package, pairs = os.path.join(sys.argv[1], "grpo_cli", ""), set()

def note(frame, event, _):
    name = frame.f_code.co_filename
    if event != "call" or not name.startswith(package) or frame.f_code.co_name.startswith("<"):
        return
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(package):
        caller = caller.f_back
    if caller is not None and caller.f_code.co_filename != name:
        pairs.add((caller.f_code.co_filename, name))

def end():
    sys.setprofile(None)
    print(json.dumps(len(pairs)), flush=True)
    os._exit(0)
"""
COMMAND = """
import subprocess
from grpo_cli.cli.app import main
start = subprocess.Popen.__init__

def begin(process, argv, *more, **options):
    if any("grpo_cli.training.worker" in str(each) for each in argv):
        end()
    start(process, argv, *more, **options)

subprocess.Popen.__init__ = begin
sys.argv = ["grpo", "train", "recipe.yaml"]
sys.setprofile(note)
main()
"""
WORKER = """
import transformers
from grpo_cli.training import run, worker
from grpo_cli.training.session import StopRequest

class Ends(transformers.TrainerCallback):
    def on_step_end(self, *args, **more):
        end()

added = run._add_callbacks

def add_callbacks(session, trainer):
    callback = added(session, trainer)
    trainer.add_callback(Ends())
    return callback

run._add_callbacks = add_callbacks
StopRequest.wait_for_probe = lambda self: None
sys.setprofile(note)
worker.main([sys.argv[2]])
"""


def count(code: str, folder: Path, *arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNTING + code, str(ROOT), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip(), done.stderr[-2000:]
    return int(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_a_reader_of_a_training_goes_through_few_files(tmp_path):
    make_tiny_model(tmp_path / "model")
    rows = "\n".join(f'    - {{question: "{n}", answer: "{n}"}}' for n in range(8))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model="model", rows=rows))
    hops = {"command": count(COMMAND, tmp_path)}
    (run,) = (tmp_path / "runs" / "tiny").iterdir()
    hops["worker"] = count(WORKER, tmp_path, str(run))
    assert hops["command"] <= MOST["command"], hops
    assert hops["worker"] <= MOST["worker"], hops
