"""TRL's sampling with vLLM, also on a CPU, and with a server that restarts.

Adds what TRL lacks: adapters that vLLM loads as adapters; images that vLLM expands itself; weights for vLLM's CPU
kernels, which repack them and refuse TRL's way of loading; and a server that died and was started again, which has
forgotten the weights.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from transformers import ProcessorMixin
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_cli.errors import RunError, SetupError
from grpo_cli.models.processor import ban_image_token
from grpo_cli.models.vllm_engine import adapter_rank, processor_settings
from grpo_cli.recipe.generation import stop_params
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import StatusFile
from grpo_cli.runs.metrics import append_record
from grpo_cli.training.session import Session, Stopped
from grpo_cli.training.vllm_client import ADAPTER, RunClient, VLLMLink
from grpo_cli.training.vllm_weights import (
    SyncWatch,
    Weights,
    base_kept,
    merge_weights,
    read_adapter,
    write_adapter,
)
from grpo_cli.upstream import replaced
from grpo_cli.upstream.vllm import RELOAD_WEIGHTS

T = TypeVar("T")


@contextmanager
def linked_vllm(session: Session) -> Iterator[None]:
    """Make TRL use a `RunGeneration` and a `RunClient` inside."""
    folder = session.folder.sent_weights
    # An attempt that was killed may have left an adapter.
    shutil.rmtree(folder, ignore_errors=True)
    link = VLLMLink(
        folder,
        SyncWatch(session.end_hung),
        while_waiting=partial(_wait_for_server, session),
        on_return=partial(_record_return, session),
        lora_rank=adapter_rank(session.recipe, "cpu" if session.cpu else "cuda"),
        is_managed=session.recipe.generation.has_managed_server,
    )
    changes: dict[str, Any] = {"VLLMClient": partial(RunClient, link=link)}
    if hasattr(vllm_generation, "LLM"):
        options = _engine_options(session.recipe, link.lora_rank)
        changes["LLM"] = partial(_build_engine, vllm_generation.LLM, options, session.recipe.seed)
    with (
        replaced(grpo_trainer, VLLMGeneration=partial(RunGeneration, link=link)),
        replaced(vllm_generation, **changes),
    ):
        yield


def _wait_for_server(session: Session) -> None:
    """Report the wait; nothing else obeys a request to stop meanwhile."""
    if session.stop.seen_here():
        raise Stopped("stopped while waiting for vLLM; steps since the last checkpoint are lost")
    session.report("waiting for vLLM")


def _record_return(session: Session) -> None:
    """Record in which step a vLLM server came back."""
    session.report("training")
    step = StatusFile(session.folder.status).read().step
    append_record(session.folder.metrics, {"event": "server", "step": step})


def _engine_options(recipe: Recipe, rank: int | None) -> dict[str, Any]:
    """Return what TRL does not tell an engine: the revision, that it takes one adapter, how images are read."""
    processor = processor_settings(recipe.model, has_images=recipe.has_images)
    lora = {} if rank is None else {"enable_lora": True, "max_lora_rank": rank}
    # With an adapter, the base that the engine loads stays as it is.
    return {"revision": recipe.model.revision, "mm_processor_kwargs": processor, **lora}


def _build_engine(
    engine: Any, more: dict[str, Any], base_seed: int, *, seed: int, **options: Any
) -> Any:
    """Return an engine in this process; TRL's seed is the same in every run: the number of the process."""
    with _explained_refusal():
        return engine(**options, **more, seed=(base_seed + seed) % 2**32)


@contextmanager
def _explained_refusal() -> Iterator[None]:
    """Report what to do if vLLM takes no adapters for the model, or none for these modules."""
    try:
        yield
    except ValueError as error:
        if "LoRA" not in str(error):
            raise
        raise SetupError(
            f"vLLM cannot sample with this adapter: {str(error).rstrip('.')}",
            "set `generation.vllm.enable_lora: false`, which sends merged weights",
        ) from error


class RunGeneration(VLLMGeneration):
    """Sampling that survives a restart of the server, with adapters, and with engines on a CPU."""

    synced_s = 0.0
    """Seconds spent on sending weights since the start."""
    _adapter: Any = None
    """The request for the adapter that an engine in this process has."""
    _num_adapters = 0
    _read_ids: Sequence[list[int]] = ()
    """The prompts that were last sampled from, as vLLM reads them."""
    _without_adapter = False

    def __init__(self, *args: Any, link: VLLMLink, **options: Any) -> None:
        """Prepare vLLM; `args` and `options` are TRL's."""
        self.link = link
        super().__init__(*args, **options)

    @property
    def _reads_images(self) -> bool:
        return isinstance(self.processing_class, ProcessorMixin)

    def _iter_named_params(self) -> Weights:
        with base_kept(self.model):
            weights = super()._iter_named_params()
            if not self._without_adapter:
                weights = merge_weights(self.model, weights)
            yield from self.link.watch.count(weights)

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
        with self.link.watch.active(*self._describe_target()) if is_main else nullcontext():
            if not (self._prepare_for_adapter() and self._send_adapter()):
                self._send_whole()
            if self._reads_images and self.mode == "colocate":
                self.llm.llm_engine.reset_encoder_cache()
            elif self._reads_images and is_main:
                self.vllm_client.reset_encoder_cache()

    def _describe_target(self) -> tuple[str, str]:
        """Return who gets the weights, and what to do if that hangs."""
        if self.mode == "colocate":
            return "vLLM in this process", "see the stacks at the end of this process's log"
        address = self.vllm_client.base_url
        fix = "see the server's log, restart it, and resume the run with --resume"
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
        if self.link.lora_rank is None or self.mode == "colocate":
            return self.link.lora_rank is not None
        takes_adapter, lacks_base = self._ask_main(lambda it: (it.takes_adapter, it.lacks_base))
        if takes_adapter and lacks_base:
            with replaced(self, _without_adapter=True):
                self._send_whole()
            if self.accelerator.is_main_process:
                self.vllm_client.lacks_base = self.vllm_client.lost
        return bool(takes_adapter)

    def _send_adapter(self) -> bool:
        """Load the adapter into vLLM; return whether it takes adapters."""
        self.link.watch.note("nothing: the adapter is gathered")
        tensors = read_adapter(self.model, self._dist.gather_params)
        self._num_adapters += 1
        # A new path each time: vLLM caches prompts by an adapter's name and path.
        path = self.link.folder / f"adapter_{self._num_adapters}"
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
        for each in self.link.folder.glob("adapter_*"):
            if each != path:
                shutil.rmtree(each, ignore_errors=True)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> Any:
        """Sample with the last weights; repeat if the server was lost meanwhile.

        In prompts with images, each image is one placeholder.
        """
        # TRL takes an empty list for an image.
        images = [each or None for each in images] if images else None
        asked = prompts, images, num_generations, profiler
        with self._asking_for_adapter(), self._without_image_tokens():
            sampled = super().generate(*asked)
            while self._reconnected():
                self.sync_weights()
                sampled = super().generate(*asked)
        self._read_ids = sampled[0]
        return sampled

    @property
    def _stop_params(self) -> dict[str, Any]:
        """vLLM's parameters for the recipe's stop strings, which end a completion wherever it is sampled."""
        return stop_params(self.generation_kwargs.get("stop", ()))

    def check_read(self, prompt_ids: list[list[int]]) -> None:
        """Check that vLLM has last sampled from these tokens, images included.

        Raises:
            RunError: It makes other tokens of an image than the model's processor.
        """
        for own, expected in zip(self._read_ids, prompt_ids, strict=True):
            if list(own) != list(expected):
                raise RunError(
                    f"vLLM reads a prompt with images as {len(own)} tokens, and the model's processor makes "
                    f"{len(expected)} others of it, so that samples would not be of the trained model",
                    "set `generation.backend: transformers`, or install the newest vLLM",
                )

    def _place_features(self, features: Any, prompt_ids: list[int]) -> Any:
        """Leave images to the server, which finds their places."""
        return features

    @contextmanager
    def _without_image_tokens(self) -> Iterator[None]:
        """Forbid sampling of image placeholder tokens, if prompts may hold images."""
        if not self._reads_images:
            yield
            return
        bias = self.generation_kwargs.get("logit_bias") or {}
        settings = {"logit_bias": {**bias, **ban_image_token(self.processing_class)}}
        with replaced(self, generation_kwargs={**self.generation_kwargs, **settings}):
            yield

    @contextmanager
    def _asking_for_adapter(self) -> Iterator[None]:
        """Make an engine in this process sample with its adapter; a server is asked for it by its name."""
        if self._adapter is None:
            yield
            return
        with replaced(self.llm, generate=partial(self.llm.generate, lora_request=self._adapter)):
            yield

    def sample_apart(
        self,
        prompts: list[list[int]],
        images: list[Any] | None = None,
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
            "generation_kwargs": self._stop_params,
            "max_completion_length": max_tokens or self.max_completion_length,
        }
        with replaced(self, **settings):
            _, completions, *_ = self.generate(prompts, images, count)
        return list(completions)

    def _reconnected(self) -> bool:
        """Return whether the server was lost and came back without the weights; process 0 tells the others."""
        if self.mode != "server":
            return False
        lost = self._ask_main(lambda client: client.lost)
        if lost and self.accelerator.is_main_process:
            self.vllm_client.reconnect(self.server_timeout, self.accelerator.device)
            self.link.on_return()
        return lost

    def _ask_main(self, ask: Callable[[RunClient], T]) -> T:
        """Return, on every process, what the main process answers; only that one has a client."""
        answers = [ask(self.vllm_client) if self.accelerator.is_main_process else None]
        broadcast_object_list(answers, from_process=0)
        return answers[0]  # type: ignore[return-value]
