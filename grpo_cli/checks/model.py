"""Checks of the `model` section that need neither torch nor the network."""

import re
from collections.abc import Iterator
from pathlib import Path

from grpo_cli.checks.context import CheckContext, collect
from grpo_cli.checks.launch import has_module
from grpo_cli.data.prompts import resolve_style
from grpo_cli.data.rows import place_issues, suggest
from grpo_cli.errors import install_extra
from grpo_cli.issues import Issue
from grpo_cli.models.source import (
    check_folder,
    read_chat_template,
    read_source_template,
    resolve_source,
)
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe

_INIT_KWARGS_HOMES = {
    "attn_implementation": "model.attn_implementation",
    "dtype": "model.dtype",
    "gguf_file": "model.path",
    "load_in_4bit": "`model.quantization: 4bit`",
    "load_in_8bit": "`model.quantization: 8bit`",
    "quantization_config": "model.quantization",
    "revision": "model.revision",
    "torch_dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
}

_NO_VARIABLES = frozenset({"add_generation_prompt", "chat_template", "continue_final_message"})
"""What `apply_chat_template` reads itself."""


def check_model(context: CheckContext) -> Iterator[Issue]:
    """Find what is wrong with the model's settings and files, as far as it shows without torch and the network."""
    recipe, model = context.recipe, context.recipe.model
    issues = [*_check_quantization(model), *_check_init_kwargs(model), *_check_source(model)]
    yield from issues
    if model.processor and not recipe.has_images:
        seen = "has no effect: the recipe has no images"
        fix = "name their columns in `dataset.prompt.images`, or remove it"
        yield Issue(seen, fix, "model.processor", level="warning")
    if not any(issue.level == "error" for issue in issues):
        yield from _check_template(recipe)


def _check_source(model: ModelConfig) -> Iterator[Issue]:
    issues: list[Issue] = []
    source = None
    with collect(issues):
        read_chat_template(model)
    with collect(issues):
        source = resolve_source(model)
    yield from issues
    is_gguf = source.kind == "gguf" if source else model.path.endswith(".gguf")
    if is_gguf and not has_module("gguf"):
        seen = "reading a GGUF file needs the package gguf, which is not installed"
        yield Issue(seen, install_extra("gguf"), "model.path", package="gguf")
    if source is not None and source.kind != "hub" and model.revision is not None:
        seen = f"revision {model.revision} is ignored: {model.path} is on this machine"
        fix = "remove `revision`, or name the folder of that revision in `path`"
        yield Issue(seen, fix, "model.revision", level="warning")
    if source is not None and source.kind == "folder":
        yield from check_folder(Path(source.location), model)


def _check_quantization(model: ModelConfig) -> Iterator[Issue]:
    if model.quantization is None:
        return
    path = "model.quantization"
    if model.lora is None:
        fix = "add `lora: {r: 16}` to `model`, or remove `quantization`"
        yield Issue("quantized weights cannot be trained without `lora`", fix, path)
    if not has_module("bitsandbytes"):
        seen = f"{model.quantization} needs bitsandbytes, which is not installed"
        fix = f"{install_extra('quantization')}, or remove `quantization`"
        yield Issue(seen, fix, path, package="bitsandbytes")


def _check_init_kwargs(model: ModelConfig) -> Iterator[Issue]:
    for key, home in _INIT_KWARGS_HOMES.items():
        if key in model.init_kwargs:
            path = f"model.init_kwargs.{key}"
            yield Issue(f"`{key}` has a key of its own", f"write it as {home}", path)


def _check_template(recipe: Recipe) -> Iterator[Issue]:
    """Find prompts that need a chat template, and variables that it does not read."""
    template = read_source_template(recipe.model)
    if template is not None:
        for place, part in enumerate(recipe.dataset.parts):
            found: list[Issue] = []
            with collect(found):
                resolve_style(part.prompt, bool(template))
            yield from place_issues(found, place, part.source_name)
    words = _NO_VARIABLES.union(re.findall(r"\w+", template or ""))
    for name in recipe.setting("chat_template_kwargs") or {}:
        if template and name not in words:
            seen = "has no effect: the model's chat template does not read it"
            path = f"generation.chat_template_kwargs.{name}"
            read = words.intersection((name.removeprefix("enable_"), f"enable_{name}"))
            fix = f"write `{min(read)}`" if read else suggest(name, words, "remove it")
            yield Issue(seen, fix, path, level="warning")
