"""What is wrong with sampled completions and their scores, and what to change.

Owns the limits beyond which something is worth a finding. The statistics are `signal.py`'s.
"""

from collections.abc import Iterator

from grpo_cli.issues import Finding, FindingLevel
from grpo_cli.probe.signal import FLAT, Lengths, PassRate, Signal, Spread

DEAD, WEAK = 0.9, 0.75
"""Shares of groups without spread: from the first on nothing is learned, from the second on little."""
ENOUGH_PROMPTS = 8
"""Fewer prompts are no ground for an error: a poor sample of a good recipe looks the same."""
CLIPPED, MOSTLY_CLIPPED = 0.5, 0.9
"""Shares of completions cut off at the limit: worth a note, and nearly all of them."""
LOPSIDED = 0.8
"""Share of prompts that are all right, or all wrong, beyond which the data does not fit the model."""


def judge(
    signal: Signal, lengths: Lengths, *, masked: bool, room: int | None = None
) -> Iterator[Finding]:
    """What is wrong with the completions and their scores.

    Args:
        signal: Of the scores.
        lengths: Of the same completions.
        masked: `mask_truncated_completions`.
        room: Tokens that the context leaves for a completion; None where it has no limit.
    """
    yield from _judge_lengths(lengths, signal, masked=masked, room=room)
    if lengths.clipped >= MOSTLY_CLIPPED and signal.frac_reward_zero_std >= WEAK:
        # Nearly all are cut off: nothing else can be told from them.
        return
    yield from _judge_groups(signal)
    for name, spread in signal.rewards.items():
        yield from _judge_reward(name, spread, signal)
    for rate in signal.pass_rates:
        yield from _judge_rate(rate)


def _sure(signal: Signal, level: FindingLevel) -> FindingLevel:
    """The level that so many prompts can carry."""
    return "warning" if level == "error" and signal.prompts < ENOUGH_PROMPTS else level


def _doubt(signal: Signal) -> str:
    few = signal.prompts < ENOUGH_PROMPTS
    return "; so few prompts prove little (--prompts 16)" if few else ""


def _judge_groups(signal: Signal) -> Iterator[Finding]:
    if signal.frac_reward_zero_std < WEAK:
        return
    dead = signal.frac_reward_zero_std >= DEAD
    fix, path = _advise(signal)
    yield Finding(
        "signal: groups without spread",
        _sure(signal, "error" if dead else "warning"),
        f"in {signal.frac_reward_zero_std:.0%} of {signal.prompts} groups every completion has the same "
        f"total reward (mean {_show(signal.total.mean)}){_doubt(signal)}",
        fix,
        "equal rewards give zero advantage, so these groups have no gradient",
        path,
    )


def _judge_reward(name: str, spread: Spread, signal: Signal) -> Iterator[Finding]:
    if spread.mean is None:
        yield Finding(
            "signal: reward without a score",
            "warning",
            f"`{name}` gave no score to any of {signal.completions} completions",
            "correct its `when`, or its gold column: grpo rewards test",
            "it takes no part in training",
            "rewards",
        )
    elif spread.std <= FLAT and len(signal.rewards) > 1 and signal.frac_reward_zero_std < DEAD:
        yield Finding(
            "signal: constant reward",
            "warning",
            f"`{name}` gave {spread.mean:g} to all {signal.completions} completions",
            "ask for it in the prompt, reward a first step towards it, or remove it",
            "a reward that never changes teaches nothing",
            "rewards",
        )


def _advise(signal: Signal) -> tuple[str, str]:
    """What to change, by what the completions look like, and where in the recipe."""
    if all(spread.mean is None for spread in signal.rewards.values()):
        return (
            "correct `when`, or the golds: no reward gave any score (grpo rewards test)",
            "rewards",
        )
    if signal.alike_groups >= WEAK:
        return (
            "set `temperature: 1.0` and `top_k: 0`: the completions of a group are the same text",
            "generation.temperature",
        )
    if signal.cancelled_groups > signal.frac_reward_zero_std / 2:
        return (
            "correct the weights: rewards differ within groups, their weighted sum does not",
            "rewards",
        )
    rates = signal.pass_rates
    if rates and rates[0].too_easy > rates[0].too_hard:
        return "take harder prompts: these are solved already", "dataset"
    if rates and rates[0].too_hard:
        return (
            "take easier prompts or a stronger model, show the wanted form in the prompt, or add a "
            "reward for a first step (a format, a partial answer)",
            "dataset",
        )
    return "add a reward in which the completions of a prompt differ", "rewards"


def _judge_rate(rate: PassRate) -> Iterator[Finding]:
    prompts = len(rate.by_prompt)
    for count, what, fix in (
        (
            rate.too_hard,
            "no completion is right",
            "take easier prompts or a stronger model, or raise `num_generations`",
        ),
        (rate.too_easy, "every completion is right", "take harder prompts"),
    ):
        if count > LOPSIDED * prompts:
            yield Finding(
                "signal: difficulty",
                "warning",
                f"for {count} of {prompts} prompts {what} by `{rate.reward}` (pass rate {rate.rate:.0%}, "
                f"95 % interval {rate.low:.0%} to {rate.high:.0%})",
                fix,
                "only prompts with right and wrong completions teach which is which",
                "dataset",
            )


def _judge_lengths(
    lengths: Lengths, signal: Signal, *, masked: bool, room: int | None
) -> Iterator[Finding]:
    if lengths.clipped < CLIPPED:
        return
    most = lengths.clipped >= MOSTLY_CLIPPED
    hopeless = most and (masked or signal.frac_reward_zero_std >= DEAD)
    level: FindingLevel = "error" if hopeless else "warning" if most or masked else "note"
    longer = min(4 * lengths.limit if most else 2 * lengths.limit, room or 4 * lengths.limit)
    edit = f"set `max_completion_length: {longer}`, or " if longer > lengths.limit else ""
    why = (
        "completions that are cut off take no part in the loss (mask_truncated_completions)"
        if masked
        else "a completion that is cut off before its answer scores nothing, whatever it would have said"
    )
    flat = signal.frac_reward_zero_std
    beside = f", and {flat:.0%} of groups have no spread" if most and flat >= WEAK else ""
    yield Finding(
        "length: cut off",
        _sure(signal, level),
        f"{lengths.clipped:.0%} of completions are cut off at {lengths.limit} tokens{beside}"
        f"{_doubt(signal) if hopeless else ''}",
        f"{edit}ask for short answers in the prompt, and see that the model stops (stop tokens)",
        why,
        "generation.max_completion_length",
    )


def _show(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
