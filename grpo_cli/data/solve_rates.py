"""How often prompts were solved before: from samples that `grpo eval` or `grpo probe --json` wrote."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_cli.data.rows import canonical_json, show_names
from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue
from grpo_cli.runs.files import parse_json

_PATH = "dataset.difficulty.samples"
_FIX = "name the folder of `grpo eval RECIPE --split train`, or the output of `grpo probe RECIPE --json`"


def read_solve_rates(path: str, right: Mapping[str, float]) -> dict[str, float]:
    """Return the share of right answers of each prompt, by its canonical JSON.

    Args:
        path: The folder of an evaluation, or a file of samples.
        right: Rewards that say whether an answer is right, each with its score of a right one.

    Raises:
        RecipeError: There is no such file, or it has no samples with these rewards.
    """
    shares: dict[str, list[float]] = {}
    for sample in _read_samples(Path(path)):
        scores = sample["rewards"]
        if missing := right.keys() - scores.keys():
            seen = f"its samples have no reward `{min(missing)}`; they have {show_names(sorted(scores))}"
            raise RecipeError([Issue(seen, "measure again with the rewards of this recipe", _PATH)])
        known = [scores[name] / best for name, best in right.items() if scores[name] is not None]
        if known:
            share = fmean(min(max(each, 0.0), 1.0) for each in known)
            shares.setdefault(canonical_json(sample["prompt"]), []).append(share)
    return {prompt: fmean(each) for prompt, each in shares.items()}


def find_matches(
    rates: Mapping[str, float], prompts: Sequence[Any], path: str
) -> list[float | None]:
    """Return the rate of each prompt; None where there is none.

    Raises:
        RecipeError: No prompt has one.
    """
    found = [rates.get(canonical_json(prompt)) for prompt in prompts]
    if all(rate is None for rate in found):
        seen = f"none of the {len(rates)} prompts of {path} is a training prompt, word for word"
        fix = (
            "measure the training rows with this recipe's prompt: `grpo eval RECIPE --split train`"
        )
        raise RecipeError([Issue(seen, fix, _PATH)])
    return found


def _read_samples(path: Path) -> list[dict[str, Any]]:
    """Return all samples of an evaluation or a probe."""
    if not path.exists():
        raise RecipeError([Issue(f"there is no file or folder {path}", _FIX, _PATH)])
    files = sorted((path / "samples").glob("*.jsonl")) if path.is_dir() else [path]
    # `MODEL.PROCESS.jsonl`
    models = {file.name.rsplit(".", 2)[0] for file in files}
    if path.is_dir() and len(models) > 1:
        seen = f"{path} has samples of several models: {show_names(sorted(models))}"
        fix = f"name one of its files, such as {files[0]}"
        raise RecipeError([Issue(seen, fix, _PATH)])
    samples = [sample for file in files for sample in _read_file(file)]
    if not samples:
        raise RecipeError([Issue(f"{path} has no samples", _FIX, _PATH)])
    return samples


def _read_file(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a file with one a line, or of what a probe printed."""
    text = file.read_bytes()
    try:
        if file.suffix == ".jsonl":
            read = [parse_json(line) for line in text.split(b"\n") if line.strip()]
        else:
            read = parse_json(text)["samples"]
    except (ValueError, KeyError, TypeError):
        return
    for each in read:
        if isinstance(each, dict) and each.keys() >= {"prompt", "rewards"}:
            yield each
