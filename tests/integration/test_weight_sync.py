"""Weights and adapters on their way to a server that refuses them, or that takes a request and never answers."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
from accelerate import Accelerator, PartialState
from trl.generation.vllm_client import VLLMClient

from grpo_cli.errors import RunError
from grpo_cli.training import vllm_weights
from grpo_cli.training.asynchronous.trainer import AsyncRunTrainer
from grpo_cli.training.vllm_client import RunClient, VLLMLink
from grpo_cli.training.vllm_generation import RunGeneration
from grpo_cli.training.vllm_weights import SyncWatch, reload_from_folder
from tests.integration.test_merging import adapted
from tests.json_reply import send_json

END_HUNG = """\
import sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from grpo_cli.errors import RunError
from grpo_cli.runs.folder import RunFolder
from grpo_cli.training.session import Session

folder = RunFolder(Path(sys.argv[1]))
folder.attempt(folder.attempts).mkdir(parents=True)
session = Session(folder, None, None, SimpleNamespace(process_index=0), True, None)
threading.Thread(target=session.end_hung, args=[RunError("it hangs", "this")], daemon=True).start()
time.sleep(20)
"""


def make_generation(model, folder, port, watch):
    """TRL's generation with a client of a server on this machine, as it is after they found each other."""
    client = object.__new__(RunClient)
    client.base_url, client.session = f"http://127.0.0.1:{port}", requests.Session()
    client.communicator, client.group_port, client.host = None, 51216, "127.0.0.1"
    client.link, client.model = VLLMLink(folder, watch, print, print, lora_rank=8), "base"
    client.takes_adapter, client._by_folder = True, True
    generation = object.__new__(RunGeneration)
    generation.processing_class = None
    generation.mode, generation.model, generation.vllm_client = "server", model, client
    generation.accelerator, generation.link = Accelerator(cpu=True), client.link
    generation._weight_metadata = None
    generation._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda _: nullcontext())
    return generation


@pytest.mark.parametrize(
    ("rank", "request_path"), [(8, "/v1/load_lora_adapter"), (None, "/collective_rpc")]
)
def test_a_server_that_never_answers_ends_the_training_with_a_reason(
    chat_model, tmp_path, monkeypatch, rank, request_path
):
    # Long enough for a busy machine to come to the request.
    monkeypatch.setattr(vllm_weights, "_SILENCE_S", 2.0)
    monkeypatch.setattr(vllm_weights, "_TICK_S", 0.05)
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def end(error):
            seen.append(str(error))
            # In place of the process's end.
            silent.close()

        port = silent.getsockname()[1]
        generation = make_generation(adapted(chat_model), tmp_path, port, SyncWatch(end))
        generation.link = replace(generation.link, lora_rank=rank)
        generation._send()
    (reason,) = seen
    assert f"the vLLM server at http://127.0.0.1:{port} hangs" in reason
    assert request_path in reason
    assert "Fix: see the server's log" in reason
    assert generation.vllm_client.lost


def test_sending_that_goes_on_may_take_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(vllm_weights, "_SILENCE_S", 0.3)
    monkeypatch.setattr(vllm_weights, "_TICK_S", 0.01)
    seen = []
    watch, ended = SyncWatch(seen.append), threading.Event()
    with watch.active("vLLM", "this"):
        for count in range(30):
            ended.wait(0.02)
            watch.note(f"{count} tensors")
        # 50 MB a second are enough, wherever a server reads them.
        watch.note("a file", num_bytes=10**9)
        ended.wait(0.5)
        assert seen == []


def make_async_trainer(watch, *, is_main, barrier_s=0.0, **seconds):
    """An asynchronous trainer whose server takes this long to answer each request."""
    requests = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "resume")
    vllm = SimpleNamespace(
        **{name: partial(time.sleep, seconds.get(name, 0.2)) for name in requests}
    )

    def send(weights):
        vllm.start_weight_update()
        list(weights)
        vllm.update_weights()
        vllm.finish_weight_update()

    transfer = SimpleNamespace(
        vllm=vllm,
        send_weights=send,
        pause=lambda: vllm.pause(),
        resume=lambda: vllm.resume(),
    )
    trainer = object.__new__(AsyncRunTrainer)
    trainer.model, trainer.model_version, trainer.rollout_worker = torch.nn.Linear(2, 2), 0, None
    trainer.accelerator = SimpleNamespace(
        is_main_process=is_main,
        device=torch.device("cpu"),
        unwrap_model=lambda model: model,
        wait_for_everyone=lambda: time.sleep(barrier_s),
    )
    trainer.args = SimpleNamespace(vllm_server_base_url="http://vllm")
    trainer.weight_transfer = transfer if is_main else None
    trainer.watch = watch
    trainer._watch_sending()
    return trainer


@pytest.mark.parametrize(
    ("is_main", "seconds", "reasons"),
    [
        # Waiting for other processes is no part of sending, and answers are progress.
        (False, {"barrier_s": 0.6}, []),
        (True, {"barrier_s": 0.6}, []),
        # 24 bytes: 1 s more.
        (True, {"finish_weight_update": 0.8}, []),
        (True, {"pause": 0.8}, ["/pause was asked"]),
        (True, {"update_weights": 0.8}, ["/update_weights was asked"]),
    ],
)
def test_an_asynchronous_run_watches_requests_but_not_barriers(
    monkeypatch, is_main, seconds, reasons
):
    PartialState(cpu=True)
    monkeypatch.setattr(vllm_weights, "_SILENCE_S", 0.4)
    monkeypatch.setattr(vllm_weights, "_TICK_S", 0.02)
    monkeypatch.setattr(vllm_weights, "_READ_BYTES_S", 24)
    seen = []
    trainer = make_async_trainer(SyncWatch(seen.append), is_main=is_main, **seconds)
    trainer._sync_weight_merged(time.time())
    assert [error.seen.partition(" s after ")[2] for error in seen] == reasons


def test_a_slow_disk_and_slow_finalizing_get_time_for_the_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_weights, "_SILENCE_S", 0.2)
    monkeypatch.setattr(vllm_weights, "_TICK_S", 0.02)
    monkeypatch.setattr(vllm_weights, "_READ_BYTES_S", 16)
    monkeypatch.setattr(vllm_weights, "save_file", lambda *_, **__: time.sleep(0.6))
    monkeypatch.setattr(VLLMClient, "_post", lambda *_, **__: time.sleep(0.6))
    client, seen = object.__new__(RunClient), []
    client.base_url, client.communicator = "http://vllm", None
    watch = SyncWatch(seen.append)
    client.link = VLLMLink(tmp_path, watch, print, print)
    with watch.active("vLLM", "this"):
        weights = watch.count(iter([("w", torch.zeros(4))]))
        reload_from_folder(weights, tmp_path / "w", watch, lambda body, size: None)
        client._finish_weight_update()
    assert seen == []


def test_a_hung_process_ends_and_the_run_has_the_reason(tmp_path):
    done = subprocess.run([sys.executable, "-c", END_HUNG, tmp_path], capture_output=True)
    assert done.returncode == 1
    assert b"most recent call first" in done.stderr
    status = json.loads((tmp_path / "status.json").read_text())
    why = status["state"], status["reason"], status["fix"]
    assert why == ("failed", "it hangs", "this")


class CannotRead(BaseHTTPRequestHandler):
    """A server that sees none of the trainer's folders."""

    def do_GET(self):
        send_json(self, {"data": [{"id": "base"}]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.asked.append((self.path, json.loads(body or b"{}")))
        refused = self.path == "/v1/load_lora_adapter"
        send_json(self, {"error": "no adapter found"}, 404 if refused else 200)

    def log_message(self, *_):
        pass


def test_a_server_that_cannot_read_the_adapter_gets_merged_weights(chat_model, tmp_path, capsys):
    with HTTPServer(("127.0.0.1", 0), CannotRead) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        generation = make_generation(
            adapted(chat_model), tmp_path, server.server_port, SyncWatch(pytest.fail)
        )
        generation._send()
        generation._send()
        server.shutdown()
    paths = [path for path, _ in server.asked]
    # Asked once: what it cannot read in the first step it cannot read in the next.
    assert paths.count("/v1/load_lora_adapter") == 1
    assert paths.count("/collective_rpc") == 2
    assert paths[-1] == "/reset_prefix_cache"
    assert generation.vllm_client.model == "base"
    assert "gets merged weights instead: 404" in capsys.readouterr().err


class Gateway(BaseHTTPRequestHandler):
    """What still answers when the server behind it has gone."""

    def do_GET(self):
        send_json(self, {}, 502)

    def log_message(self, *_):
        pass


def test_a_gateway_whose_server_has_gone_is_not_waited_for_longer_than_may_be():
    client = object.__new__(RunClient)
    waited = []
    client.link = VLLMLink(Path(), SyncWatch(), lambda: waited.append(1), print)
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client.base_url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(RunError, match=r"no healthy vLLM server at .* in 0\.3 s"):
            client.check_server(0.3, retry_interval=0.1)
        server.shutdown()
    assert waited


class Restarting(BaseHTTPRequestHandler):
    """A server whose memory is lost when it is started again."""

    def do_GET(self):
        lora = {"lora_config": {"max_lora_rank": 8}, "parallel_config": {"data_parallel_size": 1}}
        replies = {
            "/v1/models": {"data": [{"id": "base"}]},
            "/server_info": {"vllm_config": lora},
            "/metrics": f"process_start_time_seconds {self.server.starts}",
        }
        send_json(self, replies.get(self.path.partition("?")[0], {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        self.server.asked.append(self.path)
        if self.path == "/v1/load_lora_adapter":
            self.server.adapters[body["lora_name"]] = Path(body["lora_path"])
        known = self.path != "/v1/completions" or body["model"] in self.server.adapters
        send_json(self, {}, 200 if known else 404)

    def log_message(self, *_):
        pass


def test_a_server_that_was_started_again_gets_the_base_and_the_adapter_again(chat_model, tmp_path):
    with HTTPServer(("127.0.0.1", 0), Restarting) as server:
        server.asked, server.adapters, server.starts = [], {}, 1
        threading.Thread(target=server.serve_forever, daemon=True).start()
        generation = make_generation(
            adapted(chat_model), tmp_path, server.server_port, SyncWatch(pytest.fail)
        )
        generation.server_timeout, client = 10.0, generation.vllm_client
        client.init_communicator("cpu")
        for starts in (1, 2):
            server.starts, server.adapters = starts, {}
            if starts == 2:
                # It no longer knows the adapter that it is asked for.
                client.generate([[1]])
                assert client.lost
                assert generation._reconnected()
            server.asked.clear()
            generation.sync_weights()
            generation.sync_weights()
            # The base once, as it may have served another before; each adapter from a folder of its own.
            assert server.asked.count("/collective_rpc") == 1
            assert server.asked.count("/v1/load_lora_adapter") == 2
            assert [client.model] == list(server.adapters)
            assert [*tmp_path.iterdir()] == [*server.adapters.values()]
        server.shutdown()
