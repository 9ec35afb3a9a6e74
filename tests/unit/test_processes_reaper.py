"""A command under guard, and all that it starts, ends with whoever asked for it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from grpo_cli.processes import reaped, reaped_stdio

# A command with a child in a session of its own; it notes both down.
COMMAND = """\
import os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open("pids.part", "w") as out:
    print(os.getpid(), child.pid, file=out)
os.rename("pids.part", "pids")
time.sleep(1000)
"""
# Asks for it and then does nothing.
ASKER = """\
import sys, time
from grpo_cli.processes import reaped
with reaped(sys.argv[1:]):
    time.sleep(1000)
"""


def wait_for_pids(folder):
    deadline = time.monotonic() + 30
    while not (folder / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [psutil.Process(int(pid)) for pid in (folder / "pids").read_text().split()]


def all_gone(processes, timeout=15):
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return not alive


def command(*flags):
    return [sys.executable, "-c", COMMAND, *flags]


def test_an_exit_code_is_passed_on(tmp_path):
    with reaped([sys.executable, "-c", "raise SystemExit(7)"]) as process:
        assert process.wait(30) == 7
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with reaped([sys.executable, "-c", killed]) as process:
        assert process.wait(30) == 137


def test_leaving_ends_the_whole_family(tmp_path):
    with reaped(command(), cwd=tmp_path):
        family = wait_for_pids(tmp_path)
    assert all_gone(family)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_family_ends_with_the_asker(tmp_path, number):
    asker = subprocess.Popen([sys.executable, "-c", ASKER, *command()], cwd=tmp_path)
    family = wait_for_pids(tmp_path)
    os.kill(asker.pid, number)
    asker.wait()
    assert all_gone(family)


def test_who_does_not_listen_is_ended_when_asked_again(tmp_path):
    with reaped(command("deaf"), cwd=tmp_path) as process:
        family = wait_for_pids(tmp_path)
        process.terminate()
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
        assert process.wait(10) == 137
    assert all_gone(family)


# Talks to a command over its stdin and stdout; then does nothing.
TALKER = """\
import subprocess, sys, time
from grpo_cli.processes import reaped_stdio
process = subprocess.Popen(
    reaped_stdio(sys.argv[1:]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
)
time.sleep(1000)
"""


@pytest.mark.parametrize("flags", [(), ("deaf",)], ids=["", "deaf"])
def test_a_command_over_stdio_dies_with_its_parent(tmp_path, flags):
    asker = subprocess.Popen([sys.executable, "-c", TALKER, *command(*flags)], cwd=tmp_path)
    family = wait_for_pids(tmp_path)
    asker.kill()
    asker.wait()
    assert all_gone(family)


def test_a_command_over_stdio_is_talked_to():
    echo = [sys.executable, "-c", "print(input() * 2)"]
    result = subprocess.run(
        reaped_stdio(echo), input=b"ab\n", capture_output=True, env={}, check=True
    )
    assert result.stdout == b"abab\n"
