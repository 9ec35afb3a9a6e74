"""What a run has for its trackers besides its metrics: files, a few samples, held-out measurements."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import parse_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import read_records
from grpo_cli.runs.status import StatusFile

_SAMPLED_GROUPS = 10
"""Groups that are shown as text, spread evenly over the run; the files hold all."""
_MEANS = ("reward", "completion_length", "clipped", "likelihood_gap")


@dataclass(frozen=True)
class Sample:
    """One completion."""

    step: int
    prompt: str
    completion: str
    rewards: dict[str, float | None]


@dataclass(frozen=True)
class Contents:
    """What is handed to the trackers after a run."""

    name: str
    """The run's name in the trackers."""
    state: str
    """`completed`, `stopped` or `failed`."""
    files: dict[str, Path]
    """Name in the tracker → the file."""
    samples: list[Sample]
    measurements: list[tuple[int, dict[str, float]]]
    """Optimizer step → what was measured on held-out prompts: 0 is before training."""


def run_name(folder: RunFolder) -> str:
    """What trackers call a run, where the recipe does not say: its name and its folder's."""
    recipe = folder.read_recipe()
    return str(recipe.logging.extras.get("run_name") or f"{recipe.name}-{folder.path.name}")


def read_contents(folder: RunFolder) -> Contents:
    """Reads what a run has left behind; what is not there is left out."""
    status = StatusFile(folder.status).read()
    return Contents(
        run_name(folder),
        status.state,
        {str(path.relative_to(folder.path)): path for path in _find_files(folder)},
        list(_read_samples(folder)),
        list(_read_measurements(folder)),
    )


def flatten(values: Mapping[str, Any], prefix: str = "recipe") -> dict[str, Any]:
    """A recipe's values under dotted names, as MLflow wants parameters; lists stay whole."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            flat |= flatten(value, key)
        else:
            flat[key] = value
    return flat


def _find_files(folder: RunFolder) -> Iterator[Path]:
    named = [folder.recipe, folder.resolved, folder.manifest, folder.metrics, folder.report]
    for path in [
        *named,
        *sorted(folder.completions.glob("*.jsonl")),
        *sorted(folder.evaluations.glob("*.json*")),
    ]:
        if path.is_file():
            yield path


def _read_samples(folder: RunFolder) -> Iterator[Sample]:
    path = folder.completions / "rank_0.jsonl"
    for line in _pick_lines(path, _SAMPLED_GROUPS):
        try:
            group = parse_json(line)
            for index, completion in enumerate(group["completions"]):
                rewards = {name: values[index] for name, values in group["rewards"].items()}
                yield Sample(group["step"], _as_text(group["prompt"]), completion, rewards)
        except (ValueError, KeyError, TypeError, IndexError):
            # A killed process may leave a torn line.
            continue


def _pick_lines(path: Path, wanted: int) -> Iterator[bytes]:
    """Lines spread evenly over a file, the first and the last among them."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    picked = {round(index * (count - 1) / (wanted - 1)) for index in range(wanted)}
    with path.open("rb") as file:
        yield from (line for number, line in enumerate(file) if number in picked)


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _read_measurements(folder: RunFolder) -> Iterator[tuple[int, dict[str, float]]]:
    """The measurements by step, named like TRL's metrics, under `held_out/`."""
    step = 0
    for record in read_records(folder.metrics):
        if record.get("event") == "train":
            step = record.get("step", step)
        if record.get("event") != "measure":
            continue
        means = {name: record.get(name) for name in _MEANS}
        for kind in ("rewards", "accuracy"):
            means |= {f"{kind}/{name}": value for name, value in (record.get(kind) or {}).items()}
        known = {f"held_out/{name}": value for name, value in means.items() if value is not None}
        yield (0 if record.get("when") == "before" else step), known
