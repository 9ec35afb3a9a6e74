"""Servers that somebody else runs, as strangers answer: real ones on loopback, with wrong answers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_cli.errors import SetupError
from grpo_cli.launch.server_process import check_server

MODELS = {"data": [{"id": "m"}]}
SUITS = {
    "vllm_config": {
        "model_config": {"model": "m", "logprobs_mode": "processed_logprobs"},
        "weight_transfer_config": {"backend": "nccl"},
    }
}


@pytest.fixture
def serve():
    """Starts a server that answers as told, by path; gives its address."""
    started = []

    def start(answers):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = answers.get(self.path.partition("?")[0])
                text = body if isinstance(body, str) else json.dumps(body)
                self.send_response(404 if body is None else 200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def look(address, *, by_nccl=True, model="m", lora_rank=None):
    return check_server(
        address,
        "THE COMMAND",
        model=model,
        by_nccl=by_nccl,
        lora_rank=lora_rank,
        wait_s=0,
        tell=str,
    )


def answers_of(info, models=None):
    return {"/health": "", "/v1/models": models or MODELS, "/server_info": info}


def test_a_server_that_suits_raises_no_doubt(serve):
    assert look(serve(answers_of(SUITS))) == []


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({}, "no vLLM server answers at"),
        ({"/health": ""}, "does not answer as vLLM's server does"),
        (answers_of(SUITS, {"data": []}), "does not answer as vLLM's server does"),
        (answers_of(None), "has no development endpoints"),
        (answers_of("garbage"), "has no development endpoints"),
        (answers_of({"vllm_config": {"model_config": {}}}), "has no weight-transfer engine"),
    ],
)
def test_one_that_does_not_is_refused_with_the_command(serve, answers, said):
    with pytest.raises(SetupError, match=said) as refused:
        look(serve(answers))
    assert "THE COMMAND" in str(refused.value)


def test_what_is_doubtful_is_said(serve):
    config = {"model_config": {"model": "other", "logprobs_mode": "raw_logprobs"}}
    address = serve(answers_of({"vllm_config": {**SUITS["vllm_config"], **config}}))
    first, second = look(address)
    assert "returns raw_logprobs" in first
    assert "began with other, and training begins with m" in second


@pytest.mark.parametrize(
    ("lora", "doubts"), [(None, 1), ({"max_lora_rank": 8}, 1), ({"max_lora_rank": 16}, 0)]
)
def test_a_server_that_takes_no_adapters_is_said(serve, lora, doubts):
    address = serve(answers_of({"vllm_config": {**SUITS["vllm_config"], "lora_config": lora}}))
    found = look(address, lora_rank=16)
    assert len(found) == doubts
    assert all("takes no adapters of rank 16" in doubt for doubt in found)


def test_a_folder_is_of_no_use_to_another_machine():
    with pytest.raises(SetupError, match="does not see"):
        look("http://10.0.0.2:8000", by_nccl=False)
