"""`grpo serve` and `grpo chat`: real processes, a stand-in for vLLM's command, a real tiny model to talk to.

With vLLM installed the last test serves for real.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from grpo_cli.launch.server_plan import Served
from grpo_cli.models.loading import load_tokenizer
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.serve.chat import SamplingParams, _encode, open_server, say
from tests.in_process import run_command
from tests.integration.conftest import LORA, RECIPE, Workshop
from tests.integration.vllm_runs import EAGER, ENVIRONMENT, assert_ended, sets, workshop_of
from tests.json_reply import send_json


@pytest.fixture(scope="module")
def trained(tmp_path_factory, lora_run, chat_model):
    """A run with an adapter, and a `vllm` that is none."""
    workshop = Workshop.copy(lora_run, tmp_path_factory.mktemp("trained"), chat_model)
    command = workshop.folder / "bin" / "vllm"
    command.parent.mkdir()
    standin = Path(__file__).parent.parent / "vllm_standin.py"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{standin}" "$@"\n')
    command.chmod(0o755)
    return workshop


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def path_of(workshop):
    return f"{workshop.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


def start(workshop, *flags, **environment):
    command = workshop.command("serve", workshop.run, *flags, PATH=path_of(workshop), **environment)
    return subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


needs_standin = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="the real vllm would be found first"
)


@needs_standin
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_server_is_started_asked_and_ended(trained, sent):
    port = free_port()
    process = start(trained, "--port", str(port))
    said, _, curl = (process.stdout.readline() for _ in range(3))
    assert f"http://127.0.0.1:{port}/v1" in said
    assert curl.startswith(f"curl http://127.0.0.1:{port}/v1/chat/completions")
    children = psutil.Process(process.pid).children(recursive=True)
    asked = trained.folder / "asked"
    asked.write_text("first\n\nsecond\n")
    with asked.open() as lines:
        chat = trained.command("chat", trained.run, "--url", f"http://127.0.0.1:{port}/v1")
        done = subprocess.run(**chat, stdin=lines, capture_output=True, check=False)
    assert done.stdout == "tiny heard 1 \ntiny heard 3 \n"
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == (0 if sent == signal.SIGINT else 143)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@needs_standin
def test_a_server_that_cannot_start_says_why(trained):
    process = start(trained, "--port", str(free_port()), STANDIN_FAILS="1")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no room for the key-value cache" in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(trained, "--port", str(taken.getsockname()[1]))
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "another --port" in said


def test_the_command_holds_the_right_flags(trained):
    done = trained.grpo("serve", trained.run, "--dry-run", "--max-model-len", "256")
    assert done.returncode == 0
    argv = done.stdout.split()
    assert argv[1:3] == ["serve", str(trained.model)]
    for flag, value in (
        ("--lora-modules", f"tiny={trained.run}/model"),
        ("--max-lora-rank", "8"),
        ("--dtype", "float32"),
        ("--max-model-len", "256"),
    ):
        assert argv[argv.index(flag) + 1] == value
    assert "--enable-lora" in argv


def test_what_cannot_be_served_is_said(trained, tmp_path):
    for place, said in ((tmp_path, "neither a run nor a model"), (trained.model, None)):
        done = trained.grpo("serve", place, "--dry-run")
        assert done.returncode == (0 if said is None else 2)
        assert said is None or said in done.stderr
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "ollama create" in trained.grpo("serve", tmp_path, "--dry-run").stderr


def test_a_model_is_talked_to_in_this_process(trained):
    command = ["chat", str(trained.run), "--max-tokens", "6", "--temperature", "0"]
    done = run_command(command, trained.folder, stdin="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split("\n")) >= 3
    again = run_command(command, trained.folder, stdin="one\ntwo\n")
    assert again.stdout == done.stdout


class Continuing(BaseHTTPRequestHandler):
    """A server that remembers what it is to continue."""

    def do_GET(self):
        send_json(self, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked = (self.path, asked["prompt"])
        piece = json.dumps({"id": "1", "choices": [{"index": 0, "text": "two"}]})
        send_json(self, f"data: {piece}\n\ndata: [DONE]\n\n")

    def log_message(self, *args):
        pass


def test_a_model_of_plain_text_continues_it(chat_model):
    served = Served("m", str(chat_model), None, ModelConfig(path=str(chat_model)), is_text=True)
    tokenizer = load_tokenizer(served.settings)
    ids = _encode(tokenizer, [say("one")], served)["input_ids"][0].tolist()
    assert ids == tokenizer("one")["input_ids"]
    with HTTPServer(("127.0.0.1", 0), Continuing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        chat = open_server(url, None, SamplingParams(temperature=0, max_tokens=3), is_text=True)
        assert list(chat([say("one")])) == ["two"]
        server.shutdown()
    assert server.asked == ("/v1/completions", "one")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_serves_the_adapter_and_a_training_refuses_the_server(tmp_path, wide_model):
    trained = Workshop(tmp_path, wide_model)
    text = RECIPE.replace("dtype: float32", LORA)
    assert trained.grpo("train", trained.write(text)).returncode == 0
    port = free_port()
    flags = ["--port", str(port), "--max-model-len", "256", "--gpu-memory-utilization", "0.1"]
    process = start(trained, *flags, **ENVIRONMENT, **EAGER)
    try:
        said = process.stdout.readline()
        assert "answers at" in said, process.stderr.read()[-3000:]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"
        check_that_training_refuses(tmp_path / "refused", wide_model, port)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert_ended(children)


def check_that_training_refuses(folder, model, port):
    """A server that answers chats has no development endpoints; the message has the command of one that does."""
    folder.mkdir()
    workshop = workshop_of(folder, model, f"mode: server, base_url: http://127.0.0.1:{port}")
    recipe = folder / "recipe.yaml"
    command = workshop.grpo("serve", recipe, "--dry-run", "--port", port).stdout.split()
    assert "VLLM_SERVER_DEV_MODE=1" in command
    done = workshop.grpo("train", recipe, *sets(1))
    assert done.returncode == 3
    assert "has no development endpoints" in done.stderr
    assert f"grpo serve {recipe} --port {port}" in done.stderr
    assert not (folder / "runs").exists()
