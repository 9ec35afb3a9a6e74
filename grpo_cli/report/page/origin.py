"""What a run was made of, for people: facts, the settings of its recipe, its batch, its manifest.

Owns what is shown and what is kept back. Values are texts, not numbers.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_cli.batch import BatchPlan, plan_batch
from grpo_cli.preflight.arithmetic import batch_inputs
from grpo_cli.recipe.choices import list_choices
from grpo_cli.recipe.comparison import flatten
from grpo_cli.report.page.material import Material
from grpo_cli.units import format_duration

_LONGEST = 400
_TOLD_ELSEWHERE = ("expect", "name", "description")
_SECRET = frozenset({"environment", "env"})
"""Parts of a manifest that are never shown."""


@dataclass(frozen=True)
class Setting:
    """One setting."""

    path: str
    value: str
    default: str
    """In words, where there is none."""


def list_facts(run: Material) -> list[tuple[str, str]]:
    """What one wants to know first, beside the verdict."""
    manifest, change = run.manifest, run.reward_change()
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    found = {"steps": f"{run.step:,}{total}", "time": format_duration(run.seconds)}
    if change and run.recipe.is_sampled:
        found["training reward"] = f"{change[0]:.3f} → {change[1]:.3f}"
    name = run.gain.primary or ""
    measured = [each.get(name) for each in (run.gain.before, run.gain.after)]
    if any(measured):
        values = (
            "–" if each is None or each.value is None else f"{each.value:.3f}" for each in measured
        )
        found[f"held-out {name}"] = " → ".join(values)
    found["model"] = run.recipe.model.path
    found["device"] = _device(manifest)
    found["seed"] = str(run.recipe.seed)
    found["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.status.started_at))
    return [(name, value) for name, value in found.items() if value]


def _device(manifest: Mapping[str, Any]) -> str:
    seen, machine = manifest.get("accelerator"), manifest.get("hardware")
    if not isinstance(seen, dict) or not isinstance(machine, dict):
        return ""
    cores = f"{machine.get('cpus')} CPU cores"
    return cores if seen.get("device") == "cpu" else f"{seen.get('device')}, {cores}"


def list_settings(run: Material) -> list[Setting]:
    """What the recipe says, where it is not as by default."""
    return [
        Setting(
            each.path,
            show(each.value),
            show(each.default) if each.has_default else "–",
        )
        for each in list_choices(run.recipe)
        if each.path.partition(".")[0].partition("[")[0] not in _TOLD_ELSEWHERE
    ]


def show(value: Any) -> str:
    """A plain value as YAML would have it, on one line, and not without end."""
    text = (
        value
        if isinstance(value, str) and value
        else json.dumps(value, ensure_ascii=False, default=str)
    )
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


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


def list_origin(run: Material) -> list[tuple[str, str]]:
    """The manifest, line by line."""
    found = {name: value for name, value in run.manifest.items() if name not in _SECRET}
    rows = [(path, show(value)) for path, value in flatten(found) if value is not None]
    rows += [("attempts", str(run.folder.attempts))]
    resumed = flatten(run.folder.read_resumption())
    return rows + [(f"resumed.{path}", show(value)) for path, value in resumed if path]
