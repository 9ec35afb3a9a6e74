"""A server that somebody else runs: whether a training can sample from it and give it weights.

Source: vLLM 0.31, `/health`, `/v1/models`, `/server_info`; trl 1.16, `VLLMClient` (what it asks for).
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from typing import Any
from urllib.parse import urlparse

from grpo_cli.errors import SetupError
from grpo_cli.launch.server_process import answers
from grpo_cli.units import format_duration

HERE = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
"""Names of this machine for itself."""
_LOOK_S = 1.0
_TIMEOUT_S = 10.0


def check_server(
    address: str,
    command: str,
    *,
    model: str,
    by_nccl: bool,
    wait_s: float,
    tell: Callable[[str], None],
) -> list[str]:
    """Waits until a server answers, and looks at how it was started.

    Args:
        address: Its root, such as `http://10.0.0.2:8000`.
        command: What starts one that suits, for the message.
        model: What the training begins with.
        by_nccl: Whether weights are handed over by NCCL; otherwise in a folder.
        wait_s: How long it may take to answer.
        tell: Told how long it is waited for.

    Returns:
        What is doubtful about it, a sentence each.

    Raises:
        SetupError: It does not answer, or cannot be used; with the command that mends it.
    """
    if not by_nccl and urlparse(address).hostname not in HERE:
        raise SetupError(
            f"on a CPU weights are handed to the server in a folder, which {address} does not see. "
            "Fix: run the server on this machine"
        )
    _wait(address, command, wait_s, tell)
    config = _read(f"{address}/server_info?config_format=json").get("vllm_config")
    served = _read(f"{address}/v1/models").get("data")
    if not isinstance(served, list) or not served:
        raise SetupError(
            f"{address} does not answer as vLLM's server does. Fix: start one with\n  {command}"
        )
    if not isinstance(config, dict):
        raise SetupError(
            f"the server at {address} has no development endpoints, which weights are handed over by. "
            f"Fix: start it as\n  {command}"
        )
    if by_nccl and config.get("weight_transfer_config") is None:
        raise SetupError(
            f"the server at {address} has no weight-transfer engine. Fix: start it as\n  {command}"
        )
    return list(_find_doubts(address, config, model, command))


def _find_doubts(address: str, config: dict[str, Any], model: str, command: str) -> Iterator[str]:
    told = config.get("model_config")
    settings = told if isinstance(told, dict) else {}
    mode = settings.get("logprobs_mode")
    if mode not in (None, "processed_logprobs"):
        yield (
            f"the server at {address} tells {mode}, which bias the correction for sampling with vLLM. "
            f"Fix: start it as\n  {command}"
        )
    served = settings.get("model")
    if served not in (None, model):
        yield (
            f"the server at {address} began with {served}, and training begins with {model}: the shapes "
            f"have to be the same. Fix: start it as\n  {command}"
        )


def _wait(address: str, command: str, wait_s: float, tell: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait_s
    tell(
        f"waiting for the vLLM server at {address}, for {format_duration(wait_s)} at most "
        "(generation.vllm.server_timeout)"
    )
    while not answers(f"{address}/health"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise SetupError(
                f"no vLLM server answers at {address} (waited {wait_s:.0f} s). Fix: start one with\n"
                f"  {command}\nor leave `base_url` out, and `grpo train` runs one itself"
            )
        time.sleep(min(_LOOK_S, left))


def _read(url: str) -> dict[str, Any]:
    """An answer in JSON; nothing where there is none."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=_TIMEOUT_S) as answer:
            read = json.load(answer)
    except (OSError, HTTPException, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
