"""What only sampling with vLLM can have wrong: `generation.vllm` against the rest of the recipe and the devices.

Does not talk to a server: `servers/examination.py` does, before a launch.
"""

from collections.abc import Iterator

from grpo_cli.errors import Problem
from grpo_cli.machine import Hardware, is_on_cpu, resolve_num_processes
from grpo_cli.recipe.recipe import Recipe

_RANGES = {
    "gpu_memory_utilization": (0.01, 1, "a share of the memory, such as 0.3"),
    "tensor_parallel_size": (1, 4096, "how many GPUs share the model"),
    "max_model_length": (1, 2**31, "tokens of prompt and completion"),
    "server_port": (1, 65535, "a port"),
    "group_port": (1, 65535, "a port"),
    "server_timeout": (0, 2**31, "seconds"),
}


def check_vllm(recipe: Recipe, hardware: Hardware) -> Iterator[Problem]:
    """Values out of range, settings that nothing reads, and servers without devices."""
    for name, (least, most, meaning) in _RANGES.items():
        value = recipe.generation.vllm.extras.get(name)
        if value is not None and not least <= value <= most:
            yield Problem(
                f"{value} is not between {least} and {most}",
                f"write {meaning}",
                f"generation.vllm.{name}",
            )
    vllm = recipe.generation.vllm
    if recipe.generation.backend == "vllm" and vllm.mode == "server":
        yield from _check_server(recipe, hardware)
    elif vllm.base_url is not None or vllm.managed is not None or vllm.mode == "server":
        yield Problem(
            "names a vLLM server, and nothing samples from one",
            "set `generation.backend: vllm` and `generation.vllm.mode: server`, or remove it",
            "generation.vllm",
        )
    elif recipe.generation.backend == "vllm":
        yield from _check_sharing(recipe, hardware)


def _check_sharing(recipe: Recipe, hardware: Hardware) -> Iterator[Problem]:
    """Whether the training processes split evenly into those that share vLLM's model.

    Source: trl 1.16, `VLLMGeneration._init_vllm`, which says so once the model is loaded.
    """
    launch = recipe.launch
    if launch.num_processes == "auto" and launch.slurm is not None:
        return  # the nodes are not this machine
    shared = int(recipe.generation.vllm.extras.get("tensor_parallel_size", 1))
    processes = resolve_num_processes(recipe, hardware)
    if shared > 0 and processes % shared:
        yield Problem(
            f"{processes} training processes do not split into groups of {shared} that share vLLM's model",
            f"write a divisor of {processes}, or set `launch.num_processes` to a multiple of {shared}",
            "generation.vllm.tensor_parallel_size",
        )


def _check_server(recipe: Recipe, hardware: Hardware) -> Iterator[Problem]:
    """Whose the server is, and whether there are devices for it and for training."""
    generation, launch = recipe.generation, recipe.launch
    vllm = generation.vllm
    has_node = launch.slurm is not None and launch.slurm.server_nodes > 0
    if vllm.managed and vllm.address is not None:
        yield Problem(
            f"a managed server is started by `grpo train`, and {vllm.address} runs already",
            "remove `managed`, or the address",
            "generation.vllm.managed",
        )
    elif vllm.base_url is not None and {"server_host", "server_port"} & vllm.extras.keys():
        yield Problem(
            "and `server_host` or `server_port` both say where the server is",
            "keep one of them",
            "generation.vllm.base_url",
        )
    elif not vllm.is_managed or has_node:
        return
    elif launch.num_machines > 1:
        yield Problem(
            "a managed server and the training share one machine, and this recipe has "
            f"{launch.num_machines}",
            "give it a node of a job with `launch.slurm.server_nodes: 1`, or start it with `grpo serve "
            "RECIPE --host 0.0.0.0` and name it with `generation.vllm.base_url`",
            "launch.num_machines",
        )
    elif not is_on_cpu(launch, hardware) and hardware.gpus <= generation.managed_gpus:
        yield Problem(
            f"a managed server takes {generation.managed_gpus} of the {hardware.gpus} visible GPUs, which "
            "leaves none to train on",
            "set `mode: colocate`, a smaller `tensor_parallel_size`, or name a server elsewhere with "
            "`base_url`",
            "generation.vllm.mode",
        )
