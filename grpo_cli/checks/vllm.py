"""Checks of `generation.vllm`."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from grpo_cli.checks.context import CheckContext
from grpo_cli.issues import Issue
from grpo_cli.machine import Hardware, is_on_cpu, resolve_num_processes
from grpo_cli.models.source import read_config
from grpo_cli.recipe.recipe import Recipe

_COLOCATED_SHARE = 0.5

_HEADS = "num_attention_heads"

_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")

_RANGES = {
    "gpu_memory_utilization": (0.01, 1, "a share of the memory, such as 0.3"),
    "tensor_parallel_size": (1, 4096, "how many GPUs share the model"),
    "max_model_length": (1, 2**31, "tokens of prompt and completion"),
    "server_port": (1, 65535, "a port"),
    "group_port": (1, 65535, "a port"),
    "server_timeout": (0, 2**31, "seconds"),
}


def check_vllm(context: CheckContext) -> Iterator[Issue]:
    """Find values out of range, settings that nothing reads, and servers without devices."""
    recipe, hardware = context.recipe, context.hardware
    vllm = recipe.generation.vllm
    for name, (least, most, meaning) in _RANGES.items():
        value = vllm.extras.get(name)
        if value is not None and not least <= value <= most:
            seen = f"{value} is not between {least} and {most}"
            yield Issue(seen, f"write {meaning}", f"generation.vllm.{name}")
    size = recipe.setting("vllm_tensor_parallel_size") if recipe.generation.backend == "vllm" else 1
    heads = read_config(recipe.model).get(_HEADS) if size > 1 else None
    if isinstance(heads, int) and heads % size:
        seen = f"the model's {heads} attention heads cannot be divided among {size} GPUs"
        fix = f"write a divisor of {heads}"
        yield Issue(seen, fix, "generation.vllm.tensor_parallel_size")
    length, completion = (
        recipe.setting("vllm_max_model_length"),
        recipe.generation.max_completion_length,
    )
    if length is not None and 1 <= length <= completion:
        seen = (
            f"{length} tokens leave no room for a prompt: completions alone have up to {completion}"
        )
        fix = f"set it to {completion} and the tokens of the longest prompt, or remove it"
        yield Issue(seen, fix, "generation.vllm.max_model_length")
    if recipe.has_episodes and length is not None and completion < length:
        yield from _check_episode_length(recipe, length)
    prompt = recipe.dataset.longest_prompt
    if length is not None and prompt is not None and completion < length < prompt + completion:
        seen = (
            f"{length} tokens are fewer than `dataset.max_prompt_length` ({prompt}) and "
            f"`generation.max_completion_length` ({completion}): vLLM refuses longer prompts"
        )
        fix = f"set it to {prompt + completion}, or `max_prompt_length: {length - completion}`"
        yield Issue(seen, fix, "generation.vllm.max_model_length", level="warning")
    if recipe.generation.backend == "vllm" and vllm.mode == "server":
        yield from _check_server(recipe, hardware)
    elif vllm.base_url is not None or vllm.managed is not None or vllm.mode == "server":
        seen = "names a vLLM server, and nothing samples from one"
        fix = "set `generation.backend: vllm` and `generation.vllm.mode: server`, or remove it"
        path = "generation.vllm"
        if recipe.generation.backend == "vllm":
            path += ".managed" if vllm.base_url is None else ".base_url"
            fix = "set `generation.vllm.mode: server`, or remove this key"
        yield Issue(seen, fix, path)
    elif recipe.generation.backend == "vllm":
        yield from _check_sharing(recipe, hardware)
    elif recipe.is_sampled:
        seen = f"has no effect: completions are sampled by {recipe.generation.backend}"
        fix = "set `generation.backend: vllm`, or remove it"
        yield Issue(seen, fix, "generation.vllm", level="warning")


def _check_episode_length(recipe: Recipe, length: int) -> Iterator[Issue]:
    """Check for a server, which refuses requests that might become too long, that there is room for another turn.

    Source: vLLM 0.31, `/v1/completions`. The turns of many episodes are sampled at once, each for as many tokens
    as the shortest of them has left.
    """
    completion, turn = recipe.generation.max_completion_length, recipe.episode.max_turn_tokens
    needed = completion + (turn or completion)
    if recipe.generation.vllm.mode == "server" and length <= needed:
        seen = (
            f"a server that holds {length} tokens refuses turns near the end of an episode of {completion}: with "
            f"the longest answer they may come to {needed}, and there is the prompt"
        )
        fix = f"set it to {needed} and the tokens of the longest prompt, or remove it"
        yield Issue(seen, fix, "generation.vllm.max_model_length", level="warning")


def _check_sharing(recipe: Recipe, hardware: Hardware) -> Iterator[Issue]:
    """Check that the training processes split evenly into those that share vLLM's model.

    Source: trl 1.16, `VLLMGeneration._init_vllm`, which says so once the model is loaded.
    """
    launch = recipe.launch
    if launch.num_processes == "auto" and launch.slurm is not None:
        return  # the nodes are not this machine
    size = int(recipe.setting("vllm_tensor_parallel_size"))
    processes = resolve_num_processes(recipe, hardware)
    if size > 0 and processes % size:
        seen = f"groups of {size} training processes share vLLM's model; {processes} is not a multiple of {size}"
        fix = (
            f"write a divisor of {processes}, or set `launch.num_processes` to a multiple of {size}; "
            "the size must divide the model's attention heads too"
        )
        yield Issue(seen, fix, "generation.vllm.tensor_parallel_size")


def _check_server(recipe: Recipe, hardware: Hardware) -> Iterator[Issue]:
    """Check whose the server is, and whether there are devices for it and for training."""
    generation, launch, vllm = recipe.generation, recipe.launch, recipe.generation.vllm
    has_node = launch.slurm is not None and launch.slurm.server_nodes > 0
    share = float(vllm.extras.get("gpu_memory_utilization", 1))
    if vllm.is_managed and not is_on_cpu(launch, hardware) and 0 < share <= _COLOCATED_SHARE:
        seen = f"{share:g} is a share for `colocate`: a server has its GPUs to itself"
        fix = "set it to 0.9, or remove it"
        yield Issue(seen, fix, "generation.vllm.gpu_memory_utilization", level="note")
    if vllm.managed and vllm.address is not None:
        seen = f"a managed server is started by `grpo train`, and {vllm.address} runs already"
        yield Issue(seen, "remove `managed`, or the address", "generation.vllm.managed")
    elif vllm.base_url is not None and {"server_host", "server_port"} & vllm.extras.keys():
        seen = "and `server_host` or `server_port` both say where the server is"
        yield Issue(seen, "keep one of them", "generation.vllm.base_url")
    elif not vllm.is_managed or has_node:
        address = "" if has_node else vllm.base_url or ""
        if address and urlsplit(address).hostname not in _THIS_MACHINE:
            seen = "the server must listen on this address; by default it listens on 127.0.0.1"
            fix = "start it with `grpo serve RECIPE --host 0.0.0.0`, if you have not"
            yield Issue(seen, fix, "generation.vllm.base_url", level="note")
    elif launch.num_machines > 1:
        seen = f"a managed server and the training share one machine, and this recipe has {launch.num_machines}"
        fix = (
            "give it a node of a job with `launch.slurm.server_nodes: 1`, or start it with `grpo serve RECIPE "
            "--host 0.0.0.0` and name it with `generation.vllm.base_url`"
        )
        yield Issue(seen, fix, "launch.num_machines")
    elif not is_on_cpu(launch, hardware) and hardware.gpus <= generation.managed_gpus:
        seen = f"a managed server takes {generation.managed_gpus} of the {hardware.gpus} visible GPUs, which "
        smaller = "a smaller `tensor_parallel_size`, " if generation.managed_gpus > 1 else ""
        fix = f"set `mode: colocate`, {smaller}or name a server elsewhere with `base_url`"
        yield Issue(f"{seen}leaves none to train on", fix, "generation.vllm.mode")
