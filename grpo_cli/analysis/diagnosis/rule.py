"""A diagnosis rule: metrics, threshold, source, message."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.issues import Issue
from grpo_cli.recipe.model import FULL, LORA, Rates, rates_of
from grpo_cli.recipe.recipe import Recipe

AXOLOTL = (
    "axolotl's guide to stability "
    "(github.com/axolotl-ai-cloud/axolotl, docs/training_stability.qmd, Key Metrics for RL)"
)
PROBE = "where `grpo probe` warns"
_OURS = re.compile(r"tools/|episode/|sources/|time/|rewards/NAME/(?:seconds|error_share)|eval/")
"""Metrics and files that other tools do not have."""
_ONLY_OURS = "only runs of `grpo train` log what is needed"
_SLOWER = 5
"""By how much a learning rate that is not unusual is divided."""
_SYMPTOM_KEYS = "rule level step seen why fix metric window threshold source".split()
_RULE_KEYS = "name title metric window threshold source why".split()


@dataclass(frozen=True)
class Symptom(Issue):
    """What a rule found wrong with a run. `error`: the run learns nothing, or loses what it learned."""

    rule: str = ""
    """The rule's name, as `training.stop_when` takes it."""
    step: int = 0
    """The optimizer step of the last record that shows it."""
    metric: str = ""
    window: int = 0
    threshold: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.rule} (step {self.step}): {self.seen}. {self.why} Fix: {self.fix}"

    def as_json(self) -> dict[str, Any]:
        """Return the symptom as plain values, for `--json`."""
        return {name: getattr(self, name) for name in _SYMPTOM_KEYS}


Check = Callable[[History], Issue | None]


class Skip(NamedTuple):
    """Why a rule cannot be checked."""

    reason: str
    needs_records: bool = False
    """Whether more records will change that."""


def always(recipe: Recipe) -> str | None:
    """Return None: the rule applies to every recipe."""
    return None


def sampled_only(recipe: Recipe) -> str | None:
    """Return why a rule about sampling does not apply to a recipe, or None."""
    return None if recipe.is_sampled else "scored data is not sampled"


def rewarded_only(recipe: Recipe) -> str | None:
    """Return why a rule about what rewards teach does not apply to a recipe, or None."""
    alone = None if recipe.learns_from_rewards else "only the teacher is learned from"
    return sampled_only(recipe) or alone


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong with a run, and how it is reported.

    It decorates its check, whose name is the rule's, and whose docstring says why the finding matters.
    """

    title: str
    metrics: tuple[str, ...]
    """Required metrics, named as in `metrics.jsonl`; NAME stands for any reward."""
    threshold: str = field(kw_only=True)
    source: str = field(kw_only=True)
    """Where the threshold comes from; `ours: ` and the reason if it is our own."""
    window: int = field(default=10, kw_only=True)
    """Number of newest records that are checked; 0 for rules that read held-out answers instead."""
    min_records: int = field(default=10, kw_only=True)
    """Records of these metrics that the check needs."""
    skip_reason: Callable[[Recipe], str | None] = field(default=sampled_only, kw_only=True)
    settings: tuple[str, ...] = field(default=(), kw_only=True)
    """The recipe's keys of settings that the check needs; a log of another tool may not tell them."""
    check: Check = field(default=lambda history: None, kw_only=True)

    def __call__(self, check: Check) -> Self:
        """Return the rule with its check."""
        return replace(self, check=check)

    @property
    def name(self) -> str:
        """As in `training.stop_when`."""
        return self.check.__name__

    @property
    def why(self) -> str:
        """Why it matters, in one sentence."""
        return self.check.__doc__ or ""

    @property
    def metric(self) -> str:
        """The metrics in words."""
        return ", ".join(self.metrics)

    def skip(self, history: History) -> Skip | None:
        """Return why the rule cannot be checked, yet or ever; None if it can."""
        reason, is_own = self.skip_reason(history.recipe), history.advice.is_own
        if reason is not None and is_own:
            return Skip(reason)
        if not self.window and is_own:
            both = history.answers_before and history.answers_after
            return None if both else Skip("no held-out answers from before and after training")
        if history.lost_at is not None and self.name == "nan_loss":
            return None
        counts = {metric: history.count(metric) for metric in self.metrics}
        if missing := [metric for metric, count in counts.items() if not count]:
            ours = (not is_own and not self.window) or any(map(_OURS.match, missing))
            return Skip(_ONLY_OURS if ours and not is_own else f"{', '.join(missing)} not logged")
        if reason is not None:
            return Skip(reason)
        if unknown := history.advice.unknown.intersection(self.settings):
            names = ", ".join(map(history.advice.name, sorted(unknown)))
            return Skip(f"{names} not known")
        few = min(counts.values())
        if few >= self.min_records:
            return None
        return Skip(f"{few} of {self.min_records} records", needs_records=True)

    def apply(self, history: History) -> Symptom | None:
        """Check a history; None if nothing is wrong or the rule cannot be checked."""
        issue = None if self.skip(history) else self.check(history)
        if issue is None:
            return None
        own = {name: getattr(self, name) for name in "why metric window threshold source".split()}
        return Symptom(**{**vars(issue), **own, "rule": self.name, "step": history.metrics.step})

    def as_json(self) -> dict[str, Any]:
        """Return the rule as plain values, for `--json`."""
        return {**{name: getattr(self, name) for name in _RULE_KEYS}, "fewest": self.min_records}


RATE = "training.learning_rate"


def usual_rates(history: History) -> Rates:
    """Return the usual learning rates of a run; of both kinds if it is not known whether it trains adapters."""
    if "model.lora" in history.advice.unknown:
        return Rates(FULL.least, FULL.usual, LORA.most)
    return rates_of(history.recipe.model)


def slower(history: History) -> str:
    """Return the fix of a lower learning rate: a fraction of it, or the usual one if it is far above."""
    rate, rates = history.recipe.training.learning_rate, usual_rates(history)
    # The usual one, if it may be that of adapters.
    usual = LORA.usual if "model.lora" in history.advice.unknown else rates.usual
    lower = usual if rate > rates.most else rate / _SLOWER
    return history.advice.edit(RATE, f"{lower:.2g}", "a lower")


def faster(history: History) -> str:
    """Return the fix of a higher learning rate: the usual one, or twice one that is as high and may be higher."""
    higher, rates = 2 * history.recipe.training.learning_rate, usual_rates(history)
    if higher > rates.most:
        return slower(history)
    return history.advice.edit(RATE, f"{max(rates.usual, higher):.2g}", "a higher")


def more_kl(history: History) -> str:
    """Return the fix of a KL term, or of twice the one that is set."""
    recipe = history.recipe
    if recipe.teacher is not None:
        return f"`teacher.weight: {2 * recipe.teacher.weight:g}`"
    beta = recipe.setting("beta") or 0.0
    return history.advice.edit("training.beta", f"{2 * beta or 0.01:g}", "a larger")


def try_rewards(history: History) -> str:
    """Return the command that shows how rewards score answers."""
    if not history.advice.is_own:
        return "calling the reward functions on right and wrong answers"
    return f"`grpo rewards test {shlex.quote(history.source)}`"


def on_run(history: History, command: str, flags: str = "") -> str:
    """Return a command on the run itself."""
    return f"`{' '.join(filter(None, ('grpo', command, shlex.quote(history.run), flags)))}`"
