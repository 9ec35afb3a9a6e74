"""TRL's sampling with vLLM, on a CPU too, and from a server that comes back.

Owns what TRL leaves out: weights for vLLM's CPU kernels, which repack them and refuse TRL's way of loading;
and a server that died and was started again, which has forgotten the weights. The algorithm stays TRL's.

The only file that touches private names of TRL's vLLM integration, as read in trl 1.16.0: the module
attributes `grpo_trainer.VLLMGeneration` and `vllm_generation.VLLMClient`, and
`VLLMGeneration._iter_named_params`. Where an attribute is missing, TRL works by itself.
`tests/integration/test_vllm.py` and `test_vllm_server.py` fail if one of them changes its meaning.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import requests
import torch
from accelerate.utils import broadcast_object_list
from requests.adapters import HTTPAdapter
from safetensors.torch import save_file
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_cli.errors import SetupError
from grpo_cli.launch.check_server import HERE
from grpo_cli.launch.server_process import answers
from grpo_cli.machine import pick_free_port
from grpo_cli.train.merging import base_kept, merge_weights

_STARTED = "process_start_time_seconds"
"""What Prometheus' client tells of the process it runs in."""


@contextmanager
def patched_vllm(folder: Path, while_waiting: Callable[[], None]) -> Iterator[None]:
    """Has `GRPOTrainer`, built inside, sample with the classes of this file.

    Args:
        folder: Where weights are handed to a server on a CPU.
        while_waiting: Called again and again while there is no server; ends the wait by raising.
    """
    with ExitStack() as replaced:
        for module, name, ours in (
            (grpo_trainer, "VLLMGeneration", RunGeneration),
            (vllm_generation, "VLLMClient", RunClient),
        ):
            if hasattr(module, name):
                replaced.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, ours)
        RunClient.folder, RunClient.while_waiting = folder, staticmethod(while_waiting)
        yield


class RunClient(VLLMClient):
    """A client that notices when its server was started anew."""

    folder: Path
    """Where weights are handed over, on a CPU."""
    while_waiting: Callable[[], None]
    """Called again and again while there is no server."""
    lost = False
    """Whether the server has gone, or is another one than knew the weights."""
    _by_folder = False
    _started: str | None = None

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Waits for a server that is well; unlike TRL's, in a way that can be ended.

        Raises:
            ConnectionError: There was none in time.
        """
        deadline = time.monotonic() + total_timeout
        while not answers(f"{self.base_url}/health") and time.monotonic() < deadline:
            self.while_waiting()
            time.sleep(retry_interval)
        super().check_server()

    def init_communicator(self, device: Any = 0) -> None:
        """Prepares the handing over of weights: by NCCL, or on a CPU in a folder.

        Raises:
            SetupError: The server cannot take them from a folder.
        """
        # A server that was started anew must not be asked again as if it knew the weights.
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=0, pool_maxsize=64))
        self.lost, self._started = False, self._read_start()
        self._by_folder = torch.device(device).type == "cpu"
        if not self._by_folder:
            super().init_communicator(device)
            return
        # Fails by itself, and says how to mend it, where there are no development endpoints.
        self.get_server_info()
        if self.host not in HERE:
            raise SetupError(
                f"on a CPU weights are handed over in a folder, which {self.host} does not see. "
                "Fix: run the server on this machine"
            )

    def reconnect(self, timeout_s: float, device: Any) -> None:
        """Waits for the server, and makes ready to give it weights.

        Raises:
            ConnectionError: It did not come back in time.
        """
        self.check_server(timeout_s)
        if self._started is not None and self._read_start() == self._started:
            # The same process: the connection alone was lost.
            self.lost = False
            return
        self.close_communicator()
        if not self._by_folder:
            # The old one may be held by a connection that has not timed out yet.
            self.group_port = pick_free_port()
        self.init_communicator(device)

    def update_named_params(self, metadata: Any, named_params: Iterator[Any]) -> None:
        """Gives the server new weights; sets `lost` where it has gone."""
        with self._noting_loss():
            try:
                if self._by_folder:
                    self._write_and_reload(named_params)
                else:
                    super().update_named_params(metadata, named_params)
            finally:
                # To its end in any case: only then are adapters taken out of the weights again.
                for _ in named_params:
                    pass

    def _write_and_reload(self, named_params: Iterator[Any]) -> None:
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in named_params}
        self.folder.mkdir(exist_ok=True)
        save_file(tensors, str(self.folder / "model.safetensors"), metadata={"format": "pt"})
        try:
            self._post(
                f"{self.base_url}/collective_rpc",
                json={"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}},
            )
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _post(self, url: str, **given: Any) -> Any:
        """Ask the server; where it fails to take weights, free the training from handing them over.

        TRL reads the answer once the last weight is broadcast, and a broadcast to a server that has gone
        never ends.
        """
        try:
            return super()._post(url, **given)
        except Exception:
            communicator = self.communicator
            if url.endswith("/update_weights") and communicator is not None:
                communicator.nccl.ncclCommAbort(communicator.comm)
            raise

    def reset_prefix_cache(self) -> None:
        """Forgets what was computed with the weights of before; sets `lost` where there is no server."""
        with self._noting_loss():
            super().reset_prefix_cache()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Samples; nothing, with `lost` set, where the server has gone or is another one."""
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        with self._noting_loss():
            found = super().generate(*args, **kwargs)
        self.lost = self.lost or self._read_start() != self._started
        return found

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        # An answer that is not 200 comes as a bare exception.
        except Exception as error:
            if not isinstance(error, requests.ConnectionError) and self._is_well():
                raise
            self.lost = True

    def _is_well(self) -> bool:
        with suppress(requests.RequestException):
            return bool(self.session.get(f"{self.base_url}/health", timeout=10).ok)
        return False

    def _read_start(self) -> str | None:
        """When the server's process began; None where it does not tell."""
        with suppress(requests.RequestException):
            lines = self.session.get(f"{self.base_url}/metrics", timeout=10).text.splitlines()
            return next((line for line in lines if line.startswith(_STARTED)), None)
        return None


class RunGeneration(VLLMGeneration):
    """Sampling that survives its server, and engines on a CPU."""

    on_return: Callable[[], None] | None = None
    """Told on the main process when a server came back and was given the weights again."""
    synced_s = 0.0
    """Seconds spent on giving vLLM the weights, since the start."""

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the weights as vLLM names them, with adapters merged in copies."""
        with base_kept(self.model):
            yield from merge_weights(self.model, super()._iter_named_params())

    def sync_weights(self) -> None:
        """Gives vLLM the present weights; all processes take part."""
        started = time.perf_counter()
        try:
            self._sync_weights()
        finally:
            self.synced_s += time.perf_counter() - started

    def _sync_weights(self) -> None:
        if self.mode == "colocate" and self.accelerator.device.type == "cpu":
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": self._iter_named_params()}
            )
            self.llm.reset_prefix_cache()
            return
        super().sync_weights()
        while self._is_lost():
            self._take_back()
            super().sync_weights()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Samples with the weights last given; again where the server was lost meanwhile."""
        found = super().generate(*args, **kwargs)
        while self._is_lost():
            self._take_back()
            self.sync_weights()
            found = super().generate(*args, **kwargs)
        return found

    def sample_apart(
        self, prompts: Sequence[list[int]], count: int, temperature: float
    ) -> list[list[int]]:
        """Sample outside of training, with the weights last given and the whole distribution.

        All processes take part, each with equally many prompts.

        Args:
            prompts: Their tokens.
            count: Completions of each prompt; 1 if `temperature` is 0.
            temperature: 0 is greedy.

        Returns:
            The tokens of the completions, prompt by prompt.
        """
        whole: dict[str, Any] = {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "generation_kwargs": {},
        }
        training = {name: getattr(self, name) for name in whole}
        repeated = [prompt for prompt in prompts for _ in range(count)]
        try:
            for name, value in whole.items():
                setattr(self, name, value)
            _, completions, *_ = self.generate(repeated, None, count)
        finally:
            for name, value in training.items():
                setattr(self, name, value)
        return list(completions)

    def _is_lost(self) -> bool:
        """Whether the server has gone; all processes hear what the main one knows."""
        if self.mode != "server":
            return False
        lost = [self.accelerator.is_main_process and self.vllm_client.lost]
        broadcast_object_list(lost, from_process=0)
        return lost[0]

    def _take_back(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self.vllm_client.reconnect(self.server_timeout, self.accelerator.device)
        if self.on_return is not None:
            self.on_return()
