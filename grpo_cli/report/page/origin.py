"""What a run was made of, for people: facts, the settings of its recipe, its batch, its manifest.

Owns what is shown and what is kept back. Values are texts, not numbers.
"""

import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from math import inf
from pathlib import Path
from typing import Any

from grpo_cli.batch import BatchPlan, plan_batch
from grpo_cli.errors import GrpoError
from grpo_cli.preflight.arithmetic import batch_inputs
from grpo_cli.recipe.choices import list_choices
from grpo_cli.recipe.comparison import flatten
from grpo_cli.recipe.overrides import apply_overrides
from grpo_cli.recipe.yaml_tree import read_text
from grpo_cli.report.page.material import Course, Material
from grpo_cli.units import format_duration

_LONGEST = 400
_LONGEST_FACT = 30
_ENDLESS = 1_000_000
_WIDE, _WORTH_CUTTING = 60, 12
"""Characters: a value that a column has no room for, and a beginning that is worth leaving out."""
_CUT = re.compile(r"[/\\\s,{\[]")
_TOLD_ELSEWHERE = ("expect", "name", "description")
_ABSENT = object()
"""In the place of a setting that one of two recipes does not have."""
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


def list_facts(run: Material) -> list[tuple[str, str]]:
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
    found["model"] = show_path(run.recipe.model.path)
    found["device"] = _device(manifest)
    found["seed"] = str(run.recipe.seed)
    found["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.status.started_at))
    return [(name, value) for name, value in found.items() if value]


def show_course(course: Course) -> str:
    """Where a metric began and ended, such as `0.100 → 0.700`, and whether that is more than noise."""
    change = course.change
    noise = (
        " (no more than noise)"
        if change.difference and 0 < course.margin < inf and course.is_noise
        else ""
    )
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


def list_settings(run: Material) -> list[Setting]:
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


def read_given(run: Material) -> frozenset[str] | None:
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


def show(value: Any, most: int = _LONGEST) -> str:
    """A plain value as YAML would have it, on one line, and not without end: the middle is left out."""
    text = (
        value
        if isinstance(value, str) and value
        else json.dumps(value, ensure_ascii=False, default=str)
    )
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def show_apart(values: Sequence[Any]) -> list[str]:
    """Values that differ, without the long beginning that all of them share."""
    texts = [show(value, _ENDLESS) for value in values]
    alike = (len(set(letters)) == 1 for letters in zip(*texts, strict=False))
    shared = sum(takewhile(bool, alike))
    # Whole words and folders, and two of them, so that one sees where the rest belongs.
    cut = _CUT.search(texts[0][:shared][::-1])
    start = shared - cut.end() if cut else 0
    if max(map(len, texts)) <= _WIDE or start < _WORTH_CUTTING:
        return [show(text) for text in texts]
    return [show(f"…{text[start:]}") for text in texts]


def say_differences(settings: Mapping[str, Sequence[Any]], base: str, run: str) -> str:
    """In words, what a run's measurement had otherwise than the base's: of nested values, what differs."""
    return "; ".join(
        part
        for name, (then, now) in settings.items()
        for part in _say_pair(name, then, now, (base, run))
    )


def _say_pair(name: str, then: Any, now: Any, runs: tuple[str, str]) -> Iterator[str]:
    if name == "data":
        yield "the data is another"
    elif isinstance(then, list) and isinstance(now, list):
        for index, (old, new) in enumerate(zip_longest(then, now, fillvalue=_ABSENT)):
            yield from _say_pair(f"{name}[{index}]", old, new, runs)
    elif isinstance(then, dict) and isinstance(now, dict) and then.get("kind") == now.get("kind"):
        for key in dict.fromkeys((*then, *now)):
            yield from _say_pair(
                f"{name}.{key}", then.get(key, _ABSENT), now.get(key, _ABSENT), runs
            )
    elif _ABSENT in (then, now):
        found, place = (then, runs[0]) if now is _ABSENT else (now, runs[1])
        yield f"{name}{_say_kind(found, ' ({})')} is in {place} alone"
    elif then != now:
        shown = show_apart([_say_kind(each, "{}") or each for each in (then, now)])
        yield f"{name} is {shown[1]}, and {shown[0]} in {runs[0]}"


def _say_kind(value: Any, form: str) -> str:
    """What a section calls itself, where it has a kind."""
    return form.format(value["kind"]) if isinstance(value, dict) and "kind" in value else ""


def read_batch(run: Material) -> BatchPlan | None:
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


def list_origin(run: Material) -> list[tuple[str, str]]:
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
