"""The life of a vLLM server: started, waited for, watched beside a training, ended cleanly; or checked from afar.

Source: vLLM 0.31, `/health`, `/v1/models`, `/server_info`; trl 1.16, `VLLMClient` (what it asks for).
"""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlparse

from grpo_cli.errors import RunError, SetupError
from grpo_cli.launch.server_plan import ManagedServer, ServerPlan
from grpo_cli.machine import check_port
from grpo_cli.processes import reaped
from grpo_cli.units import format_duration
from grpo_cli.upstream.vllm import SERVER_INFO

HERE = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
"""Names of this machine for itself."""
_POLL_S = 0.5
_READ_TIMEOUT_S = 10.0
_LAST_LINES, _LAST_BYTES, _LINE_LENGTH = 8, 2**16, 500
_NO_LORA = "does not support LoRA"
"""In the error of vLLM (0.31) for an architecture without adapters; its server's last lines do not tell."""
_HEALTH_INTERVAL_S = 5.0
_UNHEALTHY_S = {"gone": 30.0, "silent": 300.0}
"""Seconds without a good answer after which a server counts as dead. One whose engine died refuses connections
and may keep those that it has for ever; one that reads long prompts or new weights may be silent for a while."""


def ask(url: str) -> Literal["well", "silent", "gone"]:
    """Return the health of a server: silent if it takes long to answer, gone if it refuses to."""
    try:
        with _open(url, timeout_s=2) as answer:
            return "well" if answer.status == 200 else "gone"
    except urllib.error.URLError as error:
        return "silent" if isinstance(error.reason, TimeoutError) else "gone"
    except TimeoutError:
        return "silent"
    except (OSError, HTTPException):
        return "gone"


def answers(url: str) -> bool:
    """Return whether a server says that it is healthy."""
    return ask(url) == "well"


def _open(url: str, timeout_s: float) -> Any:
    # A proxy would not find addresses of this machine.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout_s)


def read_end(log: Path, lines: int = _LAST_LINES) -> str:
    """Return the last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - _LAST_BYTES, 0))
        text = file.read().decode("utf-8", "replace").strip()
    return "\n".join(line[:_LINE_LENGTH] for line in text.splitlines()[-lines:])


def _start(plan: ServerPlan, out: IO[bytes]) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    environment = {**os.environ, **plan.environment}
    return reaped(plan.argv, stdout=out, stderr=subprocess.STDOUT, env=environment)


@contextmanager
def running(
    plan: ServerPlan, log: Path, timeout_s: float, tell: Callable[[str], None]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server that answers, and end it on the way out.

    Args:
        tell: Called with its newest line while it starts.

    Raises:
        RunError: It ended, or did not answer in time; the text holds its last lines.
    """
    check_port(plan.host, plan.port)
    with log.open("wb") as out, _start(plan, out) as process:
        deadline = time.monotonic() + timeout_s
        while not answers(plan.health):
            last_lines = "Its last lines:", read_end(log)
            if process.poll() is not None:
                seen = f"the server ended with {process.returncode}"
                raise RunError(seen, f"see {log}", details=last_lines)
            if time.monotonic() > deadline:
                seen = f"the server did not answer within {timeout_s:.0f} s"
                fix = f"a longer --timeout, or see the log: {log}"
                raise RunError(seen, fix, details=last_lines)
            tell((read_end(log, 1) or "starting").strip()[:100])
            time.sleep(_POLL_S)
        yield process


class ServerWatch:
    """A server beside a training: started again if it dies. The workers give it the weights again."""

    def __init__(self, plan: ManagedServer, log: Path, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._log = log
        self._tell = tell
        self._running = ExitStack()
        self._has_answered = False
        self._restarts = 0
        self._asked = self._well = time.monotonic()
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._running.close()
        self._answers = False
        output = self._running.enter_context(self._log.open("ab"))
        return self._running.enter_context(_start(self._plan, output))

    def look(self) -> RunError | None:
        """Start the server again if it died; return why the training has to end, if it has to."""
        code = self._process.poll()
        if code is None and not self._is_unhealthy():
            return None
        if code is None:
            self._kill()
            code = self._process.wait()
        if not self._has_answered:
            return self._explain(f"ended with {code} before it answered")
        if self._restarts >= self._plan.max_restarts:
            again = f", after it had been started again {self._restarts} times (`generation.vllm.max_restarts`)"
            return self._explain(f"ended with {code}{again if self._restarts else ''}")
        self._restarts += 1
        self._tell(
            f"the vLLM server ended with {code}; starting it again "
            f"({self._restarts} of {self._plan.max_restarts} times), log {self._log}"
        )
        self._process = self._start()
        return None

    def _is_unhealthy(self) -> bool:
        """Return whether a server that has answered has not done so for too long."""
        now = time.monotonic()
        if self._answers and now - self._asked < _HEALTH_INTERVAL_S:
            return False
        self._asked = now
        health = ask(self._plan.health)
        if health == "well":
            self._answers = self._has_answered = True
            self._well = now
            return False
        return self._answers and now - self._well > _UNHEALTHY_S[health]

    def _kill(self) -> None:
        # The second signal has its reaper kill the whole family.
        self._process.terminate()
        time.sleep(_POLL_S)
        self._process.send_signal(signal.SIGINT)

    def end(self, force: Callable[[], bool]) -> None:
        """End the server and all its descendants, and wait for that."""
        self._process.terminate()
        while self._process.poll() is None:
            if force():
                self._process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        self._running.close()

    def _explain(self, what: str) -> RunError:
        fix = f"see {self._log}; what it was started with is in launch/plan.json"
        if _NO_LORA in read_end(self._log, _LAST_BYTES):
            fix = "set `generation.vllm.enable_lora: false`: vLLM takes no adapters for this model"
        last_lines = "Its last lines:", read_end(self._log)
        return RunError(f"the vLLM server {what}", fix, details=last_lines)


@contextmanager
def watched(
    plan: ManagedServer,
    log: Path,
    tell: Callable[[str], None],
    force: Callable[[], bool],
) -> Iterator[ServerWatch]:
    """Run a server for as long as the training runs."""
    watch = ServerWatch(plan, log, tell)
    try:
        yield watch
    finally:
        watch.end(force)


def check_server(
    address: str,
    command: str,
    *,
    model: str,
    by_nccl: bool,
    lora_rank: int | None = None,
    wait_s: float,
    tell: Callable[[str], None],
) -> list[str]:
    """Wait until a server that somebody else runs answers, and check how it was started.

    Args:
        command: Starts a suitable one, for the message.
        by_nccl: Whether weights are sent by NCCL; otherwise in a folder.
        lora_rank: Of the adapter that it should take as it is; None if it gets merged weights.

    Returns:
        What is doubtful about it, a sentence each.

    Raises:
        SetupError: It does not answer, or cannot be used; with the command that fixes it.
    """
    if not by_nccl and urlparse(address).hostname not in HERE:
        raise SetupError(
            f"on a CPU the server reads weights from a folder, which {address} does not see",
            "run the server on this machine",
        )
    _wait(address, command, wait_s, tell)
    fix = f"start it as\n  {command}"
    config = _read(f"{address}{SERVER_INFO}?config_format=json").get("vllm_config")
    models = _read(f"{address}/v1/models").get("data")
    if not models:
        raise SetupError(
            f"{address} does not answer as vLLM's server does", f"start one with\n  {command}"
        )
    if not config:
        raise SetupError(
            f"the server at {address} has no development endpoints, which training sends weights to",
            fix,
        )
    if by_nccl and config.get("weight_transfer_config") is None:
        raise SetupError(f"the server at {address} has no weight-transfer engine", fix)
    return list(_find_doubts(address, config, model, lora_rank, fix))


def _find_doubts(
    address: str, config: dict[str, Any], model: str, lora_rank: int | None, fix: str
) -> Iterator[str]:
    settings = config.get("model_config") or {}
    mode, served = settings.get("logprobs_mode"), settings.get("model")
    lora = config.get("lora_config") or {}
    if lora_rank and lora.get("max_lora_rank", 0) < lora_rank:
        yield (
            f"the server at {address} takes no adapters of rank {lora_rank}: after each step it gets all weights, "
            f"with the adapter merged. Fix: {fix}"
        )
    if mode not in (None, "processed_logprobs"):
        yield (
            f"the server at {address} returns {mode}, which bias the correction for sampling with vLLM. Fix: {fix}"
        )
    if served not in (None, model):
        yield (
            f"the server at {address} began with {served}, and training begins with {model}: the shapes "
            f"have to be the same. Fix: {fix}"
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
                f"no vLLM server answers at {address} (waited {wait_s:.0f} s)",
                f"start one with\n  {command}\nor leave `base_url` out, and `grpo train` runs one itself",
            )
        time.sleep(min(2 * _POLL_S, left))


def _read(url: str) -> dict[str, Any]:
    try:
        with _open(url, _READ_TIMEOUT_S) as answer:
            return dict(json.load(answer))
    except (OSError, HTTPException, ValueError, TypeError):
        return {}
