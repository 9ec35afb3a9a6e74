"""The life of a managed server, with a small server in vLLM's place: real processes on loopback."""

import os
import signal
import socket
import sys
import time

import pytest

from grpo_cli.launch import server_process
from grpo_cli.launch.server_plan import ManagedServer
from grpo_cli.launch.server_process import answers, ask, watched
from grpo_cli.machine import pick_free_port

SERVER = """\
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

folder = Path(sys.argv[1])
print("hello from", os.getpid(), flush=True)
if (folder / "broken").exists():
    sys.exit((folder / "broken").read_text() + "\\n  no trace of it here" * 20)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if (folder / "sick").exists() else 200)
        self.end_headers()

    def log_message(self, *args):
        pass

(folder / "pid").write_text(str(os.getpid()))
HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


class Stage:
    """A server, its watch, and what was told."""

    def __init__(self, folder, max_restarts):
        self.folder = folder
        self.told = []
        port = pick_free_port()
        argv = (sys.executable, "-c", SERVER, str(folder), str(port))
        self.plan = ManagedServer(argv, "127.0.0.1", port, group_port=1, max_restarts=max_restarts)
        self.log = folder / "server.log"

    def watched(self):
        return watched(self.plan, self.log, self.told.append, lambda: False)

    def look_until(self, watch, met, limit_s=30):
        """Looks as a supervisor does, until something holds; gives the error to end with, if one comes."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (error := watch.look()) is not None:
                return error
            if met():
                return None
            time.sleep(0.05)
        pytest.fail("it did not come to that")

    def pid(self):
        return int((self.folder / "pid").read_text())

    def is_up(self):
        return (self.folder / "pid").exists() and answers(self.plan.health)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setattr(server_process, "_HEALTH_INTERVAL_S", 0.1)
    monkeypatch.setattr(server_process, "_UNHEALTHY_S", {"gone": 0.5, "silent": 0.5})
    return Stage(tmp_path, max_restarts=1)


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def answered(stage, watch):
    """Whether the watch itself has seen an answer."""
    return stage.is_up() and watch.look() is None and watch._has_answered


def test_a_server_is_ended_with_the_training(stage):
    with stage.watched() as watch:
        assert stage.look_until(watch, stage.is_up) is None
        pid = stage.pid()
    assert is_gone(pid)
    assert stage.told == []


def test_a_server_that_is_busy_is_waited_for_and_one_whose_engine_died_is_not():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/health"
        assert ask(address) == "gone"
        listening.listen()
        # The system takes the connection, and nobody reads from it.
        assert ask(address) == "silent"


def test_one_that_dies_is_started_again_up_to_a_limit(stage):
    with stage.watched() as watch:
        assert stage.look_until(watch, lambda: answered(stage, watch)) is None
        first = stage.pid()
        os.kill(first, signal.SIGKILL)
        assert stage.look_until(watch, lambda: stage.is_up() and stage.pid() != first) is None
        assert "starting it again (1 of 1 times)" in stage.told[0]
        os.kill(stage.pid(), signal.SIGKILL)
        error = str(stage.look_until(watch, lambda: False))
    assert "had been started again 1 times" in error
    assert "hello from" in error
    assert str(stage.log) in error


def test_one_that_no_longer_answers_counts_as_dead(stage):
    with stage.watched() as watch:
        assert stage.look_until(watch, lambda: answered(stage, watch)) is None
        first = stage.pid()
        (stage.folder / "sick").touch()
        assert stage.look_until(watch, lambda: stage.told) is None
        (stage.folder / "sick").unlink()
        assert stage.look_until(watch, lambda: stage.is_up() and stage.pid() != first) is None
        assert is_gone(first)


@pytest.mark.parametrize(
    ("last_words", "fix"),
    [
        ("no room for the keys", "Fix: see "),
        (
            "GPT2LMHeadModel does not support LoRA yet.",
            "Fix: set `generation.vllm.enable_lora: false`",
        ),
    ],
)
def test_one_that_never_answers_ends_the_run_with_its_last_words(stage, last_words, fix):
    (stage.folder / "broken").write_text(last_words)
    with stage.watched() as watch:
        error = str(stage.look_until(watch, lambda: False))
    assert "before it answered" in error
    assert "no trace of it here" in error
    assert fix in error
