import os
import subprocess
import sys

import pytest

PRINT = (
    "import grpo_cli.training, os, sys; print(os.getcwd() in sys.path, os.environ['PYTHONPATH'])"
)


@pytest.mark.parametrize("own", [False, True])
def test_no_file_of_the_working_directory_takes_the_place_of_a_library(tmp_path, own):
    """As accelerate starts a worker for DeepSpeed; a user who names the folder themselves gets it."""
    root = os.path.abspath(".")
    before = f"{root}:{tmp_path}" if own else root
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "PYTHONPATH": f"{before}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PRINT],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(own), before]
