"""A server of vLLM's, ready to be started: argv, environment, address. Pure; starts nothing.

Source: vLLM 0.31, `vllm serve` and its flags; trl 1.16, "vLLM integration" (what a trainer needs of it).
"""

import json
import shlex
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_cli.models.vllm_engine import AUTOMATIC, CPU_MEMORY, model_length, pick_dtype
from grpo_cli.recipe.recipe import Recipe

GROUP_PORT = 51216
"""Where TRL's trainer and server meet to hand over weights, unless told otherwise (`vllm_group_port`)."""
VLLM_SERVE = ("vllm", "serve")
"""What starts a server, up to its model, where nobody looked what does so here."""
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""On a CPU training and sampling take turns, and each may use every core while it has the turn; vLLM would
bind the process, and the training in it, to some: a step of SmolLM2-135M on 2 cores took two to three times
as long."""


@dataclass(frozen=True)
class ServerPlan:
    """A server, ready to be started."""

    argv: tuple[str, ...]
    host: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the current ones."""

    @property
    def root(self) -> str:
        """Its address, without a path."""
        # What listens everywhere is asked on this machine.
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"

    @property
    def health(self) -> str:
        """What answers when the model is loaded."""
        return f"{self.root}/health"

    def command_line(self) -> str:
        """The command as one would type it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def plan_training_server(
    recipe: Recipe,
    command: tuple[str, ...],
    model: str,
    *,
    host: str,
    port: int,
    device: Literal["cpu", "cuda"],
    visible_devices: str | None = None,
) -> ServerPlan:
    """The server that a training samples from: it takes weights, and tells true log-probabilities.

    Args:
        recipe: Of the training.
        command: What starts a server of vLLM's, up to its model.
        model: A folder or hub id, which the first weights are read from.
        host: Where it listens.
        port: On which port.
        device: Where it computes. On a CPU weights come in a folder, otherwise by NCCL.
        visible_devices: For `CUDA_VISIBLE_DEVICES`; None leaves it as it is.
    """
    vllm, length = recipe.generation.vllm.extras, model_length(recipe)
    flags: dict[str, Any] = {
        "--host": host,
        "--port": port,
        "--dtype": pick_dtype(recipe, device),
        "--revision": recipe.model.revision,
        "--max-model-len": "auto" if length == AUTOMATIC else length,
        "--gpu-memory-utilization": vllm.get(
            "gpu_memory_utilization", CPU_MEMORY if device == "cpu" else None
        ),
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": -1,
        "--seed": recipe.seed,
    }
    if device == "cuda":
        flags["--tensor-parallel-size"] = vllm.get("tensor_parallel_size")
        flags["--weight-transfer-config"] = json.dumps({"backend": "nccl"})
    if vllm.get("model_impl"):
        flags["--model-impl"] = vllm["model_impl"]
    switches = ["--trust-remote-code"] if recipe.model.trust_remote_code else []
    for name, value in recipe.generation.vllm.server_args.items():
        flag = f"--{name}"
        if isinstance(value, bool):
            switches.append(flag if value else f"--no-{name}")
        else:
            flags[flag] = value
    named = [str(part) for each in flags.items() if each[1] is not None for part in each]
    environment = {**_ENVIRONMENT, **(UNBOUND if device == "cpu" else {})}
    if visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices
    return ServerPlan((*command, model, *named, *switches), host, port, environment)
