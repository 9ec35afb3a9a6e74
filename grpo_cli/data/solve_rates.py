"""How often prompts were solved before: from samples that `grpo eval` or `grpo probe --json` wrote."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_cli.data.rows import canonical_json, show_names
from grpo_cli.errors import recipe_error
from grpo_cli.input_files import read_input
from grpo_cli.runs.files import parse_json

_PATH = "dataset.difficulty.samples"
_FIX = "name the folder of `grpo eval RECIPE --split train`, or the output of `grpo probe RECIPE --json`"
_SCORE = int | float | None


def read_solve_rates(path: str, right: Mapping[str, float]) -> dict[str, float]:
    """Return the share of right answers of each prompt, by its canonical JSON.

    The path is an evaluation's, or a file of samples; `right` has a right answer's score by reward.
    Raises `RecipeError` if there are no samples with these rewards, or the evaluation was not finished.
    """
    shares: dict[str, list[float]] = {}
    for sample in _read_samples(Path(path)):
        scores = sample["rewards"]
        if missing := right.keys() - scores.keys():
            seen = f"its samples have no reward `{min(missing)}`; they have {show_names(sorted(scores))}"
            raise recipe_error(seen, "measure again with the rewards of this recipe", _PATH)
        known = [scores[name] / best for name, best in right.items() if scores[name] is not None]
        if known:
            share = fmean(min(max(each, 0.0), 1.0) for each in known)
            shares.setdefault(canonical_json(sample["prompt"]), []).append(share)
    return {prompt: fmean(each) for prompt, each in shares.items()}


def find_matches(
    rates: Mapping[str, float], prompts: Sequence[Any], path: str
) -> list[float | None]:
    """Return the rate of each prompt; None if it has no samples; raises `RecipeError` if no prompt has one."""
    found = [rates.get(canonical_json(prompt)) for prompt in prompts]
    if all(rate is None for rate in found):
        seen = f"none of the {len(rates)} prompts of {path} is a training prompt, word for word"
        fix = (
            "measure the training rows with this recipe's prompt: `grpo eval RECIPE --split train`"
        )
        raise recipe_error(seen, fix, _PATH)
    return found


def _read_samples(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise recipe_error(f"there is no file or folder {path}", _FIX, _PATH)
    if (path / "samples").is_dir() and not (path / "result.json").is_file():
        seen = f"the evaluation in {path} was not finished"
        fix = "repeat its `grpo eval` with --resume, or name one of its files of samples"
        raise recipe_error(seen, fix, _PATH)
    files = sorted((path / "samples").glob("*.jsonl")) if path.is_dir() else [path]
    # `MODEL.PROCESS.jsonl`
    models = {file.name.rsplit(".", 2)[0] for file in files}
    if path.is_dir() and len(models) > 1:
        seen = f"{path} has samples of several models: {show_names(sorted(models))}"
        fix = f"name one of its files, such as {files[0]}"
        raise recipe_error(seen, fix, _PATH)
    samples = [sample for file in files for sample in _read_file(file)]
    if not samples:
        raise recipe_error(f"{path} has no samples", _FIX, _PATH)
    return samples


def _read_file(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a file with one a line, or of what a probe printed."""
    try:
        content = read_input(file)
        if file.suffix != ".jsonl":
            records = list(parse_json(content)["samples"])
        else:
            *lines, last = content.split(b"\n")
            records = [parse_json(line) for line in lines if line.strip()]
            # A killed process leaves its last line torn.
            with suppress(ValueError):
                records.append(parse_json(last))
    except (OSError, ValueError, KeyError, TypeError) as error:
        seen = f"{file} cannot be read as samples ({type(error).__name__}: {error})"
        raise recipe_error(seen, _FIX, _PATH) from error
    for each in records:
        if not (isinstance(each, dict) and each.keys() >= {"prompt", "rewards"}):
            continue
        scores = each["rewards"]
        if not isinstance(scores, dict) or not all(isinstance(v, _SCORE) for v in scores.values()):
            seen = f"{file} has a sample whose `rewards` are {scores!r:.60}, not a number for each reward"
            raise recipe_error(seen, _FIX, _PATH)
        yield each
