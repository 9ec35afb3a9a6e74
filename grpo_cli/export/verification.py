"""Whether an exported folder is the model that was trained: loaded again, and compared.

Runs as a process of its own (`python -m grpo_cli.export.verification FOLDER`, the request as JSON on
stdin, the result as JSON on stdout), so that nothing of the writing process can help it. The trained
model, the base and the export are loaded one after the other, in float32: what differs then are the
weights alone. Owns what counts as the same.
"""

import gc
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoTokenizer

from grpo_cli.data.build import build_datasets
from grpo_cli.data.sources import has_eval
from grpo_cli.export.request import ExportRequest
from grpo_cli.export.weights import load_base, load_exact, load_trained
from grpo_cli.fast.completions import all_eos_token_ids, encode_prompt, sample_completions
from grpo_cli.issues import Finding, FindingLevel
from grpo_cli.machine import pick_device
from grpo_cli.models.adapters import load_adapter
from grpo_cli.models.loading import load_generation_config, load_tokenizer
from grpo_cli.recipe.model import ModelConfig

PROMPTS = 4
ANSWER_TOKENS = 32
LEAST_KEPT, WELL_KEPT = 0.25, 0.9
"""Share of what training changed in the logits: below the one an export is the base model rather than the
trained one, below the other much is lost to rounding."""
_ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8, "q8_0": 5e-3}
"""By how much a weight is off at most, in parts of itself; for q8_0, 8 bits for the largest of 32 weights, in
standard deviations of the weights (root mean square)."""
TOLERANCES = {name: max(32 * rounding, 1e-4) for name, rounding in _ROUNDING.items()}
"""Largest root mean square of the difference in logits, in standard deviations of the logits. Each layer adds what
rounding its own weights makes; measured with the 30 layers of SmolLM2-135M: 2 to 12 times the rounding."""
_FINER = {
    "q8_0": "export with --gguf-type f16",
    "bf16": "export with --gguf-type f16, which is as small",
    "f16": "export with --gguf-type f32",
    "bfloat16": "export with --dtype float16, which is as small, or --dtype float32",
    "float16": "export with --dtype float32",
}
_GGUF_PRECISION = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "q8_0"}


@dataclass(frozen=True)
class Look:
    """What one model makes of the recipe's prompts."""

    logits: torch.Tensor
    """[positions, vocabulary] float32: before each token of the trained model's answers."""
    answers: list[tuple[int, ...]]
    """Greedy completions, as tokens; none where they were not asked for."""
    hashes: dict[str, str]
    """Of each tensor at the export's precision; empty where they are not compared."""


@dataclass(frozen=True)
class Difference:
    """How far the logits of two models are apart."""

    largest: float
    mean: float
    relative: float
    """Root mean square, in standard deviations of the first model's logits."""

    @classmethod
    def between(cls, first: torch.Tensor, second: torch.Tensor) -> "Difference":
        """Compares two looks at the same positions."""
        apart = second - first
        spread = float(first.std()) or 1.0
        return cls(
            float(apart.abs().max()),
            float(apart.abs().mean()),
            float(apart.square().mean().sqrt()) / spread,
        )

    def as_json(self) -> dict[str, float]:
        """The difference as plain values."""
        return {"largest": self.largest, "mean": self.mean, "relative": self.relative}


def verify(request: ExportRequest, folder: Path) -> dict[str, Any]:
    """Compares an exported folder with the trained model and with the base.

    Args:
        request: What was exported.
        folder: What came of it.

    Returns:
        The differences, what became of greedy texts, and findings; `ok` is whether none is an error.
        Only these two where the export cannot be compared at all.

    Raises:
        GrpoError: A model cannot be loaded.
    """
    tokenizer = load_tokenizer(request.tokenizer)
    prompts = _read_prompts(request, tokenizer)
    trained = _look(request, load_trained(request), tokenizer, prompts, None)
    base = _look(request, load_base(request), tokenizer, prompts, trained.answers, greedy=False)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".loaded-") as scratch:
        plain = _plain_folder(request, folder, Path(scratch))
        adapter = request.format == "adapter"
        own = AutoTokenizer.from_pretrained(folder) if adapter else load_tokenizer(plain)
        loaded = _load_export(request, folder, plain)
        if unlike := _judge_vocabulary(trained, loaded):
            return {"ok": False, "findings": [unlike.as_json()]}
        export = _look(request, loaded, own, prompts, trained.answers)
        settings = _compare_settings(request, plain, tokenizer, own, prompts)
    moved = Difference.between(base.logits, trained.logits)
    apart = Difference.between(trained.logits, export.logits)
    kept = _kept(base.logits, trained.logits, export.logits)
    changed, expected = _count_changed(base, export), _count_changed(base, trained)
    findings = [
        *settings,
        *_judge_weights(request, moved, changed),
        *(_judge_logits(request, apart, kept) if math.isfinite(moved.largest) else []),
    ]
    same = sum(a == b for a, b in zip(trained.answers, export.answers, strict=True))
    decode = tokenizer.decode
    return {
        "ok": not any(finding.level == "error" for finding in findings),
        "prompts": len(prompts),
        "positions": len(trained.logits),
        "difference": apart.as_json(),
        "moved": moved.as_json(),
        "kept": kept,
        "tolerance": TOLERANCES[_precision(request)],
        "tensors": {
            "all": len(export.hashes),
            "changed": changed,
            "expected": None if request.is_adapter else expected,
        },
        "greedy_same": same,
        "texts": [
            {"trained": decode(a), "exported": decode(b)}
            for a, b in zip(trained.answers, export.answers, strict=True)
        ],
        "findings": [finding.as_json() for finding in findings],
    }


def _read_prompts(request: ExportRequest, tokenizer: Any) -> list[Any]:
    chat = bool(tokenizer.chat_template)
    dataset = request.recipe.dataset
    few = {"eval_limit": PROMPTS} if has_eval(dataset) else {}
    if request.recipe.is_sampled:
        # The first rows of scored data may be those of one prompt, or of prompts with a single response.
        few["limit"] = PROMPTS
    recipe = request.recipe.model_copy(update={"dataset": dataset.model_copy(update=few)})
    data = build_datasets(recipe, has_chat_template=chat, count_tokens=None)
    rows = data.train if data.eval is None or not len(data.eval) else data.eval
    return list(rows.select(range(min(PROMPTS, len(rows))))["prompt"])


def _look(
    request: ExportRequest,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    answers: list[tuple[int, ...]] | None,
    *,
    greedy: bool = True,
) -> Look:
    """Logits before each token of `answers`, or of the model's own greedy ones; lets go of the model."""
    model = model.to(pick_device(request.recipe.launch)).eval()
    kwargs = request.recipe.generation.extras.get("chat_template_kwargs")
    own: list[tuple[int, ...]] = []
    if greedy:
        sampled = sample_completions(
            model,
            tokenizer,
            prompts,
            max_new_tokens=ANSWER_TOKENS,
            temperature=0.0,
            chat_template_kwargs=kwargs,
        )
        own = [group[0].token_ids for group in sampled]
    rows = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers or own, strict=True):
            read = encode_prompt(tokenizer, prompt, kwargs)
            ids = torch.tensor([[*read, *answer]], device=model.device)
            rows.append(model(input_ids=ids).logits[0, len(read) - 1 : -1].float().cpu())
    hashes = {}
    if request.format == "safetensors" and not isinstance(model, peft.PeftModel):
        hashes = _hash_tensors(model, getattr(torch, request.dtype))
    gc.collect()
    return Look(torch.cat(rows), own, hashes)


def _hash_tensors(model: Any, dtype: torch.dtype) -> dict[str, str]:
    found = {}
    for name, tensor in model.state_dict().items():
        plain = tensor.to(dtype).cpu().contiguous().flatten().view(torch.uint8)
        found[name] = hashlib.blake2b(plain.numpy().data, digest_size=16).hexdigest()
    return found


def _precision(request: ExportRequest) -> str:
    if request.gguf_type is not None:
        return _GGUF_PRECISION[request.gguf_type]
    return "float32" if request.format == "adapter" else request.dtype


def _plain_folder(request: ExportRequest, folder: Path, scratch: Path) -> ModelConfig:
    """The export as something that loads: itself, or a GGUF file as transformers reads it."""
    if request.format == "adapter":
        return request.base
    own = {"revision": None, "chat_template": None, "dtype": "auto"}
    if request.format == "safetensors":
        return request.base.model_copy(update={**own, "path": str(folder)})
    from grpo_cli.models.gguf import materialize_gguf

    (file,) = folder.glob("*.gguf")
    return request.base.model_copy(update={**own, "path": str(materialize_gguf(file, scratch))})


def _load_export(request: ExportRequest, folder: Path, plain: ModelConfig) -> Any:
    model = load_exact(plain)
    return load_adapter(model, folder, plain.path) if request.format == "adapter" else model


def _compare_settings(
    request: ExportRequest, plain: ModelConfig, tokenizer: Any, own: Any, prompts: Sequence[Any]
) -> list[Finding]:
    """What surrounds the weights: vocabulary, stop tokens, template."""
    found = []
    if len(own) != len(tokenizer):
        seen = f"the export's tokenizer knows {len(own)} tokens, the trained one {len(tokenizer)}"
        found.append(Finding("tokenizer", "error", seen, "export anew"))
    stops = [
        set(all_eos_token_ids(load_generation_config(config), each))
        for config, each in ((request.recipe.model, tokenizer), (plain, own))
    ]
    if stops[0] != stops[1]:
        seen = f"the export stops at tokens {sorted(stops[1])}, training did at {sorted(stops[0])}"
        found.append(Finding("stop tokens", "error", seen, "export anew"))
    kwargs = request.recipe.generation.extras.get("chat_template_kwargs")
    for prompt in prompts:
        if encode_prompt(own, prompt, kwargs) != encode_prompt(tokenizer, prompt, kwargs):
            seen = "a prompt of the recipe has other tokens in the export"
            why = "a model answers badly to a template it was not trained with"
            found.append(Finding("chat template", "error", seen, "export anew", why))
            break
    return found


def _judge_vocabulary(trained: Look, export: Any) -> Finding | None:
    known, had = export.get_output_embeddings().weight.shape[0], trained.logits.shape[1]
    if known == had:
        return None
    seen = f"the export knows {known} tokens, the trained model {had}"
    return Finding("vocabulary", "error", seen, "export anew with the tokenizer of the run")


def _judge_weights(request: ExportRequest, moved: Difference, changed: int) -> list[Finding]:
    if not math.isfinite(moved.largest):
        seen = f"{request.trained} computes values that are not finite"
        fix = "export an earlier checkpoint with --checkpoint N"
        return [Finding("training", "error", seen, fix, "the training went astray")]
    if moved.largest == 0:
        seen = f"{request.trained} computes exactly what the base model does"
        why = "there is nothing to ship"
        fix = "look at the run's learning rate and its metrics; --no-verify exports it all the same"
        return [Finding("training", "error", seen, fix, why)]
    if request.format == "safetensors" and not changed:
        seen = f"every tensor is the base model's at {request.dtype}"
        why = "what training changed is smaller than that precision can hold"
        return [Finding("weights", "error", seen, "export with --dtype float32", why)]
    return []


def _judge_logits(request: ExportRequest, apart: Difference, kept: float) -> list[Finding]:
    precision = _precision(request)
    written = request.gguf_type or precision
    finer = _FINER.get(written, "export with --format adapter, which changes no weight")
    found = []
    if not apart.relative <= TOLERANCES[precision]:
        seen = (
            f"the export's logits are {apart.relative:.2g} standard deviations off the trained model's "
            f"(root mean square; {TOLERANCES[precision]:g} is allowed at {precision})"
        )
        why = "other tools would run another model than the one you trained"
        found.append(Finding("logits", "error", seen, finer, why))
    if not kept >= WELL_KEPT:
        seen = f"the export keeps {kept:.0%} of what training changed in the logits"
        why = f"{precision} rounds the rest away"
        level: FindingLevel = "warning" if kept >= LEAST_KEPT else "error"
        found.append(Finding("training kept", level, seen, finer, why))
    return found


def _kept(base: torch.Tensor, trained: torch.Tensor, export: torch.Tensor) -> float:
    """How much of the way from base to trained the export went: 0 at the base, 1 at the trained model."""
    way = (trained - base).flatten().double()
    length = float(way @ way)
    return float((export - base).flatten().double() @ way) / length if length else 1.0


def _count_changed(first: Look, second: Look) -> int:
    return sum(first.hashes.get(name) != value for name, value in second.hashes.items())


def main(argv: Sequence[str]) -> int:
    """Verifies the export in the folder `argv[0]`."""
    request = ExportRequest.model_validate(json.loads(sys.stdin.read()))
    result = verify(request, Path(argv[0]))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
