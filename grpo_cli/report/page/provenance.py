"""What a run was made of, for people: facts, the settings of its recipe, its batch, its manifest.

Owns what is shown and what is kept back. Values are texts, not numbers.
"""

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from typing import Any

from grpo_cli.batch import BatchPlan, plan_batch
from grpo_cli.checks.arithmetic import batch_inputs
from grpo_cli.errors import GrpoError
from grpo_cli.recipe.choices import list_choices
from grpo_cli.recipe.comparison import flatten
from grpo_cli.recipe.overrides import apply_overrides
from grpo_cli.recipe.yaml_tree import read_text
from grpo_cli.report.page.run_data import Course, RunData
from grpo_cli.report.page.values import show
from grpo_cli.units import format_duration

_LONGEST_FACT = 30
_TOLD_ELSEWHERE = ("expect", "name", "description")
_FILLED_IN = frozenset({"launch.num_processes"})
"""Settings that are `auto` by default, and that a launch writes down as what they came to."""
_SECRET = frozenset({"environment", "env"})
"""Parts of a manifest that are never shown."""
_REWORDED = frozenset({"argv", "git", "model"})
"""Parts that are told in words."""


@dataclass(frozen=True)
class Setting:
    """One setting."""

    path: str
    value: str
    default: str
    """In words, where there is none."""


def list_facts(run: RunData) -> list[tuple[str, str]]:
    """What one wants to know first, beside the verdict."""
    manifest, course = run.manifest, run.course("reward")
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    found = {"steps": f"{run.step:,}{total}", "time": format_duration(run.seconds)}
    if course and run.recipe.is_sampled:
        found["training reward"] = show_course(course)
    name = run.gain.primary or ""
    measured = [each.get(name) for each in (run.gain.before, run.gain.after)]
    if any(measured):
        values = (
            "–" if each is None or each.value is None else f"{each.value:.3f}" for each in measured
        )
        sampling = f", {run.gain.sampling}" if run.gain.sampling else ""
        found[f"held-out {name}{sampling}"] = " → ".join(values).replace("-", "−")
    found["learning rate"] = f"{run.recipe.training.learning_rate:g}"
    found["model"] = show_path(run.recipe.model.path)
    if run.recipe.training.mode == "async":
        found["training"] = "asynchronous (experimental)"
    found["device"] = _device(manifest)
    found["seed"] = str(run.recipe.seed)
    found["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.status.started_at))
    return [(name, value) for name, value in found.items() if value]


def show_course(course: Course) -> str:
    """Where a metric began and ended, such as `0.100 → 0.700`, and whether that may be noise."""
    change, noise = course.change, ""
    if change.difference and course.is_noise:
        noise = " (noise not known)" if isinf(course.margin) else " (no more than noise)"
    return f"{change.before:.3f} → {change.now:.3f}{noise}".replace("-", "−")


def show_path(path: str) -> str:
    """A long path by its last two parts; ids of a hub and short paths as they are."""
    parts = re.split(r"[/\\\\]", path)
    return path if len(path) <= _LONGEST_FACT or len(parts) < 3 else f"…/{'/'.join(parts[-2:])}"


def share_facts(facts: Sequence[Sequence[tuple[str, str]]]) -> dict[str, str]:
    """The facts that are the same of several runs: a column of them tells nothing."""
    first, *others = map(dict, facts)
    return {
        name: value
        for name, value in first.items()
        if all(each.get(name) == value for each in others)
    }


def _device(manifest: Mapping[str, Any]) -> str:
    seen, machine = manifest.get("accelerator"), manifest.get("hardware")
    if not isinstance(seen, dict) or not isinstance(machine, dict):
        return ""
    cores = f"{machine.get('cpus')} CPU cores"
    return cores if seen.get("device") == "cpu" else f"{seen.get('device')}, {cores}"


def list_settings(run: RunData) -> list[Setting]:
    """What the recipe says: what is not as by default, and what was set to its default all the same."""
    given = read_given(run)
    found = [
        Setting(each.path, show(each.value), show(each.default) if each.has_default else "–")
        for each in list_choices(run.recipe)
        if _is_given(each.path, given)
    ]
    chosen = [each.path for each in found]
    plain = dict(flatten(run.recipe.model_dump(mode="json")))
    found += [
        Setting(path, show(plain[path]), "the same")
        for path in given or ()
        if path in plain and not any(_lies_in(path, each) for each in chosen)
    ]
    return [each for each in found if re.split(r"[.\[]", each.path)[0] not in _TOLD_ELSEWHERE]


def read_given(run: RunData) -> frozenset[str] | None:
    """The paths that the recipe and its overrides name; None where parents of it may name more."""
    try:
        tree = read_text(run.folder.recipe.read_text(encoding="utf-8"), "recipe.yaml")
        if not isinstance(tree.value, dict) or "extends" in tree.value:
            return None
        apply_overrides(tree, list_overrides(run.manifest))
    except (OSError, ValueError, GrpoError):
        return None
    return frozenset(path for path, _ in flatten(tree.plain()))


def list_overrides(manifest: Mapping[str, Any]) -> list[str]:
    """The `--set` texts of the command that started a run."""
    command = _read_command(manifest)
    pairs = [command[at + 1] for at, each in enumerate(command[:-1]) if each == "--set"]
    return pairs + [each.removeprefix("--set=") for each in command if each.startswith("--set=")]


def _read_command(manifest: Mapping[str, Any]) -> list[str]:
    command = manifest.get("argv")
    return [str(each) for each in command] if isinstance(command, list) else []


def _is_given(path: str, given: frozenset[str] | None) -> bool:
    """Whether somebody wrote a setting; of a recipe with parents, all but what every launch fills in."""
    if given is None:
        return path not in _FILLED_IN
    return any(_lies_in(path, each) or _lies_in(each, path) for each in given)


def _lies_in(path: str, section: str) -> bool:
    return path == section or path.startswith((f"{section}.", f"{section}["))


def read_batch(run: RunData) -> BatchPlan | None:
    """The batch arithmetic of the launch; None where it is not known on how many processes."""
    processes = run.plan.get("num_processes")
    data = run.manifest.get("data")
    rows = data if isinstance(data, dict) else {}
    if not isinstance(processes, int) or processes < 1 or not run.recipe.is_sampled:
        return None
    prompts, held_out = (
        rows.get(name) if isinstance(rows.get(name), int) else None
        for name in ("train_rows", "eval_rows")
    )
    return plan_batch(batch_inputs(run.recipe, processes, prompts, held_out))


def show_command(manifest: Mapping[str, Any]) -> str:
    """The command that started a run, as a shell takes it."""
    program, *rest = _read_command(manifest) or [""]
    # Started with `python -m grpo_cli`, it bears the name of the module's file.
    own = Path(program).name in ("__main__.py", "grpo", "grpo.exe")
    return shlex.join(["grpo" if own else program, *rest])


def list_origin(run: RunData) -> list[tuple[str, str]]:
    """The manifest, line by line."""
    manifest = run.manifest
    found = {
        name: value
        for name, value in manifest.items()
        if name not in _SECRET and not (name in _REWORDED and not isinstance(value, dict))
    }
    rows = [("command", show_command(manifest))] if _read_command(manifest) else []
    if "git" in manifest and manifest["git"] is None:
        rows += [("git", "not in a git repository")]
    rows += [(path, show(value)) for path, value in flatten(found) if path and value is not None]
    if isinstance(manifest.get("model"), str):
        rows += [("fingerprint of the model's files", manifest["model"])]
    rows += [("attempts", str(run.folder.attempts))]
    resumed = flatten(run.folder.read_resumption())
    return rows + [(f"resumed.{path}", show(value)) for path, value in resumed if path]
