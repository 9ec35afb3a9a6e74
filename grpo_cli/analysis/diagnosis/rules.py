"""Every rule, in the order in which they are listed: causes before what comes of them."""

from grpo_cli.analysis.diagnosis import (
    held_out,
    lengths,
    progress,
    rates,
    rewards,
    sampling,
    signal,
    stability,
)
from grpo_cli.analysis.diagnosis.rule import Rule

_ORDER = """nan_loss too_high_learning_rate too_low_learning_rate sampling_mismatch kl_runaway
    entropy_collapse entropy_explosion gradient_spike clip_share absent_reward no_signal constant_reward
    reward_swamped rewards_apart held_out_collapse held_out_loss held_out_gap early_peak falling_reward
    repeated_answers length_explosion length_collapse truncation all_solved slow_reward sampling_starves""".split()
_ALL = (
    *stability.RULES,
    *rates.RULES,
    *signal.RULES,
    *lengths.RULES,
    *rewards.RULES,
    *held_out.RULES,
    *progress.RULES,
    *sampling.RULES,
)

RULES: tuple[Rule, ...] = tuple(sorted(_ALL, key=lambda rule: _ORDER.index(rule.name)))
"""The table of rules."""
