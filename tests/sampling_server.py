"""A server that samples as vLLM's does, with a tiny model on the CPU: real answers, real weights.

Speaks what an asynchronous training asks for, and notes down what it was asked.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.json_reply import send_json


class SamplingServer:
    """Serves a model folder until closed."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.asked: list[str] = []
        """The paths, in order."""
        self.loaded = 0
        """How often weights were taken."""
        self.fails = False
        """Whether it refuses to sample."""
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        handler = type("Handler", (_Handler,), {"served": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, asked: dict) -> tuple[dict, int]:
        self.asked.append(path)
        name = path.partition("?")[0].removeprefix("/")
        if name in ("pause", "resume"):
            (self._flows.set if name == "resume" else self._flows.clear)()
        elif name == "collective_rpc":
            self._load(Path(asked["kwargs"]["weights_path"]))
        elif name == "v1/models":
            return {"data": [{"id": "tiny", "max_model_len": 512}]}, 200
        elif name == "v1/completions":
            if self.fails:
                return {"error": "no room for the key-value cache"}, 500
            return {"choices": self._sample(asked)}, 200
        return {}, 200

    def _load(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        with self._lock:
            _, unknown = self.model.load_state_dict(weights, strict=False)
            assert not unknown, unknown
            self.loaded += 1

    @torch.no_grad()
    def _sample(self, asked: dict) -> list[dict]:
        self._flows.wait()
        prompt = torch.tensor([asked["prompt"]] * asked["n"])
        with self._lock:
            torch.manual_seed(asked["seed"] % 2**31)
            found = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=asked["temperature"],
                top_k=0,
                max_new_tokens=asked["max_tokens"],
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = torch.stack(found.logits, dim=1) / asked["temperature"]
        new = found.sequences[:, prompt.shape[1] :]
        chances = logits.log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)
        ends = self.model.generation_config.eos_token_id
        return [
            self._choice(*each, ends) for each in zip(range(len(new)), new, chances, strict=True)
        ]

    @staticmethod
    def _choice(index: int, ids: torch.Tensor, chances: torch.Tensor, end: int) -> dict:
        stops = (ids == end).nonzero().flatten().tolist()
        length = stops[0] + 1 if stops else len(ids)
        return {
            "index": index,
            "token_ids": ids[:length].tolist(),
            "logprobs": {"token_logprobs": chances[:length].tolist()},
            "finish_reason": "stop" if stops else "length",
        }


class _Handler(BaseHTTPRequestHandler):
    served: SamplingServer

    def do_GET(self):
        send_json(self, *self.served.answer(self.path, {}))

    def do_POST(self):
        length = int(self.headers.get("content-length") or 0)
        asked = json.loads(self.rfile.read(length) or b"{}")
        send_json(self, *self.served.answer(self.path, asked))

    def log_message(self, *args):
        pass
