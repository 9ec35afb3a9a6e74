"""The model card: what the model is, what it gained, how it was trained, and what was checked."""

import json
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined

from grpo_cli.analysis.diagnosis.diagnosis import examine
from grpo_cli.analysis.diagnosis.history import read_history
from grpo_cli.analysis.held_out import read_held_out
from grpo_cli.analysis.metrics import say_failures, say_metric
from grpo_cli.exporting.request import TEMPLATE, ExportRequest
from grpo_cli.models.source import find_folder, read_gguf_text, resolve_source
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import write_yaml
from grpo_cli.rewards.building import name_rewards
from grpo_cli.runs.files import read_object, write_text
from grpo_cli.runs.metrics import STAGES
from grpo_cli.runs.run import Run

_LIBRARIES = {"safetensors": "transformers", "adapter": "peft", "gguf": "gguf"}
_RELATIONS = {"safetensors": "finetune", "adapter": "adapter", "gguf": "quantized"}
_TAGS = ("grpo", "trl", "reinforcement-learning")
_ALWAYS_SHOWN = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "learning_rate",
)


def write_card(request: ExportRequest, folder: Path, result: Mapping[str, Any]) -> None:
    """Write `README.md` into an exported folder; `result` is what `export` returns."""
    recipe = request.recipe
    head, recipe_text = _read_head(request), write_yaml(recipe).strip()
    template_kwargs = recipe.setting("chat_template_kwargs")
    source = resources.files("grpo_cli.exporting").joinpath("card.md.jinja").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["shell"] = shlex.quote
    config = read_object(folder / "tokenizer_config.json")
    is_chat = bool(config.get("chat_template")) or (folder / TEMPLATE).is_file()
    base = resolve_source(recipe.model)
    hub_link = f"[{base.location}](https://huggingface.co/{base.location})"
    text = environment.from_string(source).render(
        title=recipe.name,
        base=hub_link if base.kind == "hub" else f"`{Path(base.location).name}`",
        format=request.format,
        recipe=recipe,
        messages=_example(recipe) if is_chat and not request.is_text else None,
        template_kwargs=None if request.is_text else template_kwargs,
        gguf_file=next((file.name for file in folder.glob("*.gguf")), None),
        evaluation=_read_evaluation(request),
        rewards=list(zip(name_rewards(recipe.rewards), recipe.rewards, strict=True)),
        settings=_list_settings(request),
        fence="`" * (1 + max(map(len, re.findall("`+", recipe_text)), default=2)),
        precision=result["precision"],
        system=recipe.dataset.fixed_system,
        checks=_list_checks(result),
        recipe_text=recipe_text,
        licensed=head.license is not None,
    )
    write_text(folder / "README.md", f"---\n{head.to_yaml()}\n---\n\n{text}")


def _read_head(request: ExportRequest) -> ModelCardData:
    """Return the metadata that the hub reads."""
    recipe, source = request.recipe, resolve_source(request.recipe.model)
    is_hub = source.kind == "hub"
    datasets = [path for each in recipe.dataset.parts if (path := getattr(each, "path", None))]
    return ModelCardData(
        model_name=recipe.name,
        base_model=source.location if is_hub else None,
        base_model_relation=_RELATIONS[request.format] if is_hub else None,
        datasets=datasets or None,
        library_name=_LIBRARIES[request.format],
        license=read_licence(recipe.model),
        pipeline_tag="image-text-to-text" if recipe.has_images else "text-generation",
        tags=[*_TAGS, *(["lora"] if recipe.model.lora else [])],
    )


def _example(recipe: Recipe) -> list[str]:
    """Return messages as the model was trained on them, as JSON."""
    system = recipe.dataset.parts[0].prompt.system
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": "…"})
    if recipe.has_images:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
        messages[-1]["content"].insert(0, {"type": "image", "path": "picture.png"})
    return [json.dumps(message, ensure_ascii=False) for message in messages]


def _list_settings(request: ExportRequest) -> list[tuple[str, Any]]:
    recipe, run = request.recipe, Run(request.run)
    generation, lora, start = recipe.generation, recipe.model.lora, recipe.model.adapter
    warmup, versions = recipe.warmup, run.manifest["versions"]
    source = "written answers"
    if warmup and warmup.best_of:
        source = f"the best of {warmup.best_of} completions of its own"
    step: Any = request.name.rpartition("-")[2]
    if request.name == "final":
        best = run.best_checkpoint if recipe.loads_best else None
        step = best or read_object(run.folder.status).get("step")
    training = recipe.training
    changed = training.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    plain = {name: value for name, value in changed.items() if not isinstance(value, dict)}
    always = {name: getattr(training, name) for name in _ALWAYS_SHOWN}
    epochs = {} if training.max_steps > 0 else {"num_train_epochs": training.num_train_epochs}
    rows = [
        ("model exported", request.name),
        ("optimizer steps", step),
        ("data", "; ".join(map(_name_dataset, recipe.dataset.parts))),
        ("completions of each prompt", generation.num_generations),
        ("max_completion_length", generation.max_completion_length),
        ("sampling temperature", generation.temperature),
        ("LoRA", lora and f"r {lora.r}, alpha {lora.lora_alpha:g}"),
        # The end of its path: the rest is about this machine.
        ("began from the adapter", start and "/".join(Path(start.path).parts[-3:])),
        ("supervised warm-up", warmup and f"on {source}"),
        ("seed", recipe.seed),
        *{**always, **epochs, **plain}.items(),
        ("trained in", run.manifest.get("dtype") or recipe.model.dtype),
        (
            "versions",
            ", ".join(f"{name} {each}" for name, each in versions.items() if each) or None,
        ),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _name_dataset(dataset: Any) -> str:
    name = getattr(dataset, "path", None) or getattr(dataset, "task", None)
    if files := getattr(dataset, "train", None):
        name = ", ".join(Path(file).name for file in files)
    return f"{dataset.kind}: {name}" if name else dataset.kind


def _list_checks(result: Mapping[str, Any]) -> list[str]:
    verification = result["verification"]
    if verification is None:
        return []
    difference, moved = verification["difference"], verification["moved"]
    tensors, prompts = verification["tensors"], verification["prompts"]
    lines = [
        f"loaded in a fresh process, and compared with the trained model on {prompts} prompts in "
        f"float32: max logit error {difference['largest']:.2g}, mean {difference['mean']:.2g} "
        f"(training changed logits by up to {moved['largest']:.2g}, by {moved['mean']:.2g} on average)",
        f"{verification['kept']:.1%} of what training changed in the logits is kept",
        f"greedy answers are the same for {verification['greedy_same']} of {prompts} prompts",
        "tokens of the prompts, vocabulary and stop tokens are those of training",
    ]
    if tensors["all"]:
        changed = f"{tensors['changed']} of {tensors['all']}"
        lines.append(f"{changed} tensors differ from the base model's")
    return lines


def _read_evaluation(request: ExportRequest) -> dict[str, Any] | None:
    """Return what the run measured before and after training; None of a checkpoint, or if it did not."""
    run = Run(request.run)
    held_out, evaluation = read_held_out(run), run.recipe.evaluation
    if request.name != "final" or not held_out.change:
        return None
    warmed = [held_out.warmup] if held_out.warmup else []
    rows = [
        {
            "name": name,
            "stages": [
                say_metric(each.get(name)) for each in (held_out.before, *warmed, held_out.after)
            ],
            "gains": [say_metric(each, "+") for each in (gain, *since)],
        }
        for name, gain in held_out.change.items()
        for since in [[held_out.since_warmup.get(name)] if warmed else []]
    ]
    collapse = examine(read_history(run)).collapse
    failures = {stage: say_failures(run.measured(stage)) for stage in STAGES}
    return {
        "rows": rows,
        "columns": ["before", *(["after the warm-up"] if warmed else []), "after", "difference"]
        + (["difference since the warm-up"] if warmed else []),
        "warnings": [
            *([collapse.seen] if collapse else []),
            *(f"{STAGES[stage]}, {said}" for stage, said in failures.items() if said),
        ],
        "prompts": held_out.before["completion_length"].prompts,
        "samples": evaluation.samples_per_prompt,
        "temperature": evaluation.temperature,
    }


def read_licence(model: ModelConfig) -> str | None:
    """Return the licence that a model's card, or its GGUF file, names; None if none does on this machine."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    source = resolve_source(model)
    if source.kind == "gguf":
        return read_gguf_text(Path(source.location), "general.license")
    folder = find_folder(source, "README.md")
    if folder is None or not (folder / "README.md").is_file():
        return None
    try:
        licence = ModelCard.load(folder / "README.md").data.license
    except (ValueError, YAMLError):
        return None
    return licence if isinstance(licence, str) else None
