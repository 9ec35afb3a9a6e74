"""Whether an exported folder is the model that was trained: loaded again, and compared.

Runs in a process of its own (`python -m grpo_cli.exporting.verification FOLDER`, the request as JSON on
stdin, the result as JSON on stdout), so that it shares no state with the process that wrote the folder.
The trained model, the base and the export are loaded one after the other, in float32: differences are
those of the weights alone.
"""

import gc
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from transformers import AutoProcessor, AutoTokenizer

from grpo_cli.data.build import build_datasets
from grpo_cli.data.images import fill_images
from grpo_cli.data.sources import has_eval
from grpo_cli.data.table import list_rows
from grpo_cli.environments.player import open_player
from grpo_cli.exporting.exporting import PROGRESS
from grpo_cli.exporting.formats import load_exact, load_processing, load_trained
from grpo_cli.exporting.request import ExportRequest
from grpo_cli.fast.completions import Images, sample_completions
from grpo_cli.fast.tokens import all_eos_token_ids, encode_prompt
from grpo_cli.issues import Issue
from grpo_cli.machine import pick_device
from grpo_cli.models.loading import load_adapter, load_generation_config
from grpo_cli.models.processor import load_processing_class, tokenizer_of
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.units import format_duration

PROMPTS = 4
ANSWER_TOKENS = 32
LEAST_KEPT, WELL_KEPT = 0.25, 0.9
"""Share of what training changed in the logits: an error below the first, a warning below the second."""
_ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8, "q8_0": 5e-3}
"""Largest relative error of a weight; for q8_0, 8 bits for the largest of 32 weights, in standard
deviations of the weights (root mean square)."""
TOLERANCES = {name: max(32 * rounding, 1e-4) for name, rounding in _ROUNDING.items()}
"""Largest root mean square of the difference in logits, in standard deviations of the logits. Errors add up
over layers; measured with the 30 layers of SmolLM2-135M: 2 to 12 times the rounding."""
_FINER = {
    "q8_0": "export with --gguf-type f16",
    "bf16": "export with --gguf-type f16, which is as small",
    "f16": "export with --gguf-type f32",
    "bfloat16": "export with --dtype float16, which is as small, or --dtype float32",
    "float16": "export with --dtype float32",
}
_GGUF_PRECISION = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "q8_0"}
_AGAIN = "export again"


class Asked(NamedTuple):
    """What the models are asked."""

    prompts: list[Any]
    images: list[list[Any]] | None


@dataclass(frozen=True)
class Outputs:
    """The outputs of one model for the recipe's prompts."""

    logits: torch.Tensor
    """[positions, vocabulary] float32: before each token of the trained model's answers."""
    answers: list[tuple[int, ...]]
    """Greedy completions, as tokens; empty unless asked for."""
    hashes: dict[str, str]
    """Of each tensor at the export's precision; empty unless they are compared."""

    def count_changed(self, other: "Outputs") -> int:
        """Return how many tensors of another model differ from this one's."""
        return sum(self.hashes.get(name) != value for name, value in other.hashes.items())


def verify(request: ExportRequest, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Compare an exported folder with the trained model and with the base; `tell` hears what is being done.

    Returns the differences, the greedy texts, and `findings`; `ok` is whether none of these is an error. Only
    these two if the export cannot be compared at all.

    Raises `GrpoError` if a model cannot be loaded.
    """
    processing = load_processing(request)
    asked = _read_prompts(request, processing)
    started = time.monotonic()
    tell(f"verifying: the trained model on {len(asked.prompts)} prompts (1 of 3)")
    trained = _run(request, load_trained(request), processing, asked, None)
    # The base is asked less, and the export as much.
    model_s = time.monotonic() - started
    tell(f"verifying: the base model (2 of 3), about {format_duration(2 * model_s)} left")
    base = _run(request, load_exact(request.base), processing, asked, trained.answers, greedy=False)
    tell(f"verifying: the export (3 of 3), about {format_duration(model_s)} left")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".loaded-") as scratch:
        source = _loadable(request, folder, Path(scratch))
        is_adapter, has_images = request.format == "adapter", asked.images is not None
        if is_adapter:
            own = (AutoProcessor if has_images else AutoTokenizer).from_pretrained(folder)
        else:
            own = load_processing_class(source, has_images=has_images)
        model = load_exact(source)
        model = load_adapter(model, folder, source.path) if is_adapter else model
        size, expected = model.get_output_embeddings().weight.shape[0], trained.logits.shape[1]
        if size != expected:
            seen = f"the export knows {size} tokens, the trained model {expected}"
            fix = f"{_AGAIN} with the tokenizer of the run"
            return {"ok": False, "findings": [Issue(seen, fix, subject="vocabulary").as_json()]}
        export = _run(request, model, own, asked, trained.answers)
        issues = _compare_settings(request, source, processing, own, asked)
    return _summarize(request, (base, trained, export), tokenizer_of(processing), issues)


def _summarize(
    request: ExportRequest,
    outputs: tuple[Outputs, Outputs, Outputs],
    tokenizer: Any,
    issues: list[Issue],
) -> dict[str, Any]:
    base, trained, export = outputs
    moved = measure_difference(base.logits, trained.logits)
    difference = measure_difference(trained.logits, export.logits)
    kept = _share_kept(base.logits, trained.logits, export.logits)
    changed, expected = base.count_changed(export), base.count_changed(trained)
    issues += _check_weights(request, moved["largest"], changed)
    if math.isfinite(moved["largest"]):
        issues += _check_logits(request, difference["relative"], kept)
    pairs = list(zip(trained.answers, export.answers, strict=True))
    decode = tokenizer.decode
    return {
        "ok": not any(issue.level == "error" for issue in issues),
        "prompts": len(trained.answers),
        "positions": len(trained.logits),
        "difference": difference,
        "moved": moved,
        "kept": kept,
        "tolerance": TOLERANCES[_precision(request)],
        "tensors": {
            "all": len(export.hashes),
            "changed": changed,
            "expected": None if request.is_adapter else expected,
        },
        "greedy_same": sum(first == second for first, second in pairs),
        "texts": [{"trained": decode(one), "exported": decode(two)} for one, two in pairs],
        "findings": [issue.as_json() for issue in issues],
    }


def read_rows(request: ExportRequest, *, has_chat_template: bool) -> Any:
    """Return the rows whose prompts the models are asked, or raise `GrpoError`."""
    dataset = request.recipe.dataset
    limits = {"eval_limit": PROMPTS} if has_eval(dataset) else {}
    if request.recipe.is_sampled:
        # The first rows of scored data may be those of one prompt, or of prompts with a single response.
        limits["limit"] = PROMPTS
    recipe = request.recipe.model_copy(update={"dataset": dataset.model_copy(update=limits)})
    data = build_datasets(recipe, has_chat_template=has_chat_template, count_tokens=None)
    rows = data.train if data.eval is None or not len(data.eval) else data.eval
    return rows.select(range(min(PROMPTS, len(rows))))


def _read_prompts(request: ExportRequest, processing: Any) -> Asked:
    recipe = request.recipe
    rows = read_rows(request, has_chat_template=bool(processing.chat_template))
    if not recipe.environment:
        images = list(rows[IMAGES]) if IMAGES in rows.column_names else [[] for _ in rows]
        return Asked(list(rows["prompt"]), images if recipe.has_images else None)
    # What an environment says first belongs to the prompt: without it, that may be empty.
    with open_player(recipe, processing) as player:
        episodes = player.begin(list_rows(rows))
        player.close(episodes)
    images = [episode.images for episode in episodes]
    return Asked([episode.prompt for episode in episodes], images if recipe.has_images else None)


def _encode(processing: Any, asked: Asked, place: int, kwargs: dict[str, Any] | None) -> Any:
    """Return what a model reads of the prompt at a place, by name, `[1, …]`."""
    prompt = asked.prompts[place]
    if asked.images is None:
        return {"input_ids": torch.tensor([encode_prompt(processing, prompt, kwargs)])}
    options = {"add_generation_prompt": True, **(kwargs or {})}
    filled = fill_images(prompt, asked.images[place])
    return processing.apply_chat_template(
        [filled], tokenize=True, return_dict=True, return_tensors="pt", **options
    )


def _read_answer(model: Any, fields: Any, answer: Sequence[int]) -> torch.Tensor:
    """Return the logits before each token of an answer, [tokens, vocabulary] float32."""
    length = fields["input_ids"].shape[1]
    more = torch.tensor([answer], dtype=torch.long)
    # The mask and the kinds of tokens are as long as the prompt.
    tails = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    whole = {
        name: torch.cat([value, tails.get(name, torch.zeros_like(more))], dim=1)
        if value.shape == (1, length)
        else value
        for name, value in fields.items()
    }
    logits = model(**{name: value.to(model.device) for name, value in whole.items()}).logits
    return logits[0, length - 1 : -1].float().cpu()


def _run(
    request: ExportRequest,
    model: Any,
    processing: Any,
    asked: Asked,
    answers: list[tuple[int, ...]] | None,
    *,
    greedy: bool = True,
) -> Outputs:
    """Return the logits before each token of `answers`, or of the model's own greedy ones."""
    model = model.to(pick_device(request.recipe.launch)).eval()
    kwargs = request.recipe.setting("chat_template_kwargs")
    own: list[tuple[int, ...]] = []
    if greedy:
        sampled = sample_completions(
            model,
            tokenizer_of(processing),
            asked.prompts,
            max_new_tokens=ANSWER_TOKENS,
            temperature=0.0,
            chat_template_kwargs=kwargs,
            images=Images(processing, asked.images) if asked.images is not None else None,
        )
        own = [group[0].token_ids for group in sampled]
    with torch.no_grad():
        rows = [
            _read_answer(model, _encode(processing, asked, place, kwargs), answer)
            for place, answer in enumerate(answers or own)
        ]
    hashes = {}
    is_compared = request.format == "safetensors" and not isinstance(model, peft.PeftModel)
    for name, tensor in model.state_dict().items() if is_compared else ():
        written = tensor.to(getattr(torch, request.dtype)).cpu().contiguous()
        content = written.flatten().view(torch.uint8).numpy().data
        hashes[name] = hashlib.blake2b(content, digest_size=16).hexdigest()
    gc.collect()
    return Outputs(torch.cat(rows), own, hashes)


def _precision(request: ExportRequest) -> str:
    if request.gguf_type is not None:
        return _GGUF_PRECISION[request.gguf_type]
    return "float32" if request.format == "adapter" else request.dtype


def _loadable(request: ExportRequest, folder: Path, scratch: Path) -> ModelConfig:
    """Return the export as a model that loads: the base of an adapter, the folder, or a converted GGUF."""
    if request.format == "adapter":
        return request.base
    path = folder
    if request.format == "gguf":
        from grpo_cli.models.gguf import materialize_gguf

        (file,) = folder.glob("*.gguf")
        path = materialize_gguf(file, scratch)
    own = {"path": str(path), "revision": None, "chat_template": None, "dtype": "auto"}
    return request.base.model_copy(update=own)


def _compare_settings(
    request: ExportRequest, source: ModelConfig, processing: Any, own: Any, asked: Asked
) -> list[Issue]:
    """Compare what surrounds the weights: vocabulary, stop tokens, template, images."""
    tokenizer, exported = tokenizer_of(processing), tokenizer_of(own)
    issues = []
    if len(exported) != len(tokenizer):
        seen = (
            f"the export's tokenizer knows {len(exported)} tokens, the trained one {len(tokenizer)}"
        )
        issues.append(Issue(seen, _AGAIN, subject="tokenizer"))
    trained = set(all_eos_token_ids(load_generation_config(request.recipe.model), tokenizer))
    stops = set(all_eos_token_ids(load_generation_config(source), exported))
    if trained != stops:
        seen = f"the export stops at tokens {sorted(stops)}, training did at {sorted(trained)}"
        issues.append(Issue(seen, _AGAIN, subject="stop tokens"))
    kwargs = request.recipe.setting("chat_template_kwargs")
    for place in range(len(asked.prompts)):
        # Tokens, and what a processor makes of images.
        first, second = (_encode(each, asked, place, kwargs) for each in (processing, own))
        if first.keys() == second.keys() and all(
            torch.equal(value, second[name]) for name, value in first.items()
        ):
            continue
        seen = "a prompt of the recipe has other tokens in the export"
        why = "a model answers badly to a template it was not trained with"
        issues.append(Issue(seen, _AGAIN, subject="chat template", why=why))
        break
    return issues


def _check_weights(request: ExportRequest, moved: float, changed: int) -> list[Issue]:
    if not math.isfinite(moved):
        seen = f"{request.trained} computes values that are not finite"
        fix, why = "export an earlier checkpoint with --checkpoint N", "the training diverged"
        return [Issue(seen, fix, subject="training", why=why)]
    if moved == 0:
        seen = f"{request.trained} computes exactly what the base model does"
        fix = "look at the run's learning rate and metrics; --no-verify exports it all the same"
        return [Issue(seen, fix, subject="training", why="there is nothing to ship")]
    if request.format == "safetensors" and not changed:
        seen = f"every tensor is the base model's at {request.dtype}"
        why = "what training changed is smaller than that precision can hold"
        return [Issue(seen, _FINER["float16"], subject="weights", why=why)]
    return []


def _check_logits(request: ExportRequest, relative: float, kept: float) -> list[Issue]:
    precision = _precision(request)
    finer = "export with --format adapter, which changes no weight"
    finer = _FINER.get(request.gguf_type or precision, finer)
    issues = []
    if not relative <= TOLERANCES[precision]:
        seen = (
            f"the export's logits are {relative:.2g} standard deviations off the trained model's "
            f"(root mean square; {TOLERANCES[precision]:g} is allowed at {precision})"
        )
        why = "other tools would run another model than the one you trained"
        issues.append(Issue(seen, finer, subject="logits", why=why))
    if not kept >= WELL_KEPT:
        seen = f"the export keeps {kept:.0%} of what training changed in the logits"
        why = f"{precision} rounds the rest away"
        issue = Issue(seen, finer, subject="training kept", why=why)
        issues.append(replace(issue, level="warning") if kept >= LEAST_KEPT else issue)
    return issues


def measure_difference(first: torch.Tensor, second: torch.Tensor) -> dict[str, float]:
    """Return how far the logits of two models at the same positions are apart.

    `relative` is the root mean square, in standard deviations of the first model's logits.
    """
    apart = second - first
    spread = float(first.std()) or 1.0
    return {
        "largest": float(apart.abs().max()),
        "mean": float(apart.abs().mean()),
        "relative": float(apart.square().mean().sqrt()) / spread,
    }


def _share_kept(base: torch.Tensor, trained: torch.Tensor, export: torch.Tensor) -> float:
    """Return the share of what training changed that the export has: 1 at the trained model.

    0 at the base model, and as far beyond the trained model: there rounding outweighs the training.
    """
    way = (trained - base).flatten().double()
    length = float(way @ way)
    if not length:
        return 1.0
    share = float((export - base).flatten().double() @ way) / length
    return max(1.0 - abs(1.0 - share), 0.0)


if __name__ == "__main__":
    sent = ExportRequest.model_validate(json.loads(sys.stdin.read()))
    result = verify(sent, Path(sys.argv[1]), lambda what: print(f"{PROGRESS}{what}", flush=True))
    print(json.dumps(result))
