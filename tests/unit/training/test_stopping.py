"""A worker whose supervisor was killed ends, whatever its step waits for."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

WORKER = """
import sys, time
from pathlib import Path
from grpo_cli.runs.folder import RunFolder
from grpo_cli.training import session

session._ORPHAN_S = int(sys.argv[1])
session.StopRequest(RunFolder(Path())).listen()
print("up", flush=True)
time.sleep(60)
"""
SUPERVISOR = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("alone_s", [1, 60])
def test_a_worker_that_waits_for_ever_does_not_outlive_its_supervisor(alone_s):
    command = [sys.executable, "-c", SUPERVISOR, WORKER, str(alone_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
        supervisor.stdout.readline()
        (worker,) = psutil.Process(supervisor.pid).children()
        # While the supervisor lives, its word counts, however many signals there are.
        for _ in range(3):
            os.kill(worker.pid, signal.SIGTERM)
            time.sleep(0.1)
        assert worker.status() != psutil.STATUS_ZOMBIE
        supervisor.kill()
    if alone_s > 1:
        time.sleep(0.3)
        os.kill(worker.pid, signal.SIGTERM)
    worker.wait(timeout=10)
