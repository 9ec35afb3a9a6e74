"""TRL's sampling with vLLM, also on a CPU, and with a server that restarts.

Adds what TRL lacks: adapters that vLLM loads as adapters; weights for vLLM's CPU kernels, which repack them and
refuse TRL's way of loading; and a server that died and was started again, which has forgotten the weights.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
import torch
from accelerate.utils import broadcast_object_list
from requests.adapters import HTTPAdapter
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_cli.errors import SetupError
from grpo_cli.launch.server_process import HERE, answers
from grpo_cli.machine import pick_free_port
from grpo_cli.models.vllm_engine import adapter_rank
from grpo_cli.runs.metrics import append_record
from grpo_cli.training.session import Session
from grpo_cli.training.vllm_weights import (
    SyncWatch,
    Weights,
    base_kept,
    merge_weights,
    read_adapter,
    reload_from_folder,
    write_adapter,
)
from grpo_cli.upstream import replaced
from grpo_cli.upstream.vllm import (
    COLLECTIVE_RPC,
    FINISH_UPDATE,
    LOAD_ADAPTER,
    RELOAD_WEIGHTS,
    UNLOAD_ADAPTER,
)

_STARTED = "process_start_time_seconds"
"""Name under which Prometheus' client tells when its process started."""
ADAPTER = "grpo"
"""What vLLM calls the adapter."""
T = TypeVar("T")


@contextmanager
def patched_vllm(session: Session, while_waiting: Callable[[], None]) -> Iterator[None]:
    """Patch TRL to use `RunGeneration` and `RunClient` inside.

    `while_waiting` is called repeatedly while there is no server, and ends the wait by raising.
    """
    generation = session.recipe.generation
    rank = adapter_rank(session.recipe, "cpu" if session.cpu else "cuda")
    folder = session.folder.sent_weights
    # An attempt that was killed may have left an adapter.
    shutil.rmtree(folder, ignore_errors=True)
    watch = SyncWatch(session.end_hung)
    RunClient.folder, RunClient.while_waiting = folder, staticmethod(while_waiting)
    RunClient.lora_rank, RunClient.is_managed = rank, generation.has_managed_server
    RunGeneration.folder, RunGeneration.lora_rank = folder, rank
    RunClient.watch = RunGeneration.watch = watch
    changes: dict[str, Any] = {"VLLMClient": RunClient}
    if rank is not None and hasattr(vllm_generation, "LLM"):
        changes["LLM"] = partial(_build_engine, vllm_generation.LLM, rank)
    with (
        replaced(grpo_trainer, VLLMGeneration=RunGeneration),
        replaced(vllm_generation, **changes),
    ):
        yield


def _build_engine(engine: Any, rank: int, **options: Any) -> Any:
    """Return an engine in this process that takes adapters of up to this rank, one at a time."""
    with _explained_refusal():
        return engine(**options, enable_lora=True, max_lora_rank=rank)


@contextmanager
def _explained_refusal() -> Iterator[None]:
    """Say what to do if vLLM takes no adapters for the model, or none for these modules."""
    try:
        yield
    except ValueError as error:
        if "LoRA" not in str(error):
            raise
        raise SetupError(
            f"vLLM cannot sample with this adapter: {error} Fix: set `generation.vllm.enable_lora: false`, which "
            "sends merged weights"
        ) from error


class RunClient(VLLMClient):
    """A client that notices when its server was restarted."""

    folder: Path
    """Where weights are passed to a server on a CPU."""
    while_waiting: Callable[[], None]
    """Called repeatedly while there is no server."""
    watch = SyncWatch()
    lora_rank: int | None = None
    """Of the adapters that a server should take; None if merged weights are sent."""
    is_managed = False
    """Whether the server was started with the training, and so began with the training's weights."""
    lost = False
    """Whether the server has gone, or was restarted and does not have the weights."""
    takes_adapter = False
    """Whether the server takes an adapter as it is."""
    lacks_base = False
    """Whether the server may have other base weights than the training: it served others before."""
    _by_folder = False
    _device: Any = 0
    _started: str | None = None

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait for a healthy server, calling `while_waiting`; ConnectionError if there is none in time."""
        deadline = time.monotonic() + total_timeout
        while not answers(f"{self.base_url}/health") and time.monotonic() < deadline:
            self.while_waiting()
            time.sleep(retry_interval)
        super().check_server()

    def init_communicator(self, device: Any = 0) -> None:
        """Prepare to send weights: by NCCL from the first time on, or on a CPU in a folder.

        Raises:
            SetupError: The server is on another machine and cannot read them from a folder.
        """
        # A restarted server must not get a request again as if it had the weights.
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=0, pool_maxsize=64))
        self.lost, self._started = False, self._read_start()
        self._device, self._by_folder = device, torch.device(device).type == "cpu"
        # Without development endpoints this fails, and says what to do.
        info = self.get_server_info()
        self.model = self._base_name()
        self.takes_adapter = _takes_adapter(info, self.lora_rank)
        self.lacks_base = not self.is_managed
        if self._by_folder and self.host not in HERE:
            raise SetupError(
                f"on a CPU weights are passed in a folder, which {self.host} cannot read. "
                "Fix: run the server on this machine"
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
                        self.folder / "whole",
                        self.watch,
                        lambda body, size: self._post(url, size, json=body),
                    )
                else:
                    if self.communicator is None:
                        self.watch.note("nothing: NCCL is set up")
                        super().init_communicator(self._device)
                    super().update_named_params(metadata, named_params)
            finally:
                # Always to the end: the other processes take part.
                for _ in named_params:
                    pass

    def load_adapter(self, folder: Path) -> bool:
        """Have the server sample with the adapter in a folder; return whether it takes adapters.

        The name stays the same: one for each step would stay in the server's tables and metrics. It is unloaded
        before, as `load_inplace` would have the server read the folder for every request (vllm pull 41482).
        """
        body = {"lora_name": ADAPTER, "lora_path": str(folder.absolute())}
        with self._noting_loss():
            self.watch.note(f"the adapter was written to {folder}: {LOAD_ADAPTER}")
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
            num_bytes = self.watch.sent_bytes
        self.watch.note(f"{path} was asked", num_bytes)
        try:
            response = super()._post(url, **options)
        except Exception:
            communicator = self.communicator
            if url.endswith("/update_weights") and communicator is not None:
                communicator.nccl.ncclCommAbort(communicator.comm)
            raise
        self.watch.note(f"{path} was answered")
        return response

    def reset_prefix_cache(self) -> None:
        """Drop what was computed with earlier weights; set `lost` if the server has gone."""
        with self._noting_loss():
            super().reset_prefix_cache()

    def generate(self, *args: Any, **options: Any) -> Any:
        """Sample; return nothing and set `lost` if the server has gone or was restarted."""
        sampled: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        with self._noting_loss():
            sampled = super().generate(*args, **options)
        self.lost = self.lost or self._read_start() != self._started
        return sampled

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


class RunGeneration(VLLMGeneration):
    """Sampling that survives a restart of the server, with adapters, and with engines on a CPU."""

    on_return: Callable[[], None] | None = None
    """Called on the main process when a server came back and has the weights again."""
    synced_s = 0.0
    """Seconds spent on sending weights since the start."""
    folder: Path
    """Where adapters are passed to vLLM."""
    watch = SyncWatch()
    lora_rank: int | None = None
    """Of the adapters that vLLM takes; None if merged weights are sent."""
    _adapter: Any = None
    """The request for the adapter that an engine in this process has."""
    _num_adapters = 0
    _without_adapter = False

    def _iter_named_params(self) -> Weights:
        with base_kept(self.model):
            weights = super()._iter_named_params()
            if not self._without_adapter:
                weights = merge_weights(self.model, weights)
            yield from self.watch.count(weights)

    def sync_weights(self) -> None:
        """Send the current weights to vLLM; all processes take part."""
        started = time.perf_counter()
        try:
            self._send()
            while self._reconnected():
                self._send()
        finally:
            self.synced_s += time.perf_counter() - started

    def _send(self) -> None:
        # What processes wait for one another before this is not sending.
        self.accelerator.wait_for_everyone()
        is_main = self.accelerator.is_main_process
        with self.watch.active(*self._describe_target()) if is_main else nullcontext():
            if not (self._prepare_for_adapter() and self._send_adapter()):
                self._send_whole()

    def _describe_target(self) -> tuple[str, str]:
        """Return who gets the weights, and what to do if that hangs."""
        if self.mode == "colocate":
            return "vLLM in this process", "see the stacks at the end of this process's log"
        address = self.vllm_client.base_url
        fix = "see the server's log and restart it; then go on with --resume"
        if self.accelerator.device.type != "cpu":
            fix += (
                ". If it waits for tensors, set NCCL_SOCKET_IFNAME for the server and for `grpo train` to the "
                "network interface by which they reach each other (NCCL_DEBUG=INFO prints the one in use), and "
                f"leave port {self.vllm_client.group_port} open between them"
            )
        return f"the vLLM server at {address}", fix

    def _send_whole(self) -> None:
        if self.mode == "colocate" and self.accelerator.device.type == "cpu":
            weights = {"weights_iterator": self._iter_named_params()}
            self.llm.collective_rpc(RELOAD_WEIGHTS, kwargs=weights)
            self.llm.reset_prefix_cache()
        else:
            super().sync_weights()

    def _prepare_for_adapter(self) -> bool:
        """Return whether vLLM takes the adapter as it is; send a server that needs it the base first."""
        if self.lora_rank is None or self.mode == "colocate":
            return self.lora_rank is not None
        takes_adapter, lacks_base = self._ask_main(lambda it: (it.takes_adapter, it.lacks_base))
        if takes_adapter and lacks_base:
            with replaced(self, _without_adapter=True):
                self._send_whole()
            if self.accelerator.is_main_process:
                self.vllm_client.lacks_base = self.vllm_client.lost
        return bool(takes_adapter)

    def _send_adapter(self) -> bool:
        """Have vLLM load the adapter; return whether it does."""
        self.watch.note("nothing: the adapter is gathered")
        tensors = read_adapter(self.model, self._dist.gather_params)
        self._num_adapters += 1
        # A new path each time: vLLM caches prompts by an adapter's name and path.
        path = self.folder / f"adapter_{self._num_adapters}"
        with self._written(path, tensors):
            if self.mode == "server":
                return self._ask_main(lambda client: client.load_adapter(path))
            from vllm.lora.request import LoRARequest

            # A new number is loaded, and the adapter before it is evicted: there is room for one.
            self._adapter = LoRARequest(ADAPTER, self._num_adapters, str(path.absolute()))
            with _explained_refusal():
                self.llm.llm_engine.add_lora(self._adapter)
            self.llm.reset_prefix_cache()
            return True

    @contextmanager
    def _written(self, path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
        """Write an adapter where vLLM can read it inside; those before it are deleted.

        It stays until the next one comes: vLLM reads it again if it was evicted. In `colocate` mode each machine
        has its own.
        """
        accelerator = self.accelerator
        in_server = self.mode == "server"
        if accelerator.is_main_process if in_server else accelerator.is_local_main_process:
            write_adapter(path, tensors)
        if not in_server:
            accelerator.wait_for_everyone()
        yield
        for each in self.folder.glob("adapter_*"):
            if each != path:
                shutil.rmtree(each, ignore_errors=True)

    def generate(self, *args: Any, **options: Any) -> Any:
        """Sample with the last weights; repeat if the server was lost meanwhile."""
        with self._asking_for_adapter():
            sampled = super().generate(*args, **options)
            while self._reconnected():
                self.sync_weights()
                sampled = super().generate(*args, **options)
        return sampled

    @contextmanager
    def _asking_for_adapter(self) -> Iterator[None]:
        """Have an engine in this process sample with its adapter; a server is asked for it by its name."""
        if self._adapter is None:
            yield
            return
        with replaced(self.llm, generate=partial(self.llm.generate, lora_request=self._adapter)):
            yield

    def sample_apart(
        self,
        prompts: list[list[int]],
        *,
        count: int,
        temperature: float,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Sample a completion of each prompt outside of training, from the whole distribution.

        All processes take part, each with equally many prompts, in groups of `count` equal ones. A temperature of
        0 is greedy. `max_tokens` are the most of a completion, if not those of training.
        """
        settings: dict[str, Any] = {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "generation_kwargs": {},
            "max_completion_length": max_tokens or self.max_completion_length,
        }
        with replaced(self, **settings):
            _, completions, *_ = self.generate(prompts, None, count)
        return list(completions)

    def _reconnected(self) -> bool:
        """Whether the server was lost, and is back without the weights; the main process tells all others."""
        if self.mode != "server":
            return False
        lost = self._ask_main(lambda client: client.lost)
        if lost and self.accelerator.is_main_process:
            self.vllm_client.reconnect(self.server_timeout, self.accelerator.device)
            if self.on_return is not None:
                self.on_return()
        return lost

    def _ask_main(self, ask: Callable[[RunClient], T]) -> T:
        """Return, on every process, what the main process answers; only that one has a client."""
        answers = [ask(self.vllm_client) if self.accelerator.is_main_process else None]
        broadcast_object_list(answers, from_process=0)
        return answers[0]  # type: ignore[return-value]


def watch_server(session: Session, trainer: Any) -> RunGeneration | None:
    """Record in which step a vLLM server came back; return what samples with vLLM, if anything does."""
    generation = getattr(trainer, "vllm_generation", None)
    if not isinstance(generation, RunGeneration):
        return None

    def record_return() -> None:
        session.report("training")
        record = {"event": "server", "step": trainer.state.global_step}
        append_record(session.folder.metrics, record)

    generation.on_return = record_return
    return generation
