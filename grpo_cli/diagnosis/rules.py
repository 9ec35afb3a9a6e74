"""Every rule, in the order in which they are listed."""

from grpo_cli.diagnosis import lengths, progress, rewards, sampling, signal, stability
from grpo_cli.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = (
    *stability.RULES,
    *signal.RULES,
    *lengths.RULES,
    *rewards.RULES,
    *progress.RULES,
    *sampling.RULES,
)
"""The table of rules."""
