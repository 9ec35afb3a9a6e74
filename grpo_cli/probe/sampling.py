"""The part of a probe that needs the model: completions sampled, scored and judged, a step timed."""

import os
import time
from collections.abc import Iterator
from typing import Any

from grpo_cli.analysis.samples import ScoredCompletion, score_samples
from grpo_cli.checks.fast import settle_fast
from grpo_cli.checks.settings import read_setting
from grpo_cli.issues import Finding
from grpo_cli.machine import usable_cpus
from grpo_cli.probe import cost, signal
from grpo_cli.probe import resource_checks as resource_checks
from grpo_cli.probe import signal_checks as signal_checks
from grpo_cli.probe.session import Session, spread
from grpo_cli.rewards.building import right_scores

_BUSY = 0.5
"""Share of the processors that other programs may take before measured times are doubted."""


def sample_and_judge(session: Session, wanted: int) -> None:
    """Samples completions of `wanted` prompts with the real model, and takes one training step.

    What does not fit into memory is left out, since the survey has said so already.

    Raises:
        GrpoError: The model cannot be loaded.
    """
    weights = session.shape.weight_bytes if session.shape else 0
    if not _fits(session, weights):
        session.add([_not_sampled()])
        return
    session.add(_check_load())
    chosen = _choose_rows(session, wanted)
    if chosen is None:
        # The survey has said which prompts do not fit.
        return
    outcome = None
    with session.failing("sampling", "a training would meet the same", "training"):
        outcome = _run(session, list(chosen["prompt"]))
    if outcome is None:
        return
    session.tell("scoring")
    began = time.perf_counter()
    scored: list[ScoredCompletion] = []
    with session.failing("rewards: failure", "the same error would end the training", "rewards"):
        scored = score_samples(session.rewards, chosen.to_dict(), outcome.sampled)
    if scored:
        score_s = (time.perf_counter() - began) / len(scored)
        _judge(session, scored)
        _judge_time(session, outcome, score_s)


def _check_load() -> Iterator[Finding]:
    """Other programs on the processors, which make every measured second longer."""
    cpus = usable_cpus()
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > _BUSY * cpus + 1:
        yield Finding(
            "cost: time",
            "note",
            f"about {busy - 1:.1f} of {cpus} processors are busy with other programs",
            "probe again when they are done",
            "the times measured here are longer than they will be",
        )


def _fits(session: Session, size: int) -> bool:
    available = session.probe.memory_available
    return available is None or size <= available


def _not_sampled() -> Finding:
    return Finding(
        "signal",
        "note",
        "nothing was sampled: the weights alone do not fit into this machine's memory",
        "run the probe where the training will run",
    )


def _choose_rows(session: Session, wanted: int) -> Any:
    """Rows spread evenly over those whose prompts are neither dropped nor too long to be answered."""
    train, sample = session.data.train, session.probe.prompts
    if sample is None:
        return None
    limits = [session.recipe.dataset.max_prompt_length]
    if session.shape is not None and session.shape.context is not None:
        completion = session.recipe.generation.max_completion_length
        limits.append(session.shape.context - completion)
    longest = min((limit for limit in limits if limit is not None), default=sample.longest)
    pairs = zip(sample.places, sample.lengths, strict=True)
    kept = [place for place, length in pairs if length <= longest]
    return train.select([kept[index] for index in spread(len(kept), wanted)]) if kept else None


def _run(session: Session, prompts: list[Any]) -> Any:
    from grpo_cli.probe.model_run import run_model

    memory = session.probe.memory
    return run_model(
        session.recipe,
        session.tokenizer,
        prompts,
        batch_size=session.sampled_at_once(),
        rehearse_step=memory is None or _fits(session, memory.peak_bytes),
        tell=session.tell,
    )


def _judge(session: Session, scored: list[ScoredCompletion]) -> None:
    probe, recipe = session.probe, session.recipe
    right = right_scores(recipe.rewards, (each.rewards for each in scored))
    probe.samples = scored
    probe.signal = signal.read_signal(scored, right)
    probe.lengths = signal.read_lengths(scored, recipe.generation.max_completion_length)
    masked = bool(read_setting(recipe, "mask_truncated_completions"))
    room = _room(session)
    session.add(signal_checks.judge(probe.signal, probe.lengths, masked=masked, room=room))


def _room(session: Session) -> int | None:
    """Tokens that the model's context leaves for a completion of the longest prompt."""
    context = session.shape.context if session.shape else None
    if context is None or session.probe.prompts is None:
        return None
    kept = session.probe.prompts.kept(session.recipe.dataset.max_prompt_length)
    return max(context - max(kept), 1) if kept else None


def _judge_time(session: Session, outcome: Any, score_s: float) -> None:
    timing, plan = outcome.timing, session.plan
    if timing is None or plan is None:
        return
    timings = cost.Timings(
        sample_s=outcome.sample_s,
        measure_s=outcome.measure_s,
        score_s=score_s,
        forward_s=timing.forward_s,
        micro_step_s=timing.micro_step_s,
        update_s=timing.update_s,
        learned=_learned_share(session, timing.tokens),
        resampled=sum(_silent_shares(session)[:-1]),
    )
    held = session.data.report.eval_rows or 0
    session.probe.time = cost.estimate_time(session.recipe, plan, timings, held)
    if session.probe.time is not None:
        session.add(resource_checks.judge_time(session.recipe, session.probe.time))


def _learned_share(session: Session, padded: int) -> float:
    """How many of a micro-batch's tokens are computed, going by the completions that were sampled."""
    recipe, samples, prompts = session.recipe, session.probe.samples, session.probe.prompts
    fast = settle_fast(recipe)
    size, signal_share = recipe.training.per_device_train_batch_size, 1.0
    if fast.no_signal:
        signal_share -= _silent_shares(session)[-1]
    if not fast.shared_prompts or not samples or prompts is None:
        return signal_share
    prompt = sum(prompts.lengths) / len(prompts.lengths) / recipe.generation.num_generations
    completion = sum(each.tokens for each in samples) / len(samples)
    return signal_share * min(size * (prompt + completion) / padded, 1.0)


def _silent_shares(session: Session) -> list[float]:
    dynamic = session.recipe.generation.dynamic_sampling
    silent = session.probe.signal.frac_reward_zero_std if session.probe.signal else 0.0
    return cost.shares_after(silent, dynamic.max_resample if dynamic else 0)
