"""What is compared of two finished runs besides their times: weights, completions, held-out accuracy."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.training.bench import Bench
from benchmarks.training.cases import Case
from benchmarks.training.rewards import right
from benchmarks.training.runs import Measured

_HELD_OUT = 100
_OTHER_SEED = 4321
WEIGHT_GOAL = 1e-5


def compare(bench: Bench, case: Case, plain: Measured, ours: Measured) -> dict[str, Any]:
    """The comparison a case asks for, as plain values; none where it asks for none."""
    if case.compares == "weights":
        return compare_weights(bench.model_path, plain, ours)
    if case.compares == "accuracy":
        return {
            "held_out": _HELD_OUT,
            "accuracy_trl": measure_accuracy(bench, plain.model),
            "accuracy_grpo": measure_accuracy(bench, ours.model),
        }
    return {}


def compare_weights(start: str, plain: Measured, ours: Measured) -> dict[str, Any]:
    """The largest difference of any weight, and how far the weights moved at most."""
    first, theirs, mine = (read_weights(Path(each)) for each in (start, plain.model, ours.model))
    shared = theirs.keys() & mine.keys()
    moved = [_distance(theirs[name], first[name]) for name in shared & first.keys()]
    return {
        "same_tensors": theirs.keys() == mine.keys(),
        "largest_difference": max(
            (_distance(theirs[n], mine[n]) for n in shared), default=math.nan
        ),
        "moved_by_up_to": max(moved, default=math.nan),
        "same_completions": _share_same(plain.completions, ours.completions),
    }


def read_weights(folder: Path) -> dict[str, Any]:
    """Every tensor of the safetensors in a folder."""
    from safetensors.torch import load_file

    return {
        name: tensor.float()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _distance(one: Any, other: Any) -> float:
    return float((one - other).abs().max())


def _share_same(one: Path, other: Path) -> float:
    """Share of the completions, taken without their order, that both have."""
    first, second = (Counter(each.read_text().splitlines()) for each in (one, other))
    return (first & second).total() / max(first.total(), second.total(), 1)


def measure_accuracy(bench: Bench, adapter: Path) -> float:
    """Share of held-out questions that greedy decoding answers right, the same way for both systems."""
    from peft import PeftModel

    from grpo_cli.fast.completions import sample_completions
    from grpo_cli.models.loading import load_model, load_tokenizer
    from grpo_cli.recipe.model import ModelConfig

    settings = ModelConfig(path=bench.model_path)
    tokenizer = load_tokenizer(settings)
    model = PeftModel.from_pretrained(load_model(settings, tokenizer), str(adapter))
    rows = bench.make_rows(_HELD_OUT, _OTHER_SEED)
    groups = sample_completions(
        model, tokenizer, [row["prompt"] for row in rows], max_new_tokens=12, temperature=0.0
    )
    scores = right([group[0].text for group in groups], [row["answer"] for row in rows])
    return sum(scores) / len(scores)
