"""The part of a probe that needs the model: completions sampled, scored and judged, a step timed."""

import time
from typing import Any

from grpo_cli.measure.samples import ScoredCompletion, score_samples
from grpo_cli.preflight.finding import Finding
from grpo_cli.preflight.probe import cost, signal
from grpo_cli.preflight.probe.session import ROWS, Session, spread
from grpo_cli.preflight.settings import read_setting


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
    chosen = _choose_rows(session, wanted)
    outcome = None
    with session.failing("machine: memory", "a training needs more than sampling", "training"):
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
    """Rows spread evenly over those whose prompts are not too long to be trained on."""
    train, sample = session.data.train, session.probe.prompts
    limit = session.recipe.dataset.max_prompt_length
    lengths = sample.lengths if sample else ()
    kept = [
        place
        for place, length in zip(spread(len(train), ROWS), lengths, strict=True)
        if limit is None or length <= limit
    ]
    return train.select([kept[index] for index in spread(len(kept), wanted)])


def _run(session: Session, prompts: list[Any]) -> Any:
    from grpo_cli.preflight.probe.model_run import run_model

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
    right = {
        reward.name: reward.right_answer
        for reward in session.rewards
        if reward.right_answer is not None
    }
    probe.samples = scored
    probe.signal = signal.read_signal(scored, right)
    probe.lengths = signal.read_lengths(scored, recipe.generation.max_completion_length)
    session.add(signal.judge_signal(probe.signal, probe.lengths))
    masked = bool(read_setting(recipe, "mask_truncated_completions"))
    session.add(signal.judge_lengths(probe.lengths, probe.signal, masked=masked))


def _judge_time(session: Session, outcome: Any, score_s: float) -> None:
    rehearsal, plan = outcome.rehearsal, session.plan
    if rehearsal is None or plan is None:
        return
    timings = cost.Timings(
        sample_s=outcome.sample_s,
        score_s=score_s,
        forward_s=rehearsal.forward_s,
        micro_step_s=rehearsal.micro_step_s,
        update_s=rehearsal.update_s,
    )
    held = session.data.report.eval_rows or 0
    session.probe.time = cost.estimate_time(session.recipe, plan, timings, held)
    if session.probe.time is not None:
        session.add(cost.judge_time(session.recipe, session.probe.time))
