"""The model card: what the model is, what it gained, how it was trained, and what was checked.

Owns what the card says; its form is `card.md.jinja`'s and, for the head, huggingface_hub's.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined

from grpo_cli.analysis.metrics import PerPrompt, compare, per_prompt, summarize
from grpo_cli.analysis.ranking import GAP, RANKING, rank_by_prompt, read_ranked
from grpo_cli.analysis.samples import ScoredCompletion, as_scored, group_by_row
from grpo_cli.export.request import ExportRequest
from grpo_cli.models.licence import read_licence
from grpo_cli.models.source import resolve_source
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import TrainingConfig
from grpo_cli.recipe.writing import write_yaml
from grpo_cli.rewards.building import name_rewards, right_scores
from grpo_cli.runs.files import write_text
from grpo_cli.runs.folder import RunFolder


def write_card(
    request: ExportRequest, folder: Path, result: Mapping[str, Any], *, has_curve: bool
) -> None:
    """Writes `README.md`.

    Args:
        request: What was exported.
        folder: Where it is.
        result: What `export` tells of it.
        has_curve: Whether there is a `reward_curve.png`.
    """
    recipe, run = request.recipe, RunFolder(request.run)
    head, recipe_text = _read_head(request), write_yaml(recipe).strip()
    text = _template().render(
        title=recipe.name,
        base=_say_base(request),
        format=request.format,
        recipe=recipe,
        messages=_example(recipe) if _has_chat_template(folder) else None,
        gguf_file=next((file.name for file in folder.glob("*.gguf")), None),
        evaluation=_read_if_whole(lambda: _read_evaluation(request, run)),
        has_curve=has_curve,
        rewards=list(zip(name_rewards(recipe.rewards), recipe.rewards, strict=True)),
        settings=_list_settings(request, run),
        fence="`" * (1 + max(map(len, re.findall("`+", recipe_text)), default=2)),
        precision=result["precision"],
        system=recipe.dataset.prompt.fixed_system,
        checks=_say_checks(result),
        recipe_text=recipe_text,
        licensed=head.license is not None,
    )
    write_text(folder / "README.md", f"---\n{head.to_yaml()}\n---\n\n{text}")


def _read_if_whole(read: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """What is in a file beside the run; a damaged one is left out of the card, not the card out of the export."""
    try:
        return read()
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _template() -> Any:
    source = resources.files("grpo_cli.export").joinpath("card.md.jinja").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["shell"] = shlex.quote
    return environment.from_string(source)


def _read_head(request: ExportRequest) -> ModelCardData:
    """The metadata the hub reads."""
    recipe, source = request.recipe, resolve_source(request.recipe.model)
    hub = source.kind == "hub"
    dataset = getattr(recipe.dataset, "path", None)
    library = {"safetensors": "transformers", "adapter": "peft", "gguf": "gguf"}
    return ModelCardData(
        model_name=recipe.name,
        base_model=source.location if hub else None,
        base_model_relation=_RELATIONS[request.format] if hub else None,
        datasets=[dataset] if dataset else None,
        library_name=library[request.format],
        license=read_licence(recipe.model),
        pipeline_tag="text-generation",
        tags=["grpo", "trl", "reinforcement-learning", *(["lora"] if recipe.model.lora else [])],
    )


_ALWAYS_TOLD = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "learning_rate",
)
_RELATIONS = {"safetensors": "finetune", "adapter": "adapter", "gguf": "quantized"}


def _say_base(request: ExportRequest) -> str:
    source = resolve_source(request.recipe.model)
    if source.kind == "hub":
        return f"[{source.location}](https://huggingface.co/{source.location})"
    return f"`{Path(source.location).name}`"


def _has_chat_template(folder: Path) -> bool:
    """Whether what was exported can be asked with messages."""
    config = _read_json(folder / "tokenizer_config.json")
    return bool(config.get("chat_template")) or (folder / "chat_template.jinja").is_file()


def _example(recipe: Recipe) -> list[str]:
    """Messages as the model was trained on them, as JSON."""
    system = recipe.dataset.prompt.system
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "…"})
    return [json.dumps(message, ensure_ascii=False) for message in messages]


def _list_settings(request: ExportRequest, run: RunFolder) -> list[tuple[str, Any]]:
    recipe = request.recipe
    generation = recipe.generation
    status, manifest = _read_json(run.status), run.read_manifest()
    rows = [
        ("model exported", request.name),
        ("optimizer steps", _steps(request, status)),
        ("data", _say_data(recipe)),
        ("completions of each prompt", generation.num_generations),
        ("max_completion_length", generation.max_completion_length),
        ("sampling temperature", generation.temperature),
        (
            "LoRA",
            recipe.model.lora
            and f"r {recipe.model.lora.r}, alpha {recipe.model.lora.lora_alpha:g}",
        ),
        ("seed", recipe.seed),
        *_list_training(recipe.training).items(),
        ("trained in", recipe.model.dtype),
        ("versions", _say_versions(manifest.get("versions"))),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _list_training(training: TrainingConfig) -> dict[str, Any]:
    """What every reader looks for, and whatever else is not the default."""
    told = training.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    asked = {name: getattr(training, name) for name in _ALWAYS_TOLD}
    span = {} if training.max_steps > 0 else {"num_train_epochs": training.num_train_epochs}
    plain = {name: value for name, value in told.items() if not isinstance(value, dict)}
    return {**asked, **span, **plain}


def _say_versions(found: Any) -> str | None:
    if not isinstance(found, dict):
        return None
    return ", ".join(f"{name} {version}" for name, version in found.items() if version) or None


def _steps(request: ExportRequest, status: Mapping[str, Any]) -> Any:
    return status.get("step") if request.name == "final" else request.name.rpartition("-")[2]


def _say_data(recipe: Recipe) -> str:
    dataset = recipe.dataset
    named = getattr(dataset, "path", None) or getattr(dataset, "task", None)
    files = getattr(dataset, "train", None)
    if files:
        named = ", ".join(Path(file).name for file in files)
    return f"{dataset.kind}: {named}" if named else dataset.kind


def _say_checks(result: Mapping[str, Any]) -> list[str]:
    found = result["verification"]
    if found is None:
        return []
    difference, moved = found["difference"], found["moved"]
    lines = [
        f"loaded in a fresh process, and compared with the trained model on {found['prompts']} prompts in "
        f"float32: largest difference in logits {difference['largest']:.2g}, mean {difference['mean']:.2g} "
        f"(training had moved them by {moved['largest']:.2g} at most, {moved['mean']:.2g} in the mean)",
        f"{found['kept']:.1%} of what training changed in the logits is kept",
        f"greedy answers are the same for {found['greedy_same']} of {found['prompts']} prompts",
        "tokens of the prompts, vocabulary and stop tokens are those of training",
    ]
    if found["tensors"]["all"]:
        tensors = found["tensors"]
        lines.append(
            f"{tensors['changed']} of {tensors['all']} tensors differ from the base model's"
        )
    return lines


def _read_evaluation(request: ExportRequest, run: RunFolder) -> dict[str, Any] | None:
    """The newest `grpo eval` of this model against its base, else what the run measured itself."""
    for path in sorted(run.evaluations.glob("*/result.json"), reverse=True):
        result = _read_json(path)
        subjects, differences = result.get("subjects") or {}, result.get("differences") or {}
        if request.name in differences and result.get("baseline") == "base":
            settings = result["settings"]
            return _tabulate(
                subjects["base"]["metrics"],
                subjects[request.name]["metrics"],
                differences[request.name],
                result["verdicts"][request.name],
                (subjects["base"]["prompts"], settings["samples"], settings["temperature"]),
            )
    return _read_own_measurement(request, run) if request.name == "final" else None


def _read_own_measurement(request: ExportRequest, run: RunFolder) -> dict[str, Any] | None:
    recipe = request.recipe
    sides: list[list[list[ScoredCompletion]]] = []
    found: list[dict[str, PerPrompt]] = []
    for when in ("before", "after"):
        lines = _read_text(run.evaluations / f"{when}.jsonl").split("\n")
        try:
            groups = group_by_row([as_scored(json.loads(line)) for line in lines if line])
        except (ValueError, KeyError):
            return None
        if not groups:
            return None
        sides.append(groups)
    # Both decide: one in which an answer is never right shows zeros alone.
    scores = (each.rewards for groups in sides for group in groups for each in group)
    right = right_scores(recipe.rewards, scores)
    for when, groups in zip(("before", "after"), sides, strict=True):
        values = per_prompt(groups, right)
        if not recipe.is_sampled:
            ranked = rank_by_prompt(read_ranked(run.evaluations / f"{when}_ranked.jsonl"))
            values = {f"accuracy/{RANKING}": ranked[RANKING], GAP: ranked[GAP], **values}
            del values["reward"]
        found.append(values)
    size, seed = len(sides[0][0]), recipe.seed
    before, after = (
        {name: each.as_json() for name, each in summarize(values, size, seed).items()}
        for values in found
    )
    gains = {name: each.as_json() for name, each in compare(found[0], found[1], seed).items()}
    counts = (len(sides[0]), size, request.recipe.evaluation.temperature)
    return _tabulate(before, after, gains, "Measured by the run itself.", counts)


def _tabulate(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    gains: Mapping[str, Any],
    sentence: str,
    counts: tuple[int, int, float],
) -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "before": _say_value(before.get(name)),
            "after": _say_value(after.get(name)),
            "gain": _say_value(gain, "+"),
        }
        for name, gain in gains.items()
    ]
    prompts, samples, temperature = counts
    return {
        "sentence": sentence[:1].upper() + sentence[1:].rstrip(".") + ".",
        "rows": rows,
        "prompts": prompts,
        "samples": samples,
        "temperature": temperature,
    }


def _say_value(metric: Mapping[str, Any] | None, sign: str = "") -> str:
    if metric is None or metric["value"] is None:
        return "–"
    text = f"{metric['value']:{sign}.3f}"
    if metric["low"] is None:
        return text
    return f"{text} [{metric['low']:{sign}.3f}, {metric['high']:{sign}.3f}]"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
