"""The ports of vLLM's server mode, and the hub.

Whether two processes of this machine can talk is tried in `rendezvous.py`.
"""

import http.client
import os
from collections.abc import Iterator
from typing import Any

from grpo_cli.doctor.environment import hide_login
from grpo_cli.issues import Finding
from grpo_cli.launch.server_plan import GROUP_PORT
from grpo_cli.machine import is_free

SERVER_PORT = 8000
"""Where TRL looks for a vLLM server (`vllm_server_port`)."""
_TIMEOUT_S = 2.0


def check_ports(server: int = SERVER_PORT, group: int = GROUP_PORT) -> Iterator[Finding]:
    """The two ports that `generation.vllm.mode: server` uses by default."""
    if is_free(server):
        yield Finding("port vLLM server", "ok", f"{server} is free")
    else:
        yield _explain_server(server)
    if is_free(group):
        yield Finding("port weight transfer", "ok", f"{group} is free")
    else:
        yield Finding(
            "port weight transfer",
            "warning",
            f"{group} is taken: handing weights to a vLLM server would hang"
            " (a training in server mode that is running holds it too)",
            f"see who has it with `ss -ltnp sport = :{group}`, or set `generation.vllm.group_port`",
        )


def _explain_server(port: int) -> Finding:
    subject = "port vLLM server"
    if _get(port, "/health") != 200:
        return Finding(
            subject,
            "warning",
            f"{port} is taken by something that is no vLLM server: `vllm.mode: server` cannot use it",
            f"see who has it with `ss -ltnp sport = :{port}`, or set `generation.vllm.server_port`",
        )
    if _get(port, "/server_info?config_format=json") == 200:
        return Finding(subject, "ok", f"a vLLM server with development endpoints answers on {port}")
    return Finding(
        subject,
        "warning",
        f"a server answers on {port}, without the development endpoints that TRL hands weights over by",
        "start it with `grpo serve RECIPE`, which gives it the flags that training needs",
    )


def _get(port: int, path: str) -> int | None:
    # Not urllib: a proxy of the environment has no part in this.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def explain_hub(value: dict[str, Any] | None, error: str | None) -> Iterator[Finding]:
    """What the trial `hub` found; being offline is a choice, or a fact, and no fault.

    Args:
        value: What the trial returned; None where it failed.
        error: Why it failed.
    """
    local = "export HF_HUB_OFFLINE=1 so that nothing waits for it, and use local models and data"
    if value is None:
        seen = f"could not be tried: {error}"
        yield Finding("hub", "warning", seen, "pip install --upgrade huggingface_hub")
        return
    endpoint = hide_login(value["endpoint"])
    if value["offline"]:
        names = [n for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(n)]
        seen = f"offline, by {' and '.join(names)}: only what is in the cache can be loaded"
        yield Finding("hub", "note", seen, f"unset {' '.join(names)} to download")
    elif value["failure"]:
        seen = f"{endpoint} cannot be reached ({value['failure']}): only cached or local files load"
        yield Finding("hub", "note", seen, local)
    elif value["status"] >= 400:
        seen = f"{endpoint} answers with status {value['status']}"
        yield Finding("hub", "note", seen, f"check HF_ENDPOINT and the proxy; else {local}")
    else:
        yield Finding("hub", "ok", f"{endpoint} answers")
    if value["token"]:
        yield Finding("hub token", "ok", "present (not shown, not sent)")
    else:
        yield Finding(
            "hub token",
            "note",
            "none: gated models and private data are out of reach",
            "hf auth login, or export HF_TOKEN",
        )
