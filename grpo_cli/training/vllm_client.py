"""TRL's client of a vLLM server, which notices that its server was restarted, and passes adapters and images."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient, parse_logprobs

from grpo_cli.data.images import as_data_url
from grpo_cli.errors import RunError, SetupError
from grpo_cli.launch.server_process import HERE, answers
from grpo_cli.machine import pick_free_port
from grpo_cli.training.vllm_weights import SyncWatch, reload_from_folder
from grpo_cli.upstream.vllm import (
    COLLECTIVE_RPC,
    FINISH_UPDATE,
    GENERATE,
    LOAD_ADAPTER,
    RESET_ENCODER_CACHE,
    UNLOAD_ADAPTER,
)

_STARTED = "process_start_time_seconds"
"""Name under which Prometheus' client tells when its process started."""
_REQUESTS = 64
"""That a server gets at a time."""
ADAPTER = "grpo"
"""What vLLM calls the adapter."""


@dataclass(frozen=True)
class VLLMLink:
    """How a training reaches vLLM."""

    folder: Path
    """Where weights on a CPU, and adapters, are passed."""
    watch: SyncWatch
    while_waiting: Callable[[], None]
    """Called repeatedly while there is no server; ends the wait by raising."""
    on_return: Callable[[], None]
    """Called on the main process when a server came back and has the weights again."""
    lora_rank: int | None = None
    """Of the adapters that vLLM takes; None if merged weights are sent."""
    is_managed: bool = False
    """Whether the server was started with the training, and so began with the training's weights."""


class RunClient(VLLMClient):
    """A client that notices when its server was restarted."""

    lost = False
    """Whether the server has gone, or was restarted and does not have the weights."""
    takes_adapter = False
    """Whether the server takes an adapter as it is."""
    lacks_base = False
    """Whether the server may have other base weights than the training: it served others before."""
    _by_folder = False
    _device: Any = 0
    _started: str | None = None

    def __init__(self, *args: Any, link: VLLMLink, **options: Any) -> None:
        """Connect to a server; `args` and `options` are TRL's."""
        self.link = link
        super().__init__(*args, **options)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait for a healthy server, calling `while_waiting`; raises `RunError` if there is none in time."""
        deadline = time.monotonic() + total_timeout
        while not answers(f"{self.base_url}/health"):
            # TRL waits for ever for one that answers with an error, as a gateway does whose server has gone.
            if time.monotonic() >= deadline:
                raise RunError(
                    f"no healthy vLLM server at {self.base_url} in {total_timeout:g} s",
                    "see its log, restart it, and resume the run with --resume",
                )
            self.link.while_waiting()
            time.sleep(retry_interval)
        super().check_server()

    def init_communicator(self, device: Any = 0) -> None:
        """Prepare to send weights: by NCCL from the first time on, or on a CPU in a folder.

        Raises:
            SetupError: The server is on another machine and cannot read them from a folder.
        """
        # A restarted server must not get a request again as if it had the weights.
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=0, pool_maxsize=_REQUESTS))
        self.lost, self._started = False, self._read_start()
        self._device, self._by_folder = device, torch.device(device).type == "cpu"
        # Without development endpoints this fails, and says what to do.
        info = self.get_server_info()
        self.model = self._base_name()
        self.takes_adapter = _takes_adapter(info, self.link.lora_rank)
        self.lacks_base = not self.link.is_managed
        if self._by_folder and self.host not in HERE:
            raise SetupError(
                f"on a CPU weights are passed in a folder, which {self.host} cannot read",
                "run the server on this machine",
            )

    def _base_name(self) -> str:
        """Return what the server calls the model below its adapters."""
        return str(self._get(f"{self.base_url}/v1/models")["data"][0]["id"])

    def reconnect(self, timeout_s: float, device: Any) -> None:
        """Wait for the server as `check_server` does, and prepare to send it weights."""
        self.check_server(timeout_s)
        if self._started is not None and self._read_start() == self._started:
            # The same process: only the connection was lost.
            self.lost = False
            return
        self.close_communicator()
        if not self._by_folder:
            # A connection that has not timed out yet may still hold the old port.
            self.group_port = pick_free_port()
        self.init_communicator(device)

    def update_named_params(self, metadata: Any, named_params: Iterator[Any]) -> None:
        """Send new weights; set `lost` if the server has gone."""
        with self._noting_loss():
            try:
                if self._by_folder:
                    url = f"{self.base_url}{COLLECTIVE_RPC}"
                    reload_from_folder(
                        named_params,
                        self.link.folder / "whole",
                        self.link.watch,
                        lambda body, size: self._post(url, size, json=body),
                    )
                else:
                    if self.communicator is None:
                        self.link.watch.note("nothing: NCCL is set up")
                        super().init_communicator(self._device)
                    super().update_named_params(metadata, named_params)
            finally:
                # Always to the end: the other processes take part.
                for _ in named_params:
                    pass

    def load_adapter(self, folder: Path) -> bool:
        """Load the adapter in a folder into the server; return whether it takes adapters.

        The name stays the same: one for each step would stay in the server's tables and metrics. It is unloaded
        before, as `load_inplace` would have the server read the folder for every request (vllm pull 41482).
        """
        body = {"lora_name": ADAPTER, "lora_path": str(folder.absolute())}
        with self._noting_loss():
            self.link.watch.note(f"the adapter was written to {folder}: {LOAD_ADAPTER}")
            self.session.post(f"{self.base_url}{UNLOAD_ADAPTER}", json=body)
            response = self.session.post(f"{self.base_url}{LOAD_ADAPTER}", json=body)
            self.takes_adapter = bool(response.ok)
            self.model = ADAPTER if response.ok else self._base_name()
            if not response.ok:
                print(
                    f"warning: the vLLM server at {self.base_url} cannot load the adapter from {folder}, and gets "
                    f"merged weights instead: {response.status_code} {response.text[:300]}",
                    file=sys.stderr,
                    flush=True,
                )
            self.reset_prefix_cache()
        return self.takes_adapter

    def _post(self, url: str, num_bytes: int = 0, /, **options: Any) -> Any:
        """Send a request; if the server fails to take weights, abort the broadcast.

        TRL reads the response after the last weight is broadcast, and a broadcast to a server that has gone never
        ends. `num_bytes` is what the server has to read from a folder before it answers.
        """
        path = urlsplit(url).path
        if path == FINISH_UPDATE:
            num_bytes = self.link.watch.sent_bytes
        self.link.watch.note(f"{path} was asked", num_bytes)
        try:
            response = super()._post(url, **options)
        except Exception:
            communicator = self.communicator
            if url.endswith("/update_weights") and communicator is not None:
                communicator.nccl.ncclCommAbort(communicator.comm)
            raise
        self.link.watch.note(f"{path} was answered")
        return response

    def reset_prefix_cache(self) -> None:
        """Drop what was computed with earlier weights; set `lost` if the server has gone."""
        with self._noting_loss():
            super().reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Drop what earlier weights have made of images; set `lost` if the server has gone."""
        with self._noting_loss():
            self.session.post(f"{self.base_url}{RESET_ENCODER_CACHE}").raise_for_status()

    def generate(self, *args: Any, **options: Any) -> Any:
        """Sample; return nothing and set `lost` if the server has gone or was restarted."""
        sampled: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        with self._noting_loss():
            sampled = super().generate(*args, **options)
        self.lost = self.lost or self._read_start() != self._started
        return sampled

    def image_features(self, images: list[Any], *args: Any) -> list[Any]:
        """Return each prompt's images as the server takes them; None if it has none."""
        return [
            [{"type": "image_url", "url": as_data_url(each)} for each in own] if own else None
            for own in images
        ]

    def _generate_from_features(
        self, prompts: list[list[int]], features: list[Any], sampling_params: dict[str, Any]
    ) -> dict[str, Any]:
        """Sample from prompts with one placeholder for each image, which the server replaces.

        TRL (1.16) has the server prepare the images first, and finds their places by runs of one token. That fails
        if images stand side by side, or an image has several runs.
        """

        def send(ids: list[int], parts: list[Any] | None) -> Any:
            images = {"content_parts": parts} if parts else {}
            body = {"model": self.model, "token_ids": ids, "sampling_params": sampling_params}
            url = f"{self.base_url}{GENERATE}"
            return self._post(url, json={**body, **images, "return_token_ids": True})

        with ThreadPoolExecutor(_REQUESTS) as executor:
            responses = list(executor.map(send, prompts, features))
        choices = [choice for response in responses for choice in response["choices"]]
        logprobs, token_ids = parse_logprobs([choice["logprobs"] for choice in choices])
        return {
            "prompt_ids": [response["prompt_token_ids"] for response in responses],
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": logprobs,
            "logprob_token_ids": token_ids,
        }

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        # TRL raises a bare exception for a response that is not 200.
        except Exception as error:
            is_same = self._is_healthy() and self._read_start() == self._started
            if is_same and not isinstance(error, requests.ConnectionError):
                raise
            self.lost = True

    def _is_healthy(self) -> bool:
        with suppress(requests.RequestException):
            return bool(self.session.get(f"{self.base_url}/health", timeout=10).ok)
        return False

    def _read_start(self) -> str | None:
        """When the server's process started; None if it does not say."""
        with suppress(requests.RequestException):
            lines = self.session.get(f"{self.base_url}/metrics", timeout=10).text.splitlines()
            return next((line for line in lines if line.startswith(_STARTED)), None)
        return None


def _takes_adapter(info: dict[str, Any], rank: int | None) -> bool:
    """Return whether a server with this configuration takes adapters of a rank.

    An adapter reaches only one of several replicas.
    """
    lora, parallel = info.get("lora_config"), info.get("parallel_config") or {}
    if rank is None or not lora or parallel.get("data_parallel_size", 1) > 1:
        return False
    return bool(lora["max_lora_rank"] >= rank)
