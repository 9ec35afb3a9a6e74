"""Every rule, applied to a run: to a finished one, or to one in progress as its records come."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.analysis.diagnosis import episodes, progress, rewards, signal, stability
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rule import Rule, Skip, Symptom
from grpo_cli.analysis.metrics import group_reasons
from grpo_cli.issues import Level

_LOG = logging.getLogger(__name__)
LEVELS: tuple[Level, ...] = ("error", "warning", "note")

RULES: tuple[Rule, ...] = (
    stability.nan_loss,
    stability.too_high_learning_rate,
    stability.too_low_learning_rate,
    signal.sampling_mismatch,
    stability.kl_runaway,
    stability.entropy_collapse,
    stability.entropy_explosion,
    stability.gradient_spike,
    stability.clip_share,
    episodes.tool_failures,
    episodes.malformed_calls,
    episodes.budget_ends_episodes,
    episodes.tools_unused,
    episodes.repeated_calls,
    rewards.reward_failures,
    rewards.absent_reward,
    signal.no_signal,
    signal.source_starves,
    rewards.constant_reward,
    rewards.reward_swamped,
    rewards.rewards_apart,
    progress.held_out_collapse,
    progress.held_out_loss,
    progress.held_out_gap,
    progress.early_peak,
    progress.falling_reward,
    progress.flat_reward,
    signal.source_forgets,
    signal.repeated_answers,
    signal.length_explosion,
    signal.length_collapse,
    signal.truncation,
    signal.all_solved,
    rewards.slow_reward,
    episodes.slow_tool,
    signal.sampling_starves,
)
"""In the order in which they are listed: within a level, causes come before effects."""


@dataclass(frozen=True)
class Diagnosis:
    """What all rules found in a run."""

    symptoms: tuple[Symptom, ...] = ()
    """The worst first."""
    skipped: Mapping[str, Skip] = field(default_factory=dict)
    """Why rules could not be checked, by their names."""
    rules: int = len(RULES)
    meant: int = len(RULES)
    """How many of them are about recipes like this one."""

    @property
    def errors(self) -> tuple[Symptom, ...]:
        """Those by which the run learns nothing, or loses what it learned."""
        return tuple(each for each in self.symptoms if each.level == "error")

    @property
    def collapse(self) -> Symptom | None:
        """The answers became the same for all prompts: no number of the run is good news then."""
        rule = progress.held_out_collapse.name
        return next((each for each in self.symptoms if each.rule == rule), None)

    @property
    def checked(self) -> int:
        """How many rules could be checked."""
        return self.rules - len(self.skipped)

    @property
    def coverage(self) -> str:
        """How many rules could be checked, in words."""
        if not self.skipped:
            return f"{self.rules} rules checked"
        return f"{self.checked} of {self.rules} rules checked, {len(self.skipped)} skipped"

    def clean_verdict(self, when: str = "") -> str:
        """Return what to say if nothing was found: most rules may have had too few records."""
        short = sum(skip.needs_records for skip in self.skipped.values())
        verdict = (
            "too few records to find problems" if short > self.checked else "no problems found"
        )
        return f"{verdict}{when} ({self.coverage})"

    def skipped_by_reason(self) -> dict[str, list[str]]:
        """Return the names of the rules that could not be checked, by the reason."""
        return group_reasons((name, skip.reason) for name, skip in self.skipped.items())

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain values, for `--json`."""
        return {
            "symptoms": [each.as_json() for each in self.symptoms],
            "rules": self.rules,
            "not_looked": {name: skip.reason for name, skip in self.skipped.items()},
        }


def examine(history: History) -> Diagnosis:
    """Apply every rule, and say which could not be checked."""
    skipped = {rule.name: skip for rule in RULES if (skip := rule.skip(history))}
    meant = sum(rule.skip_reason(history.recipe) is None for rule in RULES)
    return Diagnosis(tuple(diagnose(history)), skipped, meant=meant)


def diagnose(history: History, names: Collection[str] | None = None) -> list[Symptom]:
    """Return what is wrong with a run by these rules, the worst first; None applies all."""
    symptoms = []
    for rule in RULES:
        if names is not None and rule.name not in names:
            continue
        try:
            symptom = rule.apply(history)
        except Exception:
            # A bug in a rule must not end a training or a display.
            _LOG.warning("the rule %s failed", rule.name, exc_info=True)
            continue
        if symptom is not None:
            symptoms.append(symptom)
    return sorted(symptoms, key=lambda each: LEVELS.index(each.level))
