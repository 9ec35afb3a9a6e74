"""A vLLM server that samples for an asynchronous training, and how a CPU's is given weights.

Owns talking to the server while others learn. On GPUs the weights go by NCCL, which is TRL's
(`WeightTransferClient` of trl 1.16.0).

Source: vLLM 0.31, `/v1/completions`, `/pause`, `/resume`, `/collective_rpc`.
"""

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import save_file
from trl.experimental.async_grpo.vllm_client import VLLMClient

from grpo_cli.errors import RunError
from grpo_cli.recipe.generation import GenerationConfig
from grpo_cli.train.rollouts import Sampled

_TRIES = 3
_TIMEOUT_S = 3600.0
"""Longest wait for an answer: while weights are handed over, requests stand still."""
_SEEDS = 2**63


@dataclass
class ServerSampler:
    """Samples from a server; from several threads at once."""

    address: str
    """Its root, such as `http://127.0.0.1:8000`."""
    generation: GenerationConfig
    """How to sample."""
    seed: int
    """Of the requests' seeds."""
    _model: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.seed)

    def __call__(self, prompt_ids: Sequence[int], count: int) -> list[Sampled]:
        """That many completions of one prompt.

        Raises:
            RunError: The server has gone, or refuses.
        """
        if self._model is None:
            self._model = self._ask("get", "/v1/models")["data"][0]["id"]
        generation = self.generation
        asked = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "n": count,
            "max_tokens": generation.max_completion_length,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "repetition_penalty": generation.repetition_penalty,
            "seed": self._seeds.randrange(_SEEDS),
            "logprobs": 0,
            "return_token_ids": True,
            **({} if generation.min_p is None else {"min_p": generation.min_p}),
        }
        choices = self._ask("post", "/v1/completions", asked)["choices"]
        return [
            Sampled(
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                choice["finish_reason"] == "length",
            )
            for choice in sorted(choices, key=lambda choice: choice["index"])
        ]

    def _ask(self, method: str, path: str, asked: Any = None) -> Any:
        """An answer of the server's; a lost connection is tried again, as no weights were lost by it."""
        for attempt in range(_TRIES):
            try:
                answer = requests.request(
                    method, f"{self.address}{path}", json=asked, timeout=_TIMEOUT_S
                )
            except requests.ConnectionError as error:
                if attempt + 1 < _TRIES:
                    continue
                raise RunError(
                    f"the vLLM server at {self.address} has gone ({type(error).__name__}); an asynchronous "
                    "training does not survive that. Fix: see its log in logs/, then go on with --resume"
                ) from error
            if answer.ok:
                return answer.json()
            raise RunError(
                f"the vLLM server at {self.address} answered {answer.status_code}: {answer.text[:300]}. "
                "Fix: what it says; see its log in logs/"
            )
        return None


@dataclass
class FolderTransfer:
    """Hands weights to a server on a CPU of this machine, in a folder.

    Implements `WeightTransferProtocol` of trl 1.16.0.
    """

    client: VLLMClient
    """Of the server."""
    folder: Path
    """Where the weights lie while they are handed over."""

    def init_weight_transfer(self) -> None:
        """Nothing is to be prepared."""

    def pause(self) -> None:
        """Has the server hold what it is sampling."""
        self.client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Writes the weights, and has the server read them.

        Raises:
            RunError: It refuses.
        """
        tensors = {name: tensor.contiguous().cpu() for name, tensor in iterator}
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, str(self.folder / "model.safetensors"), metadata={"format": "pt"})
            answer = requests.post(
                f"{self.client.server_url}/collective_rpc",
                json={"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}},
                timeout=_TIMEOUT_S,
            )
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        if not answer.ok:
            raise RunError(
                f"the vLLM server did not take the weights: {answer.status_code} {answer.text[:300]}. "
                "Fix: see its log in logs/"
            )

    def resume(self) -> None:
        """Has the server go on, with the new weights."""
        self.client.resume()

    def destroy(self) -> None:
        """Nothing is held."""
